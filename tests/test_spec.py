"""The spec language: what reads, and what is refused with a sentence that helps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gradwire
from gradwire import CompositionError, Lockstep, SpecError, methods, parse
from gradwire.codecs import BF16, QSGD, BlockInt, Chain, Natural, RandomK, Scaled, TernGrad, TopK
from gradwire.core.grain import flat_grain
from gradwire.reducers import (
    EF21,
    AllGather,
    AllReduce,
    ErrorFeedback,
    Guard,
    Partition,
    PowerSGD,
    SparseTwoShot,
    TwoShot,
    WarmUp,
)
from gradwire.spec import GRAMMAR


def test_a_bare_name_gets_what_suits_it() -> None:
    assert parse("topk:0.25") == Guard(ErrorFeedback(AllGather(TopK(0.25))))
    assert parse("bf16") == AllReduce(BF16())
    assert parse("int4") == Guard(ErrorFeedback(TwoShot(BlockInt(4))))
    assert parse("qsgd:7") == Guard(TwoShot(QSGD(7)))
    assert parse("powersgd:2") == Guard(ErrorFeedback(PowerSGD(2)))
    assert parse(" topk:0.1+int8 ") == Guard(ErrorFeedback(AllGather(Chain(TopK(0.1), BlockInt(8)))))


def test_error_feedback_makes_a_contraction_of_an_unbiased_codec_whose_variance_is_known() -> None:
    assert parse("qsgd:7,ef=on") == Guard(ErrorFeedback(TwoShot(Scaled(QSGD(7)))))
    assert parse("terngrad:0,ef=on,exchange=allgather") == Guard(ErrorFeedback(AllGather(Scaled(TernGrad(0)))))
    assert parse("natural,ef=on") == Guard(ErrorFeedback(TwoShot(Natural())))  # one already
    assert parse("qsgd:7,ef=off") == parse("qsgd:7") == Guard(TwoShot(QSGD(7)))


def test_estimates_in_place_of_a_residual() -> None:
    assert parse("topk:0.01,ef=ef21") == Guard(EF21(AllGather(TopK(0.01))))
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
    assert parse("topk,density=0.1,values=bf16") == Guard(ErrorFeedback(AllGather(TopK(0.1, "bf16"))))
    assert parse("int8,exchange=allgather,ef=off,guard=off") == AllGather(BlockInt(8))
    assert parse("int8:64,decay=0.9") == Guard(ErrorFeedback(TwoShot(BlockInt(8, 64)), 0.9))
    warm = parse("sign,warmup=3")
    assert isinstance(warm, Guard)
    assert isinstance(warm.inner, WarmUp)
    assert warm.inner.steps == 3
    policy = parse("sign,vectors=off")
    assert isinstance(policy, Guard)
    assert isinstance(policy.inner, Partition)


def test_a_policy_tells_which_names_it_serves_nobody_by() -> None:
    rules = (("*.bias", AllReduce(BF16())), ("embde*", AllReduce(BF16())))
    policy = Guard(Partition(rules, default=AllGather(TopK(0.1))))
    assert policy.unmet(["embed.weight", "head.bias"]) == ["embde*"]
    assert parse("sign,vectors=off").unmet([]) == []


def test_only_what_shows_a_nan_by_itself_goes_unguarded() -> None:
    """Random-k may leave the NaN out, so it is guarded even without error feedback."""
    assert parse("randomk:0.2,scaled=on,ef=off") == Guard(AllReduce(RandomK(0.2, scaled=True)))


@pytest.mark.parametrize("spec", [s for m in gradwire.methods().values() for s in m.examples])
def test_every_example_reads_and_prints(spec: str) -> None:
    assert repr(parse(spec)) == repr(parse(spec))
    assert parse(spec) == parse(spec)


def test_pytorchs_hooks_are_the_comparisons_own() -> None:
    with pytest.raises(SpecError, match="gradwire compare"):
        parse("torch:fp16")


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("topc:0.01", "topk"),
        ("power_sgd", "powersgd"),
        ("int9", "int"),
        ("TOPK", "topk"),
        ("", "missing"),
        ("topk:0.1+", "missing"),
        ("fp32", "none"),
        ("zzz", "Known"),
        ("topk:0.01+int7x", "int7"),
    ],
)
def test_unknown_methods(spec: str, nearest: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse(spec)
    assert nearest in str(raised.value)
    assert GRAMMAR in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("topk:0.1,densty=0.2", "density"),
        ("topk:0.1,valuse=bf16", "values"),
        ("topk:0.1,warmp=3", "warmup"),
        ("int4,bits=5", "block"),
        ("topk:0.1+int8,stochastic=on", "Known"),
    ],
)
def test_unknown_options(spec: str, nearest: str) -> None:
    with pytest.raises(SpecError, match="has no option") as raised:
        parse(spec)
    assert nearest in str(raised.value)
    assert GRAMMAR in str(raised.value)


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
        ("fp16:2", "takes no argument"),
        ("topk,exchange=allgathr", "allgather"),
        ("powersgd:4+int8", "messages of its own"),
        ("powersgd:4,exchange=twoshot", "messages of its own"),
        ("topk:0.1+powersgd", "only codecs"),
        ("topk:0.1,density=0.2", "twice"),
        ("topk,density=0.1,density=0.2", "twice"),
    ],
)
def test_what_cannot_be_read(spec: str, wants: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse(spec)
    assert wants in str(raised.value)


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
        ("topk,exchange=allreduce", "use SparseTwoShot or AllGather"),
        ("topk,values=fp16,exchange=twoshot", "bf16 or fp32"),
        ("randomk,exchange=twoshot", "use AllReduce"),
        ("int8,exchange=allreduce", "use TwoShot or AllGather"),
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
    with pytest.raises(CompositionError, match="use SparseTwoShot or AllGather"):
        AllReduce(TopK(0.1))
    with pytest.raises(CompositionError, match="use SparseTwoShot"):
        TwoShot(TopK(0.1))
    with pytest.raises(CompositionError, match="no contraction"):
        ErrorFeedback(AllGather(QSGD(15)))
    with pytest.raises(CompositionError, match="one error feedback is enough"):
        ErrorFeedback(ErrorFeedback(AllGather(TopK(0.1))))
