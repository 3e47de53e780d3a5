"""What PowerSGD promises beyond the laws: the best low-rank mean, and no trouble with zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import Lockstep, parse
from gradwire.core.grain import matrix_grain
from gradwire.core.state import walk
from gradwire.reducers import PowerSGD

from .checks import norm, unit_roundoff
from .subjects import DTYPES, normal


def repeated(lockstep: Lockstep, xs: list[Tensor], steps: int) -> Tensor:
    """The mean of the last of some equal steps."""
    return [lockstep.step(xs)[0] for _ in range(steps)][-1]


def low_rank(rows: int, columns: int, rank: int, seed: int, batch: int = 1) -> Tensor:
    return normal((batch, rows, rank), seed) @ normal((batch, rank, columns), seed + 1)


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
