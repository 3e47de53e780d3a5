"""Rare averages: methods that should be the same are, ranks stay equal, and runs go on exactly from a checkpoint."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradwire import AttachError, CompositionError, StateError, StepError
from gradwire.ranks.supervised import run_function
from gradwire.sync import BMUF, Averaging, DiLoCo, DriftTriggered, Hierarchical, Increasing, LocalSGD, SlowMo
from gradwire.sync.outer import Rates

CASES = str(Path(__file__).with_name("sync_cases.py"))
RANKS = pytest.mark.parametrize("ranks", [2, 3])

pytestmark = pytest.mark.one_of("ranks")
METHODS = [
    *("local", "int4", "sparse", "powersgd", "warm", "diloco", "slowmo", "bmuf"),
    *("moments", "forgetful", "streaming", "late", "progress"),
]
SCHEDULES = ["rising", "drift"]


@functools.cache
def run(case: str, ranks: int) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, {}, 120)


@RANKS
def test_windows_of_one_step_with_plain_sgd_are_ddp(ranks: int) -> None:
    for found in run("next_to_ddp", ranks):
        assert len(found) == 12
        assert max(found) < 1e-14


@RANKS
def test_methods_that_should_be_the_same_are(ranks: int) -> None:
    for found in run("equalities", ranks):
        assert found["slowmo"] < 1e-12
        assert found["diloco"] < 1e-12
        assert found["bmuf"] < 1e-12
        assert found["streaming"] == 0
        assert found["moved"] > 1e-2
        assert found["other"] > 1e-3
        assert found["fragments"] > 1e-6  # in float64: rounding is 1e-15


@RANKS
def test_no_step_is_lost_where_progress_is_kept(ranks: int) -> None:
    for found in run("equalities", ranks):
        assert found["progress"] < 1e-12
        assert found["late progress"] < 1e-12
        assert found["merged"] > 1e-2


@RANKS
@pytest.mark.parametrize("outer", ["mean", "diloco", "slowmo", "bmuf"])
def test_outer_steps_are_those_of_the_papers(outer: str, ranks: int) -> None:
    assert all(found[outer] < 1e-12 for found in run("by_hand", ranks))


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_keeps_the_look_ahead_of_the_papers_global_model(nesterov: bool) -> None:
    """Next to the paper's two models: the global one, and what the next block begins with."""
    momentum, lr, rule = 0.75, 0.5, BMUF(0.75, 0.5, nesterov)
    generator = torch.Generator().manual_seed(0)
    x, global_model, begun, filtered = (torch.zeros(5, dtype=torch.float64) for _ in range(4))
    memory = rule.memory(x)
    for _ in range(6):
        ends = begun + torch.randn(5, generator=generator, dtype=torch.float64)  # the mean of all ranks
        rule.move_(x, ends - x, memory, Rates(0.1, 0.1))
        filtered = momentum * filtered + lr * (ends - begun)
        global_model = global_model + filtered
        begun = global_model + momentum * filtered if nesterov else global_model
        torch.testing.assert_close(x, begun)
    assert (float((x - global_model).abs().max()) > 0.1) == nesterov


@RANKS
def test_progress_one_window_late_is_cocod_sgd(ranks: int) -> None:
    for found in run("cocod_by_hand", ranks):
        assert len(found) == 5
        assert max(found) < 1e-12


@RANKS
def test_sparseloco_is_a_residual_that_decays_and_a_plain_outer_step(ranks: int) -> None:
    for found in run("sparseloco", ranks):
        assert found["far"] < 1e-5
        assert found["owed"] < 1e-5


@RANKS
def test_a_run_goes_on_with_another_method_and_forgets_nothing_that_is_owed(ranks: int) -> None:
    found = run("changes", ranks)
    for each in found:
        before, after = each["owed"]
        assert before == pytest.approx(after)
        assert before > 1e-3
        assert each["methods"] == ["int4", "int4"]
        assert each["told"] == "int4"
        assert each["sent"] > 0
    assert len({each["end"] for each in found}) == 1


def test_the_method_does_not_change_while_an_average_is_under_way(one_rank: None) -> None:
    network = model()
    with LocalSGD(sgd(network), network, 2, delay=1) as optimizer:
        for _ in range(2):
            backward(network)
            optimizer.step()
        with pytest.raises(StepError, match=r"under way.*call sync\(\) before"):
            optimizer.change("int4")
        assert optimizer.averaging.session.method == "none"
        optimizer.sync()
        optimizer.change("int4")
        assert optimizer.report().method == "int4"


@pytest.mark.one_draw_in(2)
@RANKS
@pytest.mark.parametrize("method", [*METHODS, *SCHEDULES])
def test_global_copies_have_the_same_bits_on_all_ranks(method: str, ranks: int) -> None:
    first, *others = (found[method] for found in run("equal_copies", ranks))
    assert all(other == first for other in others)
    assert len(set(first)) > 3  # it moves


PLAIN = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "GRADWIRE_KERNELS": "reference"}


@functools.cache
def on_different_processors() -> list[dict[str, list[str]]]:
    """One rank computes as this processor does best, the other as one without vectors and fused operations would."""
    return run_function(f"{CASES}:equal_copies", 2, {}, 240, environments=[{}, PLAIN])


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("method", [*METHODS, *SCHEDULES])
def test_global_copies_have_the_same_bits_on_different_processors(method: str) -> None:
    first, second = (found[method] for found in on_different_processors())
    assert first == second


@functools.cache
def resumed(ranks: int, folder: str) -> list[dict[str, list[str]]]:
    return run_function(f"{CASES}:resumed", ranks, {"folder": folder}, 240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("sync"))


@pytest.mark.one_draw_in(3)
@RANKS
@pytest.mark.parametrize("method", [*METHODS, *SCHEDULES])
def test_a_run_goes_on_exactly_from_mid_window_under_a_scaler(method: str, ranks: int, folder: str) -> None:
    for found in resumed(ranks, folder):
        whole, broken = found[method]
        assert whole == broken
        assert whole.endswith(" 12")
    copies = {found[method][0].split()[0] for found in resumed(ranks, folder)}
    assert len(copies) == 1


@functools.cache
def saved(folder: str) -> list[str]:
    return run_function(f"{CASES}:saves", 3, {"folder": folder}, 120)


@functools.cache
def loaded(ranks: int, step: int, folder: str) -> list[dict[str, Any]]:
    return run_function(f"{CASES}:loads", ranks, {"folder": folder, "step": step}, 120)


@pytest.mark.parametrize("step", [6, 8])
@pytest.mark.draw(1)
def test_a_run_goes_on_from_one_folder(step: int, folder: str) -> None:
    ends = saved(folder)
    assert [found["end"] for found in loaded(3, step, folder)] == ends
    assert {found["step"] for found in loaded(3, step, folder)} == {step}


def test_another_number_of_ranks_goes_on_from_a_windows_end_and_owes_as_much(folder: str) -> None:
    saved(folder)
    fewer, as_many = loaded(2, 8, folder), loaded(3, 8, folder)
    assert fewer[0]["owed"] == pytest.approx(as_many[0]["owed"], rel=1e-5)
    assert fewer[0]["owed"] > 0


def test_another_number_of_ranks_is_told_to_sync_in_mid_window(folder: str) -> None:
    saved(folder)
    for found in loaded(2, 6, folder):
        assert "call sync() before gradwire.save, or load with as many ranks" in found["refused"]
        assert found["unchanged"]


def test_a_step_that_one_ranks_scaler_skips_counts() -> None:
    first, second = run("scaled", 2)
    assert first == {"same": True, "steps": 5, "moved": False, "scale": 0.5}
    assert second == {"same": True, "steps": 5, "moved": True, "scale": 1.0}


@RANKS
def test_experts_that_some_ranks_do_not_use_are_averaged_by_name(ranks: int) -> None:
    for found in run("experts", ranks):
        assert found["unused"] == found["without_state"] == 2 * (ranks - 1)
        assert found["far"] < 1e-14
        assert found["moment"] < 1e-14


@RANKS
def test_buffers_follow_their_policy(ranks: int) -> None:
    everywhere = run("buffers", ranks)
    for policy, seen in (("average", 2), ("rank0", 2)):
        assert len({found[policy]["digest"] for found in everywhere}) == 1
        assert {found[policy]["seen"] for found in everywhere} == {seen}
    assert all(found["average"]["to_mean"] < 1e-15 < found["average"]["to_own"] for found in everywhere)
    assert everywhere[0]["rank0"]["to_own"] == 0 < everywhere[1]["rank0"]["to_own"]
    assert [found["own"]["seen"] for found in everywhere] == list(range(2, 2 + ranks))
    assert all(found["own"]["to_own"] == 0 for found in everywhere)


@RANKS
def test_a_loop_without_a_wrapper_trains_the_same(ranks: int) -> None:
    first, *others = run("without_a_wrapper", ranks)
    assert first["ended"] == [step % 4 == 3 for step in range(13)]
    assert first["same"]
    assert all(other == first for other in others)
    assert len(set(first["inside"])) == 4  # before the first window ended, and after each of three


def test_nodes_average_often_and_all_ranks_rarely() -> None:
    first, second, third, fourth = run("hierarchy", 4)
    assert all(found["far"] < 1e-13 for found in (first, second, third, fourth))
    assert first["ended"] == [False, False, False, True] * 2
    for step in (1, 3, 5, 7):
        assert first["digests"][step] == second["digests"][step]
        assert third["digests"][step] == fourth["digests"][step]
        assert (first["digests"][step] == third["digests"][step]) == (step % 4 == 3)


def test_ddp_within_sites_and_averages_between_them_go_together() -> None:
    digests = [found["digests"] for found in run("sites", 4)]
    for step, (first, second, third, fourth) in enumerate(zip(*digests, strict=True)):
        assert first == second
        assert third == fourth
        assert (first == third) == (step % 4 == 3)
    assert all(found["moved"] > 1e-2 for found in run("sites", 4))


@pytest.mark.one_draw_in(2)
def test_a_hierarchy_over_a_mesh_is_that_made_by_hand_and_resumes_exactly() -> None:
    ranks = run("over_a_mesh", 4)
    assert all(found["whole"] == found["broken"] == found["by_hand"] for found in ranks)
    assert len({found["whole"] for found in ranks}) == 1
    assert all(found["copies"] == ranks[0]["copies"] for found in ranks)
    assert len(set(ranks[0]["copies"])) == 4
    assert {found["steps"] for found in ranks} == {6 + 3}  # inside, and between


def test_momentum_is_kept_averaged_or_forgotten() -> None:
    for found in run("own_momentum", 2):
        assert found["own"] == found["average"] == [False] * 8
        assert found["reset"] == [False] * 4 + [True] + [False] * 2 + [True]


def test_ranks_that_differ_are_told_in_what() -> None:
    first, *others = run("differing", 3)
    assert all(other == first for other in others)
    assert first["weight"].startswith("AttachError: '3.weight' differs between rank 0 and rank 2: begin with the same")
    assert first["buffer"].startswith("AttachError: '1.running_var' differs between rank 0 and rank 2")
    assert first["own"] == "nothing"
    assert "AttachError: ranks disagree on the settings: rank 2 has" in first["settings"]
    assert "every=Constant(every=4)" in first["settings"]
    assert first["nan"].startswith("StepError: '0.weight' is not finite on some rank at the end of a window")


def test_ranks_whose_data_ends_in_one_window_are_equal_after_sync() -> None:
    assert run("shorter", 3) == [0, 0, 0]


# One rank, in this process ----------------------------------------------------------------------------------------


def model(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def sgd(network: nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), 0.1, momentum)


def backward(network: nn.Module) -> torch.Tensor:
    loss = network(torch.ones(1, 4)).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "every=0: a window has at least one step"),
        ({"warmup": -1}, "warmup=-1"),
        ({"fragments": 3}, "fragments=3: the model has 2 modules"),
        ({"fragments": 0}, "fragments=0"),
        ({"every": 1, "fragments": 2}, "do not fit into a window of 1"),
        ({"every": 4, "delay": 5}, "do not fit into a window of 4"),
        ({"every": 4, "delay": 4, "merge": 0.0}, "forgets every step"),
        ({"merge": 1.0}, "merge=1.0"),
        ({"merge": "all"}, "merge='all': give the share"),
        ({"buffers": "mean"}, "give one of 'average', 'rank0', 'own'"),
        ({"moments": "yes"}, "give one of 'own', 'average', 'reset'"),
        ({"every": DriftTriggered(0.1, 8), "fragments": 2}, "averaged at once"),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings: dict[str, Any], said: str, one_rank: None) -> None:
    with pytest.raises(CompositionError, match=said):
        Averaging(model(), **settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiLoCo(lr=0),
        lambda: DiLoCo(momentum=1),
        lambda: SlowMo(beta=-0.1),
        lambda: Increasing(4, 2, 10),
        lambda: DriftTriggered(0, 4),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(CompositionError):
        make()


def test_what_needs_an_optimizer_asks_for_it(one_rank: None) -> None:
    with pytest.raises(AttachError, match="pass optimizer="):
        Averaging(model(), outer=SlowMo())


def test_an_optimizer_of_another_model_is_refused(one_rank: None) -> None:
    with pytest.raises(AttachError, match=r"parameter 0 of group 0 .* none of the model's"):
        LocalSGD(sgd(model()), model())


def test_an_inner_optimizer_that_is_stepped_elsewhere_is_told(one_rank: None) -> None:
    network = model()
    inner = sgd(network)
    with LocalSGD(inner, network) as optimizer:
        backward(network)
        before = copy.deepcopy(network.state_dict())
        with pytest.raises(StepError, match="stepped on its own"):
            inner.step()
        assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
        optimizer.step()
        assert optimizer.averaging.steps == 1
    inner.step()


def test_it_is_an_optimizer(one_rank: None) -> None:
    """Closures, hooks, schedulers and parameter groups."""
    network, alone = model(), model()
    inner, plain, hooked = sgd(network, 0.9), sgd(alone, 0.9), list[str]()
    with LocalSGD(inner, network, 100) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.register_step_pre_hook(_noting("before", hooked))
        optimizer.register_step_post_hook(_noting("after", hooked))
        decays = [torch.optim.lr_scheduler.StepLR(it, 2, 0.5) for it in (optimizer, plain)]
        for _ in range(5):
            for it, trains, decay in zip((optimizer, plain), (network, alone), decays, strict=True):

                def closure(it: torch.optim.Optimizer = it, trains: nn.Module = trains) -> float:
                    it.zero_grad()
                    return float(backward(trains).detach())

                loss = it.step(closure)
                assert loss is not None
                assert loss > 0
                decay.step()
        assert hooked == ["before", "after"] * 5
        assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1 * 0.25
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), alone.parameters(), strict=True))


def _noting(what: str, seen: list[str]) -> Callable[..., None]:
    def note(*_: Any) -> None:
        seen.append(what)

    return note


def test_groups_are_added_to_the_inner_optimizer(one_rank: None) -> None:
    network = model()
    inner = torch.optim.SGD(network[0].parameters(), 0.1)
    with LocalSGD(inner, network) as optimizer:
        optimizer.add_param_group({"params": network[1].parameters(), "lr": 0.5})
        assert [group["lr"] for group in inner.param_groups] == [0.1, 0.5]
        assert optimizer.param_groups is inner.param_groups
        with pytest.raises(AttachError, match="was not trained"):
            optimizer.add_param_group({"params": torch.ones(2, requires_grad=True)})
        assert len(inner.param_groups) == 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"sync": None}, 'has no "sync"'),
        ({"sync": {}}, "has no 'version'"),
        ({"settings": "outer=DiLoCo()"}, "make it with the settings it was saved with"),
        ({"rank": 1}, "each rank loads what the same rank saved"),
        ({"world_size": 4}, "begin anew from that model"),
        ({"steps": -1}, "steps should be a whole number from 0, not -1"),
        ({"fragments": [{}]}, r"fragments\[0\] has no 'session'"),
        ({"param_groups": []}, "another inner optimizer"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(other: dict[str, Any], said: str, one_rank: None) -> None:
    network = model()
    with LocalSGD(sgd(network, 0.9), network, 2) as optimizer:
        for _ in range(3):
            backward(network)
            optimizer.step()
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        with pytest.raises(StateError, match=said):
            optimizer.load_state_dict(_with(saved, other))
        assert _same(optimizer.state_dict(), before)


def _with(saved: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A saved state with other words in it; None takes a key out."""
    outside = changes.keys() & {"sync", "param_groups"}
    changed = {**saved, **changes} if outside else {**saved, "sync": {**saved["sync"], **changes}}
    return {key: value for key, value in changed.items() if value is not None}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def test_a_checkpoint_of_another_model_is_refused(one_rank: None) -> None:
    with Averaging(model()) as small:
        saved = small.state_dict()
    with Averaging(model(width=5)) as averaging:
        before = averaging.state_dict()
        with pytest.raises(StateError, match=r"'0.weight' is \(3, 4\) torch.float32, and here \(5, 4\)"):
            averaging.load_state_dict(saved)
        assert _same(averaging.state_dict(), before)


@pytest.mark.parametrize(
    ("periods", "options", "said"),
    [
        ({"place": 4, "rack": 8}, {}, "an axis 'rack' that the mesh has not; its axes are 'site', 'place'"),
        ({"place": 4}, {}, "less than two axes"),
        ({"place": 4, "site": 6}, {}, "a multiple of the period before it"),
        ({"place": 4, "site": 8}, {"group": None}, "leave out group="),
        ({"place": 4, "site": 8}, {"delay": 9}, "do not fit into a window of 8"),
    ],
)
def test_periods_that_fit_no_mesh_are_refused(
    periods: dict[str, int], options: dict[str, Any], said: str, one_rank: None
) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("site", "place"))
    with pytest.raises(CompositionError, match=said):
        Hierarchical.over(mesh, model(), periods, **options)


def test_levels_of_a_hierarchy_are_checked_and_saved(one_rank: None) -> None:
    network = model()
    with Averaging(network, 2) as inside, Averaging(network, 4, outer=DiLoCo()) as between, Averaging(model()) as other:
        with pytest.raises(CompositionError, match="two levels"):
            Hierarchical(inside)
        with pytest.raises(CompositionError, match="one model"):
            Hierarchical(inside, other)
        levels, inner = Hierarchical(inside, between), sgd(network)

        def train() -> None:
            for _ in range(3):
                inner.zero_grad()
                backward(network)
                inner.step()
                levels.step()

        train()
        saved = copy.deepcopy([levels.state_dict(), network.state_dict()])
        train()
        whole = copy.deepcopy([levels.state_dict(), network.state_dict()])
        levels.load_state_dict(saved[0])
        network.load_state_dict(saved[1])
        assert not _same([levels.state_dict(), network.state_dict()], whole)
        train()
        assert _same([levels.state_dict(), network.state_dict()], whole)
        damaged = {"levels": [saved[0]["levels"][0], {}]}
        with pytest.raises(StateError, match="has no 'version'"):
            levels.load_state_dict(damaged)
        assert _same(levels.state_dict(), whole[0])
        with pytest.raises(StateError, match="2 levels"):
            levels.load_state_dict({})


def test_the_page_runs(one_rank: None) -> None:
    page = (Path(__file__).parents[1] / "docs" / "sync.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about shards of one rank
        exec("".join(blocks), {})


def test_diloco_is_torchs_sgd() -> None:
    x, rule = torch.randn(50, dtype=torch.float64), DiLoCo(0.7, 0.9)
    theirs = x.clone().requires_grad_()
    optimizer, memory = torch.optim.SGD([theirs], 0.7, 0.9, nesterov=True), rule.memory(x)
    for _ in range(5):
        d = torch.randn(50, dtype=torch.float64)
        rule.move_(x, d, memory, Rates(0.1, 0.1))
        theirs.grad = -d
        optimizer.step()
        torch.testing.assert_close(x, theirs.detach(), rtol=0, atol=1e-14)


def test_slow_momentum_follows_the_rate() -> None:
    """u = beta u + (x_0 - x_H) / gamma, where gamma falls and is 0 once."""
    x, rule = torch.zeros(1, dtype=torch.float64), SlowMo(0.5, 2.0)
    memory, u, expected, before = rule.memory(x), 0.0, 0.0, 0.4
    for gamma in (0.4, 0.2, 0.0, 0.1):
        d = torch.ones(1, dtype=torch.float64) if gamma else torch.zeros(1, dtype=torch.float64)
        rule.move_(x, d, memory, Rates(gamma, before))
        if gamma:
            u = 0.5 * u - 1 / gamma
            expected -= 2.0 * gamma * u
            before = gamma
        assert float(x) == pytest.approx(expected, abs=1e-14)


def test_half_precision_keeps_small_outer_steps(one_rank: None) -> None:
    """A change below bfloat16's resolution adds up in the global copy, and reaches the model."""
    network = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(network.weight)
    with Averaging(network, 1, outer=DiLoCo(0.125, 0.0)) as averaging:
        for _ in range(16):
            with torch.no_grad():
                network.weight.add_(2**-7)
            averaging.step()
        assert float(averaging.global_copy()["weight"]) == 1 + 16 * 2**-10
        assert float(network.weight.detach()) == 1 + 2 * 2**-7
