"""Specs: what reads, what is equal, and what is refused with a sentence that helps."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import CompositionError, Lockstep, SpecError, methods, parse
from gradwire.codecs import BF16, QSGD, BlockInt, Chain, Natural, RandomK, Scaled, TernGrad, TopK
from gradwire.core import grammar, registry
from gradwire.core.grain import flat_grain
from gradwire.core.nearest import fold
from gradwire.reducers import (
    EF21,
    AllGatherExchange,
    AllReduceExchange,
    CompressionWarmUp,
    ErrorFeedback,
    Guard,
    Partition,
    PowerSGD,
    SparseTwoShot,
    TwoShot,
)
from gradwire.spec import as_method

ROOT = Path(__file__).parents[1]


def test_a_bare_name_gets_what_suits_it() -> None:
    assert parse("topk:0.25") == Guard(ErrorFeedback(AllGatherExchange(TopK(0.25))))
    assert parse("bf16") == AllReduceExchange(BF16())
    assert parse("int4") == Guard(ErrorFeedback(TwoShot(BlockInt(4))))
    assert parse("qsgd:7") == Guard(TwoShot(QSGD(7)))
    assert parse("powersgd:2") == Guard(ErrorFeedback(PowerSGD(2)))
    assert parse(" topk:0.1+int8 ") == Guard(ErrorFeedback(AllGatherExchange(Chain(TopK(0.1), BlockInt(8)))))


def test_error_feedback_makes_a_contraction_of_an_unbiased_codec_whose_variance_is_known() -> None:
    assert parse("qsgd:7,ef=on") == Guard(ErrorFeedback(TwoShot(Scaled(QSGD(7)))))
    assert parse("terngrad:0,ef=on,exchange=allgather") == Guard(ErrorFeedback(AllGatherExchange(Scaled(TernGrad(0)))))
    assert parse("natural,ef=on") == Guard(ErrorFeedback(TwoShot(Natural())))  # one already
    assert parse("qsgd:7,ef=off") == parse("qsgd:7") == Guard(TwoShot(QSGD(7)))


def test_estimates_in_place_of_a_residual() -> None:
    assert parse("topk:0.01,ef=ef21") == Guard(EF21(AllGatherExchange(TopK(0.01))))
    assert parse("qsgd:7,ef=ef21") == Guard(EF21(TwoShot(Scaled(QSGD(7)))))
    for option in ("residual=bf16", "decay=0.9"):
        with pytest.raises(SpecError, match="ef21 keeps estimates"):
            parse(f"topk:0.01,ef=ef21,{option}")
    with pytest.raises(SpecError, match="on, off or ef21"):
        parse("topk:0.01,ef=ef22")


def test_what_would_pass_a_rule_or_do_nothing_is_refused() -> None:
    for spec in ("dp:1,warmup=10", "dp:1,vectors=off", "krum:1,vectors=off", "signsgd_mv,warmup=3"):
        with pytest.raises(SpecError, match="would send gradients past"):
            parse(spec)
    for spec in ("fp16,residual=bf16", "none,decay=0.5", "int4,ef=off,decay=0.5"):
        with pytest.raises(SpecError, match="option of error feedback"):
            parse(spec)
    for spec in ("dp", "clip"):
        with pytest.raises(SpecError, match="needs its"):
            parse(spec)
    assert parse("dp:1,vectors=on,warmup=0") == parse("dp:1")


def test_a_density_of_one_is_refused() -> None:
    """It could be meant as one entry, or as all of them, which is what it would be."""
    for spec in ("topk:1", "topk:1.0,ef=off", "dgc:1", "randomk:1+int8", "krum:1+topk:1,ef=off"):
        with pytest.raises(SpecError, match=r"density 1 .* write 'none'"):
            parse(spec)


def test_refusals_say_what_to_write_in_a_spec() -> None:
    for spec, remedy in {
        "topk:0.1,exchange=allreduce": "exchange=twoshot",
        "int4,exchange=ring": "exchange=allgather",
        "randomk:0.1,exchange=twoshot": "exchange=allreduce",
        "krum:1,ef=ef21": "ef=off",
        "median+topk:0.01": "ef=off",
        "dgc:0.01,worker_momentum=0.9": "leave worker_momentum out",
    }.items():
        with pytest.raises(CompositionError, match=remedy):
            parse(spec)


def test_no_method_has_an_option_that_all_have() -> None:
    """It could not be reached: the common one would take it."""
    common = {"exchange", "node", "ef", "decay", "residual", "warmup", "vectors", "guard", "weights"}
    for method in methods().values():
        hints = {f.name for f in dataclasses.fields(method.build)}  # type: ignore[arg-type]
        assert not hints & common, method.name


def test_a_rule_is_not_behind_a_guard_that_would_undo_it() -> None:
    """Four ranks of ones and one of NaN: the median is one."""
    ranks = Lockstep(parse("median"), flat_grain(3), world_size=5)
    means = ranks.step([torch.ones(3)] * 4 + [torch.full((3,), float("nan"))])
    assert all(torch.equal(mean, torch.ones(3)) for mean in means)


def test_two_processes_write_a_policy_alike() -> None:
    """Ranks compare their reducers by `repr`, in which no address may stand."""
    assert "0x" not in repr(parse("sign,vectors=off"))
    assert "is_vector" in repr(parse("sign,vectors=off"))


def test_two_shot_is_the_one_that_suits_the_codec() -> None:
    assert parse("topk:0.1,exchange=twoshot") == Guard(ErrorFeedback(SparseTwoShot(TopK(0.1))))
    assert parse("int4,exchange=twoshot") == Guard(ErrorFeedback(TwoShot(BlockInt(4))))


def test_options() -> None:
    assert parse("topk,density=0.1,values=bf16") == Guard(ErrorFeedback(AllGatherExchange(TopK(0.1, "bf16"))))
    assert parse("int8,exchange=allgather,ef=off,guard=off") == AllGatherExchange(BlockInt(8))
    assert parse("int8:64,decay=0.9") == Guard(ErrorFeedback(TwoShot(BlockInt(8, 64)), 0.9))
    warm = parse("sign,warmup=3")
    assert isinstance(warm, Guard)
    assert isinstance(warm.inner, CompressionWarmUp)
    assert warm.inner.steps == 3
    policy = parse("sign,vectors=off")
    assert isinstance(policy, Guard)
    assert isinstance(policy.inner, Partition)


def test_a_policy_tells_which_names_it_serves_nobody_by() -> None:
    rules = (("*.bias", AllReduceExchange(BF16())), ("embde*", AllReduceExchange(BF16())))
    policy = Guard(Partition(rules, default=AllGatherExchange(TopK(0.1))))
    assert policy.unmatched_globs(["embed.weight", "head.bias"]) == ["embde*"]
    assert parse("sign,vectors=off").unmatched_globs([]) == []


def test_only_what_shows_a_nan_by_itself_goes_unguarded() -> None:
    """Random-k may leave the NaN out, so it is guarded even without error feedback."""
    assert parse("randomk:0.2,scaled=on,ef=off") == Guard(AllReduceExchange(RandomK(0.2, scaled=True)))


@pytest.mark.parametrize("spec", [s for m in gradwire.methods().values() for s in m.examples])
def test_every_example_reads_and_prints(spec: str) -> None:
    assert repr(parse(spec)) == repr(parse(spec))
    assert parse(spec) == parse(spec)


MEANT = {
    "topk": ("topc:0.01", "top-k:0.01", "topK", "Top_K", "TOPK", "topk0.01", "sparsify"),
    "randomk": ("randk:0.1", "random-k", "rand"),
    "powersgd": ("power_sgd", "Power-SGD:4", "lowrank", "low_rank:4"),
    "acpsgd": ("acp_sgd", "ACP-SGD:4", "acp"),
    "int4": ("4bit", "4-bit", "4bits", "q4", "int4x", "uint4", "nf4"),
    "int8": ("8bit", "topk:0.01+8bit", "INT8", "quantize", "quantise"),
    "fp16": ("float16", "half", "16bit", "FP16"),
    "bf16": ("bfloat16",),
    "none": ("fp32", "float32", "allreduce"),
    "sign": ("1bit", "signsgd", "1-bit"),
    "onebit": ("one-bit", "1bit-adam"),
    "onebitadam": ("one_bit_adam", "OneBitAdam"),
    "local": ("locl:8", "Local"),
    "diloco": ("DiLoCo:20",),
    "ssp": ("SSP:4",),
    "fedadam": ("fed_adam:0.1",),
    "torch.fp32": ("torch.fp23", "torch.fp33"),
    "terngrad": ("ternary", "terngard"),
    "dgc": ("dgcc:0.001", "deep_gradient_compression"),
    "fp8": ("e5m2", "float8"),
    "dp": ("dpsgd:1", "privacy"),
    "rfa": ("geometric-median",),
    "clip": ("centered_clipping:1",),
}
"""By method: what people write who mean it."""

ADVISED = {
    "gradwire.wrap(optimizer, model, 'local:8,outer=int4')": ("localsgd:4", "local_sgd", "post_localSGD"),
    "it is an optimizer": ("0/1-adam", "orth-dion"),
    "otherwise than by fully_shard": ("fsdp1", "deepspeed", "zero3"),
    "attached to as they are": ("fsdp", "fully_shard", "hsdp"),
    "one bit is 'sign'": ("int1", "int0", "int16", "uint1"),
    "the optimizer to you": ("adam", "muon"),
    "int4,warmup=100": ("warmup", "warmup:100"),
    "none,exchange=ring": ("ring",),
    "ef=ef21": ("ef21", "error_feedback"),
    "`gradwire methods` lists all": ("zzz", "Å", "..."),
}
"""By a part of the answer: names that are no methods."""


def refusal(spec: str) -> str:
    with pytest.raises(SpecError) as raised:
        parse(spec)
    return str(raised.value)


@pytest.mark.parametrize(("spec", "name"), [(spec, name) for name, specs in MEANT.items() for spec in specs])
def test_an_unknown_method_is_answered_with_the_one_that_is_meant(spec: str, name: str) -> None:
    assert refusal(spec).endswith(f"did you mean {name!r}?")


@pytest.mark.parametrize(("spec", "advice"), [(spec, advice) for advice, specs in ADVISED.items() for spec in specs])
def test_what_is_no_method_is_answered_with_what_to_do(spec: str, advice: str) -> None:
    assert advice in refusal(spec)


@pytest.mark.parametrize(
    "spec",
    [
        *(spec for specs in (*MEANT.values(), *ADVISED.values()) for spec in specs),
        *(
            "",
            "topk:0.1+",
            "topk,decay",
            "topk:",
            "fp16:2",
            "topk:much",
            "int4,bits=5",
            "topk,exchange=x",
            "torch.powersgd",
        ),
    ],
)
def test_an_error_is_one_sentence(spec: str) -> None:
    text = refusal(spec)
    assert len(text) < 240
    assert not any(end in text for end in (". ", "? ", "\n", "{"))


def test_what_errors_recommend_can_be_built() -> None:
    names = ("warmup", "ring", "twoshot", "residual", "node", "weights", "exchange", "vectors", "worker_momentum")
    texts = [*registry.hints().values(), *(refusal(name) for name in names)]
    recommended = {spec for text in texts for spec in re.findall(r"'([a-z][^' ]*)'", text) if spec not in names}
    assert len(recommended) > 40
    for spec in recommended:
        bare = registry.table().get(spec)
        parse(bare.example if bare else spec)


def test_a_name_has_one_meaning() -> None:
    """No synonym is a method of its own, or leads to two."""
    meanings: dict[str, set[str]] = {}
    for method in methods().values():
        for name in {fold(alias) for alias in (method.name, *method.synonyms)}:
            meanings.setdefault(name, set()).add(method.name)
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("topk:0.1,densty=0.2", "did you mean 'density'?"),
        ("topk:0.1,valuse=bf16", "did you mean 'values'?"),
        ("topk:0.1,warmp=3", "did you mean 'warmup'?"),
        ("topk:0.1,error-feedback=on", "did you mean 'ef'?"),
        ("powersgd:4,error_feedback=on", "did you mean 'ef'?"),
        ("int4,bits=5", "known are block"),
        ("topk:0.1+int8,stochastic=on", "known are density"),
        ("topk,exchange=all_gather", "did you mean 'allgather'?"),
    ],
)
def test_unknown_options(spec: str, nearest: str) -> None:
    assert nearest in refusal(spec)


@pytest.mark.parametrize(
    ("spec", "wants"),
    [
        ("topk:much", "a number"),
        ("powersgd:2.5", "a whole number"),
        ("int4:8:9", "a whole number"),
        ("int4,stochastic=maybe", "on or off"),
        ("topk,warmup=1e3", "a whole number"),
        ("topk,decay", "name=value"),
        ("topk,decay=", "name=value"),
        ("topk,,", "name=value"),
        ("topk:", "density"),
        ("", "a method's name is missing"),
        ("topk:0.1+", "a method's name is missing"),
        ("torch.powersgd:0", "a rank of at least 1"),
        ("torch.fp16:4", "nothing after a colon"),
        ("fp16:2", "nothing after a colon"),
        ("topk,exchange=allgathr", "allgather"),
        ("powersgd:4+int8", "messages of its own"),
        ("powersgd:4,exchange=twoshot", "messages of its own"),
        ("topk:0.1+powersgd", "only codecs"),
        ("topk:0.1+local:8", "no codec"),
        ("int4,parameters=local:8", "no codec"),
        ("int4,parameters=int8,parameters=int4", "twice"),
        ("topk:density=0.1,density=0.2", "twice"),
        ("topk:0.1,(ef=on", "parentheses do not match"),
        ("topk:0.1,density=0.2", "twice"),
        ("topk,density=0.1,density=0.2", "twice"),
    ],
)
def test_what_cannot_be_read(spec: str, wants: str) -> None:
    assert wants in refusal(spec)


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("topk:0", "fraction"),
        ("topk:1.5", "fraction"),
        ("topk:nan", "fraction"),
        ("topk:-0.1", "fraction"),
        ("randomk:0", "fraction"),
        ("powersgd:0", "1, 2 or 4"),
        ("powersgd:-3", "1, 2 or 4"),
        ("powersgd,min_compression_rate=nan", "positive"),
        ("sign:7", "multiple of 8"),
        ("qsgd:0", "1 to 32767"),
        ("topk,values=fp8", "fp16"),
        ("topk,exchange=allreduce", "use exchange=twoshot (SparseTwoShot)"),
        ("topk,values=fp16,exchange=twoshot", "bf16 or fp32"),
        ("randomk,exchange=twoshot", "use exchange=allreduce"),
        ("int8,exchange=allreduce", "use exchange=twoshot (TwoShot)"),
        ("terngrad,ef=on", "ef=off"),
        ("randomk:0.1,scaled=on", "ef=off"),
        ("int4,stochastic=on", "nearest"),
        ("topk,decay=0", "(0, 1]"),
        ("topk,decay=1.1", "(0, 1]"),
        ("topk,warmup=-1", "0 or more"),
        ("int8+topk", "sparsifier first"),
        ("topk:0.1+randomk:0.1", "multiply the densities"),
    ],
)
def test_what_does_not_fit_together(spec: str, remedy: str) -> None:
    with pytest.raises(CompositionError) as raised:
        parse(spec)
    assert remedy in str(raised.value)


def test_the_same_by_hand() -> None:
    with pytest.raises(CompositionError, match="use exchange=twoshot"):
        AllReduceExchange(TopK(0.1))
    with pytest.raises(CompositionError, match="use SparseTwoShot"):
        TwoShot(TopK(0.1))
    with pytest.raises(CompositionError, match="no contraction"):
        ErrorFeedback(AllGatherExchange(QSGD(15)))
    with pytest.raises(CompositionError, match="one error feedback is enough"):
        ErrorFeedback(ErrorFeedback(AllGatherExchange(TopK(0.1))))


# --------------------------------------------------------------------------------- what methods are called


@pytest.mark.parametrize("spec", ["int4", "topk:0.01+int8", "none,exchange=ring", "powersgd:4,warmup=9", "trimmed:1"])
def test_a_method_is_called_by_its_spec(spec: str):
    method = parse(spec)
    assert str(method) == f"{method}" == spec
    assert repr(method) != spec


def test_what_no_spec_named_is_called_by_its_repr():
    by_hand = Guard(ErrorFeedback(TwoShot(BlockInt(4))))
    assert by_hand == parse("int4")
    assert str(by_hand) == repr(by_hand) == repr(parse("int4"))
    guard = parse("int4")
    assert isinstance(guard, Guard)
    assert str(dataclasses.replace(guard, inner=parse("fp16"))) == "Guard(inner=AllReduceExchange(codec=FP16()))"


def test_refusals_name_the_parts_of_a_spec_as_they_are_written():
    with pytest.raises(CompositionError, match=re.escape("payloads of topk:0.1 cannot be added")):
        parse("topk:0.1,exchange=allreduce")
    with pytest.raises(CompositionError, match=re.escape("payloads of topk:0.1+int8 cannot be added")):
        parse("topk:0.1+int8,exchange=allreduce")
    with pytest.raises(CompositionError, match="payloads of terngrad:0 cannot be added"):
        parse("terngrad:0,ef=on,exchange=allreduce")
    with pytest.raises(CompositionError, match=re.escape("dgc:0.01 keeps its own residual")):
        parse("dgc:0.01,ef=on")


# ---------------------------------------------------------------------------- one grammar, whatever the method


def spelled(name: str) -> list[str]:
    """The ways to write the example of a method whose main number is written after the colon."""
    method = registry.table()[name]
    (first, *others) = grammar.read(method.example, joins=isinstance(method, registry.Method))
    assert not others
    options = dict(first.options)
    value = options.pop(method.argument or "", None) if first.value is None else first.value
    rest = "".join(f",{option}=({text})" for option, text in options.items())
    if value is None:
        return [f"{name}{rest}", f" ({name}{rest}) "]
    named = f"{method.argument}={value}"
    return [f"{name}:{value}{rest}", f"{name}:{named}{rest}", f"{name},{named}{rest}", f"{name}{rest},{named}"]


@pytest.mark.parametrize("name", registry.table())
def test_equal_spellings_mean_the_same(name: str) -> None:
    """The main number after the colon, by name after the colon, and by name after a comma."""
    wanted = parse(registry.table()[name].example)
    assert [parse(spec) for spec in spelled(name)] == [wanted] * len(spelled(name))


def test_brackets_enclose_what_is_a_spec_itself() -> None:
    assert parse("local:8,outer=(int4,node=2)").options == {"H": 8, "outer": "int4,node=2"}
    assert parse("local:8,outer=((int4))") == parse("local,H=8,outer=int4") == parse("local:H=(8),outer=int4")
    assert parse("topk:0.1+(int8:64)") == parse("topk:0.1+int8:64") == parse("topk:0.1+int8:block=64")
    assert parse("topk:0.1+(qsgd:15),ef=off") == parse("(topk:0.1,ef=off)+qsgd:15")
    assert parse("local:outer=topk:0.1+int4").options == {"outer": "topk:0.1+int4"}


def test_the_options_of_a_second_codec_stand_in_brackets() -> None:
    made = parse("topk:0.1+(int8,stochastic=on),ef=off")
    assert made == Guard(AllGatherExchange(Chain(TopK(0.1), BlockInt(8, stochastic=True))))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "powersgd:4", "noop"])
def test_pytorchs_own_have_an_old_name(kind: str) -> None:
    with pytest.warns(FutureWarning, match=f"'torch:{kind}' is written 'torch.{kind}' now"):
        assert parse(f"torch:{kind}") == parse(f"torch.{kind}")


def test_parameters_are_a_codec_of_their_own() -> None:
    made = parse("int4,parameters=(int8,stochastic=on),ef=off")
    assert made == (parse("int4,ef=off"), BlockInt(8, stochastic=True))
    assert str(made.gradients) == "int4,ef=off"
    with pytest.warns(FutureWarning, match=re.escape("int4,parameters=(int8,stochastic=on),ef=off")):
        assert parse("int4,parameters=int8,stochastic=on,ef=off") == made


# -------------------------------------------------------------------------------------- where a method serves


def test_what_a_spec_means_knows_where_it_serves() -> None:
    for name, method in registry.table().items():
        assert parse(method.example).place is method.place, name


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("local:8", 'gradwire.wrap(optimizer, model, "local:8")'),
        ("ssp:4", 'gradwire.wrap(optimizer, model, "ssp:4")'),
        ("locl:8", 'gradwire.wrap(optimizer, model, "local:H=8")'),
        ("fedprox:0.1", "gradwire federate --method fedprox:0.1"),
        ("torch.powersgd:4", "only `gradwire compare` takes: did you mean 'powersgd'?"),
        ("torch.noop", "only `gradwire compare` takes"),
        ("int4,parameters=int8", "fully_shard"),
    ],
)
def test_a_spec_in_the_wrong_place_is_answered_with_the_right_call(spec: str, call: str) -> None:
    with pytest.raises(SpecError, match=re.escape(call)):
        as_method(spec)


def test_attach_answers_with_wrap(one_rank: None) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for spec, example in {"local:8": "local:8", "locl:8": "local:H=8", "ssp:4": "ssp:4"}.items():
        with pytest.raises(SpecError, match=re.escape(f'gradwire.wrap(optimizer, model, "{example}")')):
            gradwire.attach(ddp, spec)


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("int4", 'gradwire.attach(ddp, "int4")'),
        ("itn4", 'gradwire.attach(ddp, "int4")'),
        ("locl:8", "did you mean 'local'?"),
        ("fedavg", "gradwire federate --method fedavg"),
        ("torch.fp16", "gradwire compare --methods torch.fp32 torch.fp16"),
    ],
)
def test_wrap_refuses_what_does_not_go_with_an_optimizer(spec: str, call: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError, match=re.escape(call)):
        gradwire.wrap(torch.optim.SGD(model.parameters()), model, spec)


def test_wrap_takes_what_parse_makes_and_no_other_thing(one_rank: None) -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters())
    optimizer = gradwire.wrap(inner, model, parse("local:8,outer=int4"))
    assert optimizer.session.method == "local:8,outer=int4"
    optimizer.close()
    with pytest.raises(SpecError, match="does not go with the optimizer"):
        gradwire.wrap(inner, model, parse("int4"))
    with pytest.raises(SpecError, match="address= is for workers that do not wait"):
        gradwire.wrap(inner, model, "local:8", address="127.0.0.1")
    with pytest.raises(SpecError, match="store= is for workers that come and go, and 'ssp:4' has none: leave it out"):
        gradwire.wrap(inner, model, "ssp:4", store="127.0.0.1:29400")
    with pytest.raises(SpecError, match="group= is for ranks of a process group, and 'elastic:8' has none"):
        gradwire.wrap(inner, model, "elastic:8", store="127.0.0.1:29400", group=None)
    with pytest.raises(SpecError, match="start `gradwire store`, and pass store="):
        gradwire.wrap(inner, model, "elastic:8")


# ------------------------------------------------------------------------------------- every spec that is shown


REFUSED = {"none,ef=on", "int8,stochastic=on"}
"""Shown as what is refused; the second is a codec, which has no error feedback."""


def shown() -> set[str]:
    """Whatever is written like a spec and begins with a method's name, in README, docs and examples."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.md")]
    found: set[str] = set()
    for path in (ROOT / "README.md", *pages):
        quoted = re.findall(r"[`\"' ]((?:torch[.:])?[a-z]\w*(?:[:,+=][^\s`\"'|]+)?)[`\"' ]", path.read_text())
        found |= {spec for spec in quoted if re.search(r"[:,+.][^A-Z.]", spec)}
    return {spec for spec in found if grammar.name_of(spec) in registry.table()} - REFUSED


def test_every_spec_that_is_shown_is_read() -> None:
    specs = shown()
    assert len(specs) > 80
    for spec in specs:
        parse(spec)
