"""Kernels of low-rank methods: plain torch and numba give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels import cpu_lowrank, lowrank, reference_lowrank


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1.0, 1e-42, 1e-20, 1e37])
def test_unit_rows(size: float) -> None:
    Q = normal(6, 33) * size
    Q[2], Q[4, 1:] = 0, 0
    Q[4, 0] = 2.0**-149
    fast, slow = Q.clone(), Q.clone()
    cpu_lowrank.unit_rows_(fast, 5)
    reference_lowrank.unit_rows_(slow, 5)
    assert torch.equal(fast, slow)
    largest = fast.abs().amax(1)[[0, 1, 3, 5]]
    assert bool((largest < 2).all())
    assert bool((largest >= (1 if size > 1e-30 else 0)).all())
    assert bool(fast[2].any())
    assert bool(fast[4, 0] > 0)


def test_unit_rows_keep_what_is_not_finite() -> None:
    for module in (cpu_lowrank, reference_lowrank):
        Q = torch.tensor([[1.0, float("nan")], [float("inf"), 0.0], [3.0, 0.0]])
        module.unit_rows_(Q, 1)
        assert torch.isfinite(Q).all(1).tolist() == [False, False, True]


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        lowrank.unit_rows_(torch.zeros(2, 2, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="contiguous"):
        lowrank.unit_rows_(torch.zeros(2, 3).mT, 1)
