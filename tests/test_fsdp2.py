"""`attach` on models of FSDP2, on real processes over Gloo."""

import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from fsdp2_cases import VARIANTS
from gradwire.core import registry
from gradwire.core.errors import AttachError, CompositionError, SpecError
from gradwire.ranks.supervised import run_function
from gradwire.sync.gossip import DPSGD, Complete, OnGraph

CASES = str(Path(__file__).with_name("fsdp2_cases.py"))
INT8, TOPK, SIGN = "int8", "topk:0.1", "sign"
RESUMED = ((INT8, None), (TOPK, "int8"), (SIGN, None), ("int8,stochastic=on,ef=off", "int8,stochastic=on"))
COMPRESSED = ("resharded", "bf16 sums", "frozen", "tied", "checkpointed", "offloaded", "accumulated bf16", "clipped")
METHODS = ("int4", "fp8", SIGN, TOPK, "qsgd:15", "bf16", "int8,ef=off", "int4,residual=bf16")
CONSERVED = (INT8, TOPK, SIGN, "topk:0.1,exchange=twoshot")
GATHERED = (("int8", None), ("int4", None), ("fp8", "bfloat16"), ("int8,stochastic=on", None))

Job = tuple[str, dict[str, Any]]


def run(case: str, ranks: int, deadline_s: float = 120, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, deadline_s)


def against(variant: str, spec: str, steps: int) -> Job:
    """A run beside one of FSDP2 alone."""
    return "against_plain", {"variant": variant, "spec": spec, "steps": steps}


def steps_of(variant: str) -> int:
    """Twenty where steps are few or small, or where rounding could add up; nine elsewhere."""
    return 20 if variant.startswith(("plain", "adamw", "accumulated", "clipped")) else 9


JOBS: dict[str, tuple[int, dict[str, Job]]] = {
    "plain": (3, {variant: against(variant, "none", steps_of(variant)) for variant in VARIANTS}),
    "variants": (2, {variant: against(variant, INT8, 12) for variant in COMPRESSED}),
    "methods": (2, {spec: against("plain", spec, 12) for spec in METHODS}),
    "conserved": (3, {spec: ("conserved", {"spec": spec, "skip": False}) for spec in CONSERVED}),
    "skipped": (2, {spec: ("conserved", {"spec": spec, "skip": True}) for spec in CONSERVED}),
    "gathered": (2, {p: ("gathered", {"parameters": p, "dtype": d}) for p, d in GATHERED}),
    "others": (
        2,
        {
            **{f"infinite {s}": ("infinite_step", {"spec": s}) for s in (TOPK, INT8)},
            "unused": ("unused", {"spec": TOPK}),
            "zeros": ("disagreeing", {"zeros": True}),
            "changed": ("changed", {}),
            "closed": ("closed", {}),
            "broken off": ("broken_off", {}),
            "premultiplied": against("premultiplied", "none", 6),
        },
    ),
    "copies": (
        4,
        {
            "none": ("copies", {"spec": "none", "parameters": None}),
            "fp16": ("copies", {"spec": "none", "parameters": None, "fp16": True}),
            "int4": ("copies", {"spec": "int4", "parameters": "int8"}),
            "differ": ("copies_that_differ", {}),
            "near": ("near", {}),
        },
    ),
}
"""Cases that one set of processes runs, with how many ranks."""


@functools.cache
def outcomes(kind: str, *names: str) -> list[dict[str, Any]]:
    """What every rank saw of these cases; of all of a kind where none are named."""
    ranks, jobs = JOBS[kind]
    return run("many", ranks, jobs={name: jobs[name] for name in names or jobs}, deadline_s=280)


Siblings = list[Mapping[str, Any]]


# The mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.draw(2)
def test_without_compression_training_is_that_of_fsdp2_to_rounding(variant: str, siblings: Siblings) -> None:
    """Sums are taken in float32, in rank order; FSDP2's own are rounded to the dtype of its reductions."""
    rounding = {"bf16 sums": 0.02, "fp16 sums": 1e-3}.get(variant, 2e-6)
    for outcome in outcomes("plain", *(case["variant"] for case in siblings)):
        found = outcome[variant]
        assert found["moved"] > 5  # times their largest element: they were trained
        assert found["off"] <= rounding
        assert found["steps"] == steps_of(variant) // (3 if variant.startswith("accumulated") else 1)


@pytest.mark.parametrize("variant", COMPRESSED)
@pytest.mark.draw(3)
def test_every_way_to_shard_trains_with_a_quarter_of_the_bytes(variant: str, siblings: Siblings) -> None:
    found = outcomes("variants", *(case["variant"] for case in siblings))
    assert len({outcome[variant]["digest"] for outcome in found}) == 1
    for outcome in found:
        plain, own = outcome[variant]["losses"]
        assert own == pytest.approx(plain, rel=0.03)
        sent, dense = outcome[variant]["sent"]
        assert dense > sent * (1.9 if "sums" in variant else 3.7)
        assert outcome[variant]["norm"] > 0


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.draw(3)
def test_methods_train(spec: str, siblings: Siblings) -> None:
    remembers = "ef=off" not in spec and spec[:4] not in ("qsgd", "bf16")
    for outcome in outcomes("methods", *(case["spec"] for case in siblings)):
        plain, own = outcome[spec]["losses"]
        assert plain < 2.6  # from 3.8
        assert own < 3.1
        sent, dense = outcome[spec]["sent"]
        assert sent < 0.55 * dense
        assert (outcome[spec]["norm"] > 0) == remembers
        assert outcome[spec]["report"].count("not counted: parameters, which FSDP2 gathers as they are") >= 1


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("kind", ["conserved", "skipped"])
@pytest.mark.parametrize("spec", CONSERVED)
@pytest.mark.draw(1)
def test_what_arrives_and_what_is_owed_is_what_was_given(spec: str, kind: str, siblings: Siblings) -> None:
    """Where every rank leaves a block out in some steps as well."""
    for outcome in outcomes(kind, *(case["spec"] for case in siblings if case["kind"] == kind)):
        found = outcome[spec]
        rounding = 9 * 10 * torch.finfo(torch.float32).eps * found["size"]
        assert found["owed"] > 10 * rounding
        assert found["off"] <= rounding


@pytest.mark.one_draw_in(3)
def test_a_factor_that_gloo_cannot_multiply_by_is_served() -> None:
    """FSDP2 alone asks for `set_force_sum_reduction_for_comms` there."""
    for outcome in outcomes("others"):
        assert outcome["premultiplied"]["off"] <= 2e-6


# Unused parameters ------------------------------------------------------------------------------------------------


def test_an_unused_parameter_has_no_gradient_and_owes_what_it_owed() -> None:
    for outcome in outcomes("others"):
        steps = outcome["unused"]["found"]
        for i, step in enumerate(steps):
            idle = "right" if i % 2 == 0 else "left"
            assert sorted(step["gone"]) == [f"{idle}.bias", f"{idle}.weight"]
        owed = [step["owed"] for step in steps]
        assert owed[1]["left.weight"] == owed[0]["left.weight"] > 0
        assert owed[2]["right.bias"] == owed[1]["right.bias"] > 0
        assert owed[2]["left.weight"] != owed[1]["left.weight"]


def test_parameters_that_only_some_ranks_use_count_as_zeros_where_asked() -> None:
    assert [outcome["zeros"] for outcome in outcomes("others")] == ["both", "both"]


def test_parameters_that_only_some_ranks_use_are_told_on_all() -> None:
    for said in run("disagreeing", 2, zeros=False):
        assert "set_reduce_scatter_unused_params(True)" in said


# Parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parameters", "dtype"), GATHERED)
@pytest.mark.draw(2)
def test_ranks_compute_with_the_same_coded_parameters_and_keep_their_own(
    parameters: str, dtype: str | None, siblings: Siblings
) -> None:
    found = [outcome[parameters] for outcome in outcomes("gathered", *(case["parameters"] for case in siblings))]
    assert len({one["bits"] for one in found}) == 1
    assert len({one["digest"] for one in found}) == 1
    worst = {"int4": 0.08, "fp8": 0.03}.get(parameters, 0.008)
    for one in found:
        assert one["kept"]
        assert one["losses"][-1] < one["losses"][0] - 1
        for name, off in one["off"].items():
            if name.endswith(("up.weight", "down.weight")):
                assert 0.001 < off < worst
            else:
                assert off < 0.003  # vectors are only cast, where FSDP2 casts them
        if dtype is None:
            assert one["ratio"] > (5 if parameters == "int4" else 3.5)


@pytest.mark.parametrize("parameters", ["int8", "bf16"])
@pytest.mark.draw(1)
def test_parameters_that_are_not_finite_are_gathered_as_they_are(parameters: str) -> None:
    """A mask of minus infinity on all ranks, and one that overflows in the codec on the last rank alone."""
    plain = 96 * 96 * 4 // 3
    for one in run("masked", 3, parameters=parameters):
        assert one["same"] == {"scores.weight": False, "scores.bias": True, "mask": True, "far": True}
        assert math.isfinite(one["loss"])
        assert all(0 < norm < math.inf for norm in one["gradients"])
        with_masks, without = one["sent"]
        assert with_masks - without == 2 * plain
        assert without < 3 * plain * (0.3 if parameters == "int8" else 0.55)


# State ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "parameters"), RESUMED)
@pytest.mark.draw(1)
@pytest.mark.turns("resume", 1)
def test_a_resume_is_exact(spec: str, parameters: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"spec": spec, "parameters": parameters, "folder": folder}
        whole, again = run("save_and_go_on", 3, **arguments), run("resume", 3, **arguments)
    assert whole == again
    assert len(set(whole)) == 1


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
@pytest.mark.draw(1)
@pytest.mark.turns("resume", 1)
def test_another_number_of_ranks_owes_the_same_mean(before: int, after: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = run("owed_before_saving", before, spec=TOPK, folder=folder)[0]
        found = run("owed_after_loading", after, spec=TOPK, folder=folder)
    for outcome in found:
        assert outcome["digest"] == found[0]["digest"]
        for name, owed in first.items():
            torch.testing.assert_close(torch.tensor(outcome["owed"][name]), torch.tensor(owed), atol=1e-6, rtol=1e-5)
    assert max(abs(value) for owed in first.values() for value in owed) > 0.01


def test_an_infinite_step_is_skipped_everywhere_and_forgotten() -> None:
    for spec in (TOPK, INT8):
        first, second = (outcome[f"infinite {spec}"] for outcome in outcomes("others"))
        assert first == second
        assert first == {"moved": [True] * 3 + [False] + [True] * 2, "scale": 512.0, "bad": 1, "finite": True}


def test_another_method_in_mid_run_takes_over_what_is_owed() -> None:
    for outcome in outcomes("others"):
        found = outcome["changed"]
        assert found["carried"] == pytest.approx(found["before"], rel=1e-6)
        assert found["after"] == 0


def test_a_closed_handle_leaves_fsdp2_as_it_was() -> None:
    assert [outcome["closed"] for outcome in outcomes("others")] == [{"same": True, "steps": 5}] * 2


# Errors -----------------------------------------------------------------------------------------------------------


def test_what_is_found_out_in_the_first_backward_pass_is_told_on_every_rank() -> None:
    for said in run("sharded_later", 2):
        assert "attach to the root" in said[0]
        assert "fully_shard was called after attach" in said[1]
        assert "'blocks.2.up.weight' requires a gradient now" in said[2]
        assert "communicates by GradientScatter already: close the session of an earlier attach" in said[3]


def test_a_rank_that_fails_is_named_to_those_that_wait_for_it(tmp_path: Path) -> None:
    waiting, _ = run("failing", 2, folder=str(tmp_path))
    assert "rank 1 failed with ValueError: no more data" in waiting["said"]
    assert waiting["waited"] < 10


def alone(layer: Callable[[], nn.Module] = lambda: nn.Linear(4, 4), **options: Any) -> Any:
    """A sharded model of one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about shards of one rank
        return fully_shard(layer(), mesh=init_device_mesh("cpu", (1,)), **options)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("divisor", [None, 4.0])
@pytest.mark.parametrize("changed", [False, True])
def test_one_rank_is_delivered_what_it_owes(changed: bool, divisor: float | None) -> None:
    """FSDP2 scatters nothing there. What a run of more ranks owed, resharded, must arrive all the same."""

    def passed(model: Any, factor: float) -> torch.Tensor:
        model.zero_grad()
        x = torch.linspace(-1, 1, 24).view(6, 4)
        (model(x).square().sum() * factor).backward()
        return torch.cat([parameter.grad.to_local().reshape(-1) for parameter in model.parameters()])

    model: Any = alone()
    with gradwire.attach(model, "topk:0.2", deadline_s=10) as handle:
        for _ in range(3):
            passed(model, 1.0)
        state = handle.state_dict()
    whole = {name: leaves["element:residual"] for name, leaves in state["parameters"].items()}
    owed = torch.cat([piece["values"] for name in ("weight", "bias") for piece in whole[name]])
    assert owed.norm() > 1
    model.zero_grad()
    if divisor is not None:
        model.set_gradient_divide_factor(divisor)
    with gradwire.attach(model, "topk:0.2", deadline_s=10) as handle:
        handle.load_state_dict(state)
        if changed:
            handle.change("none")
        came = torch.stack([passed(model, 0.0) for _ in range(1 if changed else 6)]).sum(0)
        assert handle.residual_norm() == 0.0
        assert torch.allclose(came, owed / (divisor or 1.0), rtol=1e-6, atol=0)
        assert handle.stats().steps == (1 if changed else 6)


def over_two_dimensions() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        return fully_shard(nn.Linear(4, 4), mesh=mesh)


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def with_gradient() -> Any:
    model = alone()
    model(torch.ones(1, 4)).sum().backward()
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return alone()


def communicating() -> Any:
    class Theirs:
        """Somebody else's."""

        def __init__(self) -> None:
            self.allocate = torch.empty

    model = alone()
    model.set_custom_reduce_scatter(Theirs())
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two dimensions": (over_two_dimensions, r'mesh of two dimensions.*mesh\["shard"\].*replicate='),
    "nothing trained": (lambda: alone(frozen), "no parameter of this model requires a gradient"),
    "after a backward pass": (with_gradient, "'weight' has a gradient already: attach before the first backward"),
    "meta": (on_meta, "'weight' is on the meta device"),
    "other communication": (communicating, "communicates by Theirs already: close the session of an earlier attach"),
    "a dtype": (lambda: alone(lambda: nn.Linear(4, 4, dtype=torch.complex64)), "'weight' has dtype torch.complex64"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_served_are_told_why(kind: str) -> None:
    make, said = REFUSED[kind]
    model = make()
    before = [(g._reduce_scatter_comm, g._all_gather_comm) for g in model._get_fsdp_state()._fsdp_param_groups]
    with pytest.raises(AttachError, match=said):
        gradwire.attach(model, "int8", parameters="int8")
    assert before == [(g._reduce_scatter_comm, g._all_gather_comm) for g in model._get_fsdp_state()._fsdp_param_groups]


@pytest.mark.usefixtures("one_rank")
def test_attaching_twice_is_refused_until_the_first_handle_is_closed() -> None:
    model = alone()
    with gradwire.attach(model, "int8"), pytest.raises(AttachError, match="close the session of an earlier attach"):
        gradwire.attach(model, "int8")
    gradwire.attach(model, "int8").close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("spec", ["powersgd:2", "adasum", "int4,warmup=3", "topk:0.1,ef=ef21"])
def test_methods_without_a_scatter_half_are_told_which_have_one(spec: str) -> None:
    with pytest.raises(CompositionError, match=r"needs a method that ends with shards.*use int8, int4"):
        gradwire.attach(alone(), spec)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("spec", ["int4,node=2", "int4,node=auto"])
def test_nodes_are_for_copies_of_a_sharded_model(spec: str) -> None:
    with pytest.raises(CompositionError, match=r"sharded over one axis has no copies there: shard inside nodes.*repli"):
        gradwire.attach(alone(), spec)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("aabb", "node_size=1)"),
        ("aaaa", "node_size=2)"),
        ("abab", "AttachError: node=auto compresses between nodes, and here the ranks of replicate= share a node"),
        ("abcd", "the shards of a copy are on 2 nodes: what FSDP2 reduces and gathers among them crosses links"),
    ],
)
@pytest.mark.draw(2)
def test_copies_find_their_nodes(nodes: str, said: str) -> None:
    """Shards of a copy are on ranks 0 and 1, and 2 and 3; copies are compressed where they are on several nodes."""
    assert [said in each for each in run("copies_on_nodes", 4, nodes=nodes)] == [True] * 4


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("parameters", ["sign", "topk:0.1"])
def test_codecs_that_would_spoil_parameters_are_refused(parameters: str) -> None:
    for spec, beside in (("int8", parameters), (f"int8,parameters={parameters}", None)):
        with pytest.raises(AttachError, match=r"would change parameters by \d+% of their norm: use int8"):
            gradwire.attach(alone(), spec, parameters=beside)


@pytest.mark.usefixtures("one_rank")
def test_a_spec_may_say_what_parameters_are_gathered_in() -> None:
    said = []
    for spec, beside in (("int4", "int8"), ("int4,parameters=int8", None), ("int4", None)):
        with gradwire.attach(alone(), spec, parameters=beside) as handle:
            said.append((handle.reducer, str(handle.reducer), handle.report().uncounted))
    assert said[0] == said[1] != said[2]
    with pytest.raises(SpecError, match="given twice"):
        gradwire.attach(alone(), "int4,parameters=int8", parameters="int8")


@pytest.mark.usefixtures("one_rank")
def test_ddp_gathers_no_parameters() -> None:
    for spec, beside in (("int8", "int8"), ("int8,parameters=int8", None)):
        with pytest.raises(AttachError, match="parameters= and replicate= are for models of fully_shard"):
            gradwire.attach(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), spec, parameters=beside)


# Copies of a sharded model ----------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(("kind", "rounding"), [("none", 2e-6), ("fp16", 1e-3)])
@pytest.mark.draw(1)
def test_copies_are_averaged_as_over_a_mesh_of_two_dimensions(kind: str, rounding: float) -> None:
    for outcome in outcomes("copies"):
        assert outcome[kind]["off"] <= rounding
        sent, dense = outcome[kind]["sent"]
        assert sent == (dense if kind == "none" else 2 * dense)
    assert len({outcome[kind]["apart"] for outcome in outcomes("copies")}) == 2  # once the handle is closed


def test_copies_are_averaged_by_a_method_and_their_parameters_gathered_by_a_codec() -> None:
    for outcome in outcomes("copies"):
        plain, own = outcome["int4"]["losses"]
        assert own == pytest.approx(plain, rel=0.01)
        assert 0 < outcome["int4"]["off"] < 0.2
        assert outcome["int4"]["norm"] > 0
        sent, dense = outcome["int4"]["sent"]
        assert dense > 2.5 * sent
        assert "not counted: what FSDP2 reduces among the shards of a copy" in outcome["int4"]["report"]
        assert "FSDP2 gathers" not in outcome["int4"]["report"]


@pytest.mark.turns("resume", 1)
def test_copies_resume_exactly_from_a_folder_for_each_shard(tmp_path: Path) -> None:
    whole, again = (run("copies_resumed", 4, spec="int4", folder=str(tmp_path), again=a) for a in (False, True))
    assert whole == again
    assert len(set(whole)) == 1


def test_what_is_gathered_again_among_fewer_ranks_is_the_same() -> None:
    assert len({bits for outcome in outcomes("copies") for bits in outcome["near"]}) == 1


def test_copies_that_are_none_are_told_why() -> None:
    for outcome in outcomes("copies"):
        two, differ, low_rank, shards = outcome["differ"]
        assert "replicate= is a mesh of 2 dimensions" in two
        assert "ranks of replicate= have other parameters than each other" in differ
        assert "low rank wants whole matrices: use int4" in low_rank
        assert "shard 0 of 2" in shards
        assert "shard 1 of 2" in shards


# Checkpoints of PyTorch's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [TOPK, "int4,residual=bf16", "int8,stochastic=on,ef=off"])
@pytest.mark.draw(1)
@pytest.mark.turns("resume", 1)
def test_a_resume_from_a_distributed_checkpoint_is_exact(spec: str, tmp_path: Path) -> None:
    whole = run("distributed_save", 3, spec=spec, folder=str(tmp_path))
    again = run("distributed_load", 3, spec=spec, folder=str(tmp_path))
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    assert {one["step"] for one in again} == {12}
    assert all("saved by another method" in one["said"] for one in again)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4)])
@pytest.mark.draw(1)
@pytest.mark.turns("resume", 1)
def test_a_distributed_checkpoint_owes_the_same_mean_on_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    first = run("distributed_save", before, spec=TOPK, folder=str(tmp_path))[0]["owed"]
    found = run("distributed_load", after, spec=TOPK, folder=str(tmp_path))
    assert len({one["digest"] for one in found}) == 1
    for one in found:
        for name, owed in first.items():
            torch.testing.assert_close(torch.tensor(one["owed"][name]), torch.tensor(owed), atol=1e-6, rtol=1e-5)
    assert max(abs(value) for owed in first.values() for value in owed) > 0.01


# Beside FSDP2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int4", TOPK])
@pytest.mark.draw(1)
@pytest.mark.turns("resume", 1)
def test_a_zero_redundancy_optimizer_resumes_exactly(spec: str, tmp_path: Path) -> None:
    whole, again = (run("zero_redundancy", 2, spec=spec, folder=str(tmp_path), again=a) for a in (False, True))
    assert len({one["digest"] for one in (*whole, *again)}) == 1
    for one in whole:
        assert one["ratio"] > 3
        assert one["held"] < 1.5 * one["numel"]  # of the two moments of all parameters


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", [True, False])
def test_what_ends_apart_on_each_rank_is_refused(sharded: bool) -> None:
    gossip = OnGraph(Complete(1), DPSGD())
    model = alone() if sharded else nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(CompositionError, match=r"drift apart|no such half"):
        gradwire.attach(model, gossip)
    with gradwire.attach(model, "int8") as handle, pytest.raises(CompositionError, match=r"drift apart|no such half"):
        handle.change(gossip)


def test_only_what_ends_alike_says_so() -> None:
    examples = [spec for method in registry.methods().values() for spec in method.examples]
    assert all(gradwire.parse(spec).ends_alike for spec in examples)
    assert len(examples) > 20
    assert not gradwire.parse("int8").scattered().ends_alike
    assert not OnGraph(Complete(1), DPSGD()).ends_alike


def test_the_page_runs() -> None:
    assert run("page", 2) == [3, 3]


def test_a_backward_pass_that_breaks_off_leaves_what_is_owed_as_it_was() -> None:
    found = [outcome["broken off"] for outcome in outcomes("others")]
    assert [one["kept"] for one in found] == [True, True]
    assert [one["steps"] for one in found] == [6, 6]
    assert found[0]["digest"] == found[1]["digest"]
    assert "StepError: this session is fed by the backward pass of a sharded model" in found[0]["said"]
