"""Laws of the kernels of aggregation rules: numba and plain torch give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels.robust import cpu, reference

SHAPES = [(n, m) for n in (1, 2, 3, 5, 8, 13, 33) for m in (0, 1, 127, 129, 1000)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def rows_of(shape: tuple[int, int]) -> Tensor:
    """Ties, zeros of both signs, wide ranges, and values that are not finite."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[:, ::3] = x[:, ::3].round()
    x[:, 1::7] *= torch.logspace(-20, 20, x[:, 1::7].shape[1])
    x[:1, 5::50], x[-1:, 6::50] = float("nan"), float("inf")
    x[:, 9::50] = float("nan")
    return x


def both(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.full((shape[1],), 7.0), torch.full((shape[1],), 9.0)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a[~a.isnan()].view(torch.int32), b[~b.isnan()].view(torch.int32))


@each_shape
def test_trimmed_means_agree(shape: tuple[int, int]) -> None:
    rows = rows_of(shape)
    for trim in range((shape[0] + 1) // 2):
        a, b = both(shape)
        reference.trimmed_mean(rows, trim, a)
        cpu.trimmed_mean(rows, trim, b)
        assert_same_bits(a, b)


@each_shape
def test_means_around_the_median_agree(shape: tuple[int, int]) -> None:
    rows = rows_of(shape)
    for keep in {1, (shape[0] + 1) // 2, shape[0]}:
        a, b = both(shape)
        reference.mean_around_median(rows, keep, a)
        cpu.mean_around_median(rows, keep, b)
        assert_same_bits(a, b)


@each_shape
def test_weighted_sums_agree_and_leave_out_what_has_no_weight(shape: tuple[int, int]) -> None:
    rows, weights = rows_of(shape), torch.linspace(0, 1, shape[0], dtype=torch.float64)
    a, b = both(shape)
    reference.weighted_sum(rows, weights, a)
    cpu.weighted_sum(rows, weights, b)
    assert_same_bits(a, b)
    cpu.weighted_sum(torch.full_like(rows, float("nan")), torch.zeros_like(weights), b)
    assert not bool(b.any())


@each_shape
def test_distances_and_products_agree(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    exact = rows.double()
    for kernels in (reference, cpu):
        # sums of float64, after differences that are rounded to float32
        distances = (exact[:, None] - exact[None]).square().sum(-1)
        torch.testing.assert_close(kernels.squared_distances(rows), distances, rtol=1e-6, atol=0)
        torch.testing.assert_close(kernels.products(rows), exact @ exact.T, rtol=1e-12, atol=1e-12)
    assert torch.equal(reference.squared_distances(rows), cpu.squared_distances(rows))
    assert torch.equal(reference.products(rows), cpu.products(rows))


def test_several_threads_give_the_same() -> None:
    rows, (a, b) = torch.randn(4, 300_001), both((4, 300_001))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        cpu.trimmed_mean(rows, 1, a)
        distances = cpu.squared_distances(rows)
    finally:
        torch.set_num_threads(before)
    reference.trimmed_mean(rows, 1, b)
    assert_same_bits(a, b)
    assert torch.equal(distances, reference.squared_distances(rows))
