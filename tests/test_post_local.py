"""Post-local SGD by PyTorch's names: next to PyTorch's own, and where that does not work."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import StateError, hooks
from gradwire.ranks.supervised import run_function
from post_local_cases import PERIOD, START, STEPS

CASES = str(Path(__file__).with_name("post_local_cases.py"))


@functools.cache
def run(case: str, ranks: int) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, {}, 120)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("reduces", ["True", "False"])
def test_it_trains_as_pytorchs_does(reduces: str) -> None:
    """Over many buckets on our side, with two groups of two ranks."""
    averages = range(START, STEPS, PERIOD)
    apart = 2 if reduces == "True" else 4
    for found in run("compare", 4):
        assert found[reduces]["far"] < 1e-5
        assert found[reduces]["models"] == [1 if s < START or s in averages else apart for s in range(STEPS)]
        assert found[reduces]["counts"] == [START, START, STEPS, STEPS]


def test_a_resume_is_exact_and_does_not_warm_up_again() -> None:
    for whole, resumed in run("resumed", 3):
        assert whole == resumed


def test_a_scaler_that_skips_on_one_rank_leaves_averages_in_step() -> None:
    assert run("scaled", 2) == [[STEPS - 1, 1, True]] * 2


def test_without_a_subgroup_it_is_the_ranks_of_a_host() -> None:
    assert run("same_host", 2) == [[[0, 1], 1]] * 2


def test_what_some_ranks_do_not_use_is_averaged_too() -> None:
    assert max(run("unused", 3)) < 1e-6


# One rank, in this process ----------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused(one_rank: None) -> None:
    with pytest.raises(ValueError, match="period=0"):
        hooks.PeriodicModelAverager(0)
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        hooks.PeriodicModelAverager(2, -1)
    with pytest.warns(UserWarning, match="period=1 sends as much"):
        hooks.PeriodicModelAverager(1)
    with pytest.raises(StateError, match="no 'iter'"):
        hooks.PostLocalSGDState(None, None, 4).load_state_dict({})


def test_it_is_a_whole_optimizer(one_rank: None) -> None:
    """Closures, hooks, schedulers, groups, and a state without a step."""
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = hooks.PostLocalSGDOptimizer(
        torch.optim.SGD(first.parameters(), 0.5, 0.9), hooks.PeriodicModelAverager(2)
    )
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.25})
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen: list[str] = []

    def note(*_: Any) -> None:
        seen.append("stepped")

    optimizer.register_step_post_hook(note)

    def closure() -> float:
        optimizer.zero_grad()
        loss = second(first(torch.ones(1, 3))).square().sum()
        loss.backward()
        return float(loss.detach())

    before = optimizer.step(closure)
    decay.step()
    assert optimizer.step(closure) != before
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.25, 0.125]
    assert seen == ["stepped"] * 2
    assert optimizer.state_dict()["step"] == 2
    with pytest.warns(UserWarning, match="has no step of an averager"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert optimizer.averager.step == 0
    assert optimizer.state is optimizer.optim.state
