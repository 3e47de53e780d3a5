"""Worker momentum sends the average it says, whatever is inside it, and forgets what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs import Identity, TopK
from gradwire.core import collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import flat_grain
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import (
    DGC,
    AllGatherExchange,
    AllReduceExchange,
    CompressionWarmUp,
    ErrorFeedback,
    Guard,
    MomentumCorrection,
    Partition,
    Reducer,
    Step,
    WorkerMomentum,
)

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


@pytest.mark.parametrize(
    "inner", [AllReduceExchange(Identity()), ErrorFeedback(AllGatherExchange(TopK(1.0)))], ids=repr
)
def test_the_mean_is_that_of_the_averages(inner: Reducer) -> None:
    """Over what leaves its input alone and over what keeps it."""
    lockstep = Lockstep(WorkerMomentum(inner, MOMENTUM), flat_grain(NUMEL), RANKS)
    for step in range(5):
        mean = lockstep.step(gradients(step))[0]
        wanted = torch.stack(averages(step + 1)).mean(0)
        assert checks.norm(mean.double() - wanted) <= 1e-6 * checks.norm(wanted)


def test_error_feedback_owes_averages() -> None:
    """What was delivered and what is owed add up to the averages of all steps."""
    lockstep = Lockstep(WorkerMomentum(ErrorFeedback(AllGatherExchange(TopK(0.1))), MOMENTUM), flat_grain(NUMEL), RANKS)
    delivered = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        delivered += lockstep.step(gradients(step))[0].double()
    owed = torch.stack([state.part("inner").tensor("residual").double() for state in lockstep.states]).mean(0)
    wanted = sum((torch.stack(averages(step + 1)).mean(0) for step in range(6)), torch.zeros(()))
    assert checks.norm(delivered + owed - wanted) <= 1e-5 * checks.norm(wanted)


def test_a_step_that_is_not_finite_is_seen_and_forgotten() -> None:
    lockstep, untroubled = (
        Lockstep(gradwire.parse("none,worker_momentum=0.8"), flat_grain(NUMEL), RANKS) for _ in "ab"
    )
    for both in (lockstep, untroubled):
        both.step(gradients(0))
    spoiled = gradients(1)
    spoiled[1][7], spoiled[2][9] = math.nan, math.inf
    mean = lockstep.step(spoiled)[0]
    assert not mean[7].isfinite()
    assert not mean[9].isfinite()
    assert torch.equal(lockstep.step(gradients(2))[0], untroubled.step(gradients(2))[0])


def test_a_rank_that_a_rule_leaves_out_starts_anew() -> None:
    lockstep = Lockstep(gradwire.parse("median,worker_momentum=0.8"), flat_grain(NUMEL), RANKS)
    spoiled = gradients(0)
    spoiled[1][7] = math.nan
    assert bool(lockstep.step(spoiled)[0].isfinite().all())
    assert float(lockstep.states[1].tensor("average")[7]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_more_is_sent_than_came(dtype: torch.dtype) -> None:
    grain = flat_grain(NUMEL, dtype=dtype)
    request = next(
        (reducer := gradwire.parse("none,worker_momentum=0.8")).reduce(
            grain, torch.zeros(NUMEL), reducer.init(grain, Step(0, 0, 2)), Step(0, 0, 2)
        )
    )
    assert isinstance(request, collective.AllReduce)
    assert request.tensor.dtype == dtype


def test_large_numbers_of_opposite_signs() -> None:
    lockstep = Lockstep(gradwire.parse("none,worker_momentum=0.5"), flat_grain(1), 2)
    for value, wanted in ((3e38, 1.5e38), (-3e38, -0.75e38)):
        assert float(lockstep.step([torch.full((1,), value)] * 2)[0]) == pytest.approx(wanted)


def test_the_noise_of_ranks_shrinks_as_said() -> None:
    """By sqrt((1 - m) / (1 + m)): a third at 0.8."""
    lockstep = Lockstep(WorkerMomentum(AllReduceExchange(Identity()), MOMENTUM), flat_grain(NUMEL), RANKS)
    for step in range(400):
        lockstep.step(gradients(step))
    spread = torch.stack([state.tensor("average") for state in lockstep.states]).std()
    assert abs(float(spread) - ((1 - MOMENTUM) / (1 + MOMENTUM)) ** 0.5) < 0.06


def test_momentum_is_never_taken_twice() -> None:
    """Whatever lies between the two."""
    for inner in (
        DGC(0.01),
        MomentumCorrection(AllGatherExchange(TopK(0.1))),
        WorkerMomentum(AllReduceExchange(Identity())),
    ):
        for wrapped in (
            inner,
            Guard(inner),
            CompressionWarmUp(AllReduceExchange(Identity()), inner, 2),
            Partition((), inner),
        ):
            with pytest.raises(CompositionError, match="momentum of its own"):
                WorkerMomentum(wrapped)
    assert WorkerMomentum(DGC(0.01, momentum=0.0)).carries_momentum


def test_it_is_an_option_of_every_method_without_momentum() -> None:
    assert gradwire.parse("topk:0.1,worker_momentum=0.9") == Guard(
        WorkerMomentum(ErrorFeedback(AllGatherExchange(TopK(0.1))), 0.9)
    )
    with pytest.raises(CompositionError, match=r"outside \[0, 1\)"):
        gradwire.parse("krum:1,worker_momentum=1")
