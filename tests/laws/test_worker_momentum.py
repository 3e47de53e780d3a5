"""Worker momentum sends the average it says, whatever is inside it, and forgets what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs import Identity, TopK
from gradwire.core.errors import CompositionError
from gradwire.core.grain import flat_grain
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import AllGather, AllReduce, ErrorFeedback, Guard, Reducer, WorkerMomentum

from . import checks
from .subjects import sample

RANKS, NUMEL, MOMENTUM = 3, 50, 0.8


def gradients(step: int) -> list[Tensor]:
    return [sample("normal", (NUMEL,), seed=10 * step + rank) for rank in range(RANKS)]


def averages(steps: int) -> list[Tensor]:
    """Of each rank, after so many steps, by the equation."""
    found = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(RANKS)]
    for step in range(steps):
        found = [MOMENTUM * m + (1 - MOMENTUM) * g.double() for m, g in zip(found, gradients(step), strict=True)]
    return found


@pytest.mark.parametrize("inner", [AllReduce(Identity()), ErrorFeedback(AllGather(TopK(1.0)))], ids=repr)
def test_the_mean_is_that_of_the_averages(inner: Reducer) -> None:
    """Over what leaves its input alone and over what keeps it."""
    lockstep = Lockstep(WorkerMomentum(inner, MOMENTUM), flat_grain(NUMEL), RANKS)
    for step in range(5):
        mean = lockstep.step(gradients(step))[0]
        wanted = torch.stack(averages(step + 1)).mean(0)
        assert checks.norm(mean.double() - wanted) <= 1e-6 * checks.norm(wanted)


def test_error_feedback_owes_averages() -> None:
    """What was delivered and what is owed add up to the averages of all steps."""
    lockstep = Lockstep(WorkerMomentum(ErrorFeedback(AllGather(TopK(0.1))), MOMENTUM), flat_grain(NUMEL), RANKS)
    delivered = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        delivered += lockstep.step(gradients(step))[0].double()
    owed = torch.stack([state.part("inner").tensor("residual").double() for state in lockstep.states]).mean(0)
    wanted = sum((torch.stack(averages(step + 1)).mean(0) for step in range(6)), torch.zeros(()))
    assert checks.norm(delivered + owed - wanted) <= 1e-5 * checks.norm(wanted)


def test_what_is_not_finite_is_sent_and_forgotten() -> None:
    lockstep = Lockstep(WorkerMomentum(AllReduce(Identity()), MOMENTUM), flat_grain(NUMEL), RANKS)
    spoiled = gradients(0)
    spoiled[1][7], spoiled[2][9] = math.nan, math.inf
    mean = lockstep.step(spoiled)[0]
    assert not mean[7].isfinite()
    assert not mean[9].isfinite()
    assert bool(lockstep.step(gradients(1))[0].isfinite().all())


def test_the_noise_of_ranks_shrinks_as_said() -> None:
    """By sqrt((1 - m) / (1 + m)): a third at 0.8."""
    lockstep = Lockstep(WorkerMomentum(AllReduce(Identity()), MOMENTUM), flat_grain(NUMEL), RANKS)
    for step in range(400):
        lockstep.step(gradients(step))
    spread = torch.stack([state.tensor("average") for state in lockstep.states]).std()
    assert abs(float(spread) - ((1 - MOMENTUM) / (1 + MOMENTUM)) ** 0.5) < 0.06


def test_it_is_an_option_of_every_method() -> None:
    assert gradwire.parse("topk:0.1,worker_momentum=0.9") == Guard(
        WorkerMomentum(ErrorFeedback(AllGather(TopK(0.1))), 0.9)
    )
    with pytest.raises(CompositionError, match=r"outside \[0, 1\)"):
        gradwire.parse("krum:1,worker_momentum=1")
