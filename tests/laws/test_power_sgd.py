"""What PowerSGD promises beyond the laws: the best low-rank mean, and no trouble with zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import Lockstep, parse
from gradwire.core.errors import CompositionError
from gradwire.core.grain import matrix_grain
from gradwire.core.key import Key
from gradwire.core.state import walk
from gradwire.reducers import SVD, ErrorFeedback, GradZip, PowerSGD
from gradwire.reducers.sketch import directions

from .checks import norm, repeated, unit_roundoff
from .subjects import DTYPES, low_rank, normal


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_mean_of_low_rank_is_found_exactly(rank: int) -> None:
    grain = matrix_grain(24, 17, batch=2)
    lockstep = Lockstep(PowerSGD(rank), grain, world_size=2)
    # Both ranks' matrices share a row space, so that the mean has rank r and no more.
    right = normal((2, rank, 17), 9)
    xs = [normal((2, 24, rank), seed) @ right for seed in (1, 2)]
    mean = repeated(lockstep, xs, 3)
    assert norm(mean - (xs[0] + xs[1]) / 2) <= 64 * unit_roundoff() * norm(xs[0])


@pytest.mark.parametrize("rank", [1, 3])
def test_it_approaches_the_best_approximation(rank: int) -> None:
    """Repeated on one matrix it is subspace iteration, which converges to the truncated SVD."""
    x = normal((1, 24, 17), 3)
    lockstep = Lockstep(PowerSGD(rank), matrix_grain(24, 17), world_size=1)
    mean = repeated(lockstep, [x], 200)
    s = torch.linalg.svdvals(x[0].double())
    best = float(s[rank:].square().sum().sqrt())
    # Subspace iteration loses (s[r] / s[r - 1])^(2 t) of itself in t steps; 200 are enough for 1%.
    assert best * (1 - 1e-5) <= norm(x - mean) <= 1.01 * best


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4])
def test_a_layer_without_gradient_comes_back(rank: int, dtype: torch.dtype) -> None:
    grain = matrix_grain(20, 30, dtype=dtype)
    lockstep = Lockstep(parse(f"powersgd:{rank}"), grain, world_size=2)
    zero = [torch.zeros(grain.shape, dtype=dtype)] * 2
    for _ in range(3):
        for mean in lockstep.step(zero):
            assert not bool(mean.any())
    for state in lockstep.states:
        assert all(bool(torch.isfinite(leaf.tensor).all()) for _, leaf in walk(state))
    x = low_rank(20, 30, 1, seed=5).to(dtype)
    mean = repeated(lockstep, [x, x], 3)
    assert norm(mean - x) <= 64 * unit_roundoff(dtype) * norm(x)


def test_rank_deficient_matrices_stay_finite() -> None:
    grain = matrix_grain(20, 30)
    lockstep = Lockstep(parse("powersgd:4"), grain, world_size=2)
    for step in range(20):
        for mean in lockstep.step([low_rank(20, 30, 1, seed=step)] * 2):
            assert bool(torch.isfinite(mean).all())
    x = low_rank(20, 30, 4, seed=99)
    mean = repeated(lockstep, [x, x], 6)
    # Error feedback carries what was owed at the switch, and gives it back within a few steps.
    assert norm(mean - x) <= 1e-3 * norm(x)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (9, 1), (2, 3)])
def test_a_rank_beyond_the_matrix_is_the_matrix(rows: int, columns: int) -> None:
    grain = matrix_grain(rows, columns)
    lockstep = Lockstep(PowerSGD(4), grain, world_size=2)
    xs = [normal(grain.shape, seed) for seed in (1, 2)]
    shapes = [[leaf.tensor.shape for _, leaf in walk(state)] for state in lockstep.states]
    mean = repeated(lockstep, xs, 2)
    assert norm(mean - (xs[0] + xs[1]) / 2) <= 64 * unit_roundoff() * (norm(xs[0]) + norm(xs[1]))
    assert [[leaf.tensor.shape for _, leaf in walk(state)] for state in lockstep.states] == shapes


def off_by(reducer: PowerSGD, steps: int, change: float = 0.0) -> float:
    """Relative error of the mean after some steps of a matrix that has more than r directions and may wander."""
    lockstep = Lockstep(reducer, matrix_grain(60, 50), world_size=2)
    base = low_rank(60, 50, 3, seed=3) + 0.3 * normal((1, 60, 50), 7)
    mean, x = base, base
    for step in range(steps):
        x = base + change * normal((1, 60, 50), 100 + step)
        mean = lockstep.step([x, x])[0]
    return norm(mean - x) / norm(x)


def test_more_iterations_find_more_in_one_step() -> None:
    once, thrice = off_by(PowerSGD(3), 1), off_by(PowerSGD(3, iterations=3), 1)
    assert thrice < 0.9 * once
    # Three cold steps in one are three warm ones of the same matrix.
    assert abs(thrice - off_by(PowerSGD(3), 3)) <= 1e-4


def test_a_cold_start_forgets() -> None:
    cold = PowerSGD(3, warm_start=False)
    assert Lockstep(cold, matrix_grain(9, 8), 2).states == [{}, {}]
    assert off_by(PowerSGD(3), 20) < 0.9 * off_by(cold, 20)


def test_momentum_of_q_averages_noise_away() -> None:
    """Noise that is drawn anew each step tilts the start less where several steps are averaged."""
    found = [off_by(PowerSGD(3, momentum=m), 30, change=1.0) for m in (0.0, 0.8)]
    assert found[1] < found[0]


def test_both_residuals_give_the_same_means_and_only_one_lets_ranks_drift_apart() -> None:
    """Ranks whose gradients differ for ever: M - P Q^T piles all of that difference up, M - P Q_local^T only what lies
    outside the span of P, which here is nothing."""
    grain = matrix_grain(20, 30)
    left = normal((1, 20, 2), 1)
    base, apart = left @ normal((1, 2, 30), 2), left @ normal((1, 2, 30), 5)
    xs, residuals, means = [base + apart, base - apart], list[float](), list[Tensor]()
    for sent in ("local", "mean"):
        lockstep = Lockstep(ErrorFeedback(PowerSGD(2, sent=sent)), grain, world_size=2)
        means.append(repeated(lockstep, xs, 40))
        residuals.append(max(norm(leaf.tensor) for _, leaf in walk(lockstep.states[0]) if leaf.owed))
    assert norm(means[0] - means[1]) <= 1e-2 * norm(base)
    assert residuals[1] > 5 * residuals[0]


def test_half_precision_carries_large_gradients() -> None:
    """M Q is of the size of M: with the Q of the step before, of M's size, it would be of M^2 and overflow."""
    x = (500 * low_rank(20, 30, 2, seed=1)).half()
    mean = repeated(Lockstep(parse("powersgd:2"), matrix_grain(20, 30, dtype=torch.float16), 2), [x, x], 4)
    assert norm(mean - x) <= 0.01 * norm(x)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank"),
        ({"iterations": 0}, "iterations"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": 0.5, "warm_start": False}, "warm_start"),
        ({"sent": "all"}, "local"),
        ({"min_compression_rate": 0.0}, "min_compression_rate"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(CompositionError, match=says):
        PowerSGD(**options)


# Its cousins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3])
def test_svd_is_the_best_approximation(rank: int) -> None:
    x = normal((1, 24, 17), 3)
    mean = Lockstep(SVD(rank), matrix_grain(24, 17), world_size=2).step([x, x])[0]
    s = torch.linalg.svdvals(x[0].double())
    assert norm(x - mean) == pytest.approx(float(s[rank:].square().sum().sqrt()), rel=1e-5)


def test_gradzip_finds_what_power_sgd_finds() -> None:
    """Least squares shrinks a little and spans the same."""
    x = low_rank(24, 17, 2, seed=2)
    mean = repeated(Lockstep(GradZip(2, regularisation=1e-4), matrix_grain(24, 17), 2), [x, x], 10)
    assert norm(mean - x) <= 1e-3 * norm(x)
    lockstep = Lockstep(parse("gradzip:2"), matrix_grain(24, 17), 2)
    assert norm(repeated(lockstep, [x, x], 30) - x) <= 1e-2 * norm(x)
    with pytest.raises(CompositionError, match="powersgd"):
        GradZip(2, regularisation=0.0)


def test_a_sketch_of_another_step_sees_what_this_one_did_not() -> None:
    """With error feedback all of a gradient arrives: what is owed stays near x (1 / delta - 1), and means add up."""
    x = normal((1, 20, 32), 4)
    lockstep = Lockstep(parse("sketch:8"), matrix_grain(20, 32), world_size=2)
    total = torch.stack([lockstep.step([x, x])[0] for _ in range(100)]).double().mean(0)
    assert norm(total - x.double()) <= 2 * 3 / 100 * norm(x)
    St = directions(Key(1), 32, 8, x.device)
    assert norm(St @ St.mT - torch.eye(8)) <= 64 * unit_roundoff()
