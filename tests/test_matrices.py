"""Products with thin factors and orthonormal rows: the same bits wherever they are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy import stats
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import low_rank
from kernel_sets import everything_in

cpu_matrices, reference_matrices = everything_in("cpu"), everything_in("reference")

SHAPES = [
    (1, 1, 1, 1),
    (2, 64, 64, 4),
    (3, 33, 65, 5),
    (2, 100, 17, 3),
    (1, 3000, 40, 16),
    (4, 7, 130, 6),
    (1, 5, 16, 1),
]
"""(batch, rows, columns, rank), with every remainder of panels, lanes and pairs of rows."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def elsewhere(x: Tensor) -> Tensor:
    """The same values at an address that no vector is aligned to."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("batch", "rows", "columns", "rank"), SHAPES)
@pytest.mark.parametrize(("alpha", "add"), [(1.0, False), (-1 / 3, True)])
def test_products_have_the_bits_of_the_reference(
    batch: int, rows: int, columns: int, rank: int, alpha: float, add: bool
) -> None:
    Pt, Qt, out = drawn(batch, rank, rows), drawn(batch, rank, columns, seed=1), drawn(batch, rows, columns, seed=2)
    expected = out.clone()
    reference_matrices.low_rank_(expected, Pt, Qt, alpha, add)
    low_rank.low_rank_(out, Pt, Qt, alpha, add)
    assert same_bits(out, expected)
    exact = torch.bmm(Pt.mT.double(), Qt.double()) * alpha + (drawn(batch, rows, columns, seed=2) if add else 0.0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "rows", "columns", "rank"), SHAPES)
def test_projections_are_products(batch: int, rows: int, columns: int, rank: int) -> None:
    M, Pt, Qt = drawn(batch, rows, columns), drawn(batch, rank, rows, seed=1), drawn(batch, rank, columns, seed=2)
    for module in (cpu_matrices, reference_matrices):
        exact = torch.bmm(Qt.double(), M.double().mT)
        torch.testing.assert_close(module.project_columns(M, Qt).double(), exact, rtol=1e-4, atol=1e-4)
        exact = torch.bmm(Pt.double(), M.double())
        torch.testing.assert_close(module.project_rows(Pt, M).double(), exact, rtol=1e-4, atol=1e-4)


def test_nothing_depends_on_addresses_strides_or_threads(threads: int) -> None:
    M, Pt, Qt = drawn(2, 700, 500), drawn(2, 3, 700), drawn(2, 3, 500, seed=1)

    def all_of(M: Tensor, Pt: Tensor, Qt: Tensor) -> list[Tensor]:
        vectors, out = low_rank.orthonormalise(Pt), M.clone()
        low_rank.low_rank_(out, Pt, Qt, -0.3, add=True)
        return [out, vectors, low_rank.project_columns(M, Qt), low_rank.project_rows(Pt, M)]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = all_of(M, Pt, Qt)
    torch.set_num_threads(before)
    turned = [x.mT.contiguous().mT for x in (Pt, Qt)]
    for arguments in ((elsewhere(M), elsewhere(Pt), elsewhere(Qt)), (M, *turned)):
        assert all(same_bits(x, y) for x, y in zip(all_of(*arguments), expected, strict=True))
    assert before == threads


@pytest.mark.parametrize(("batch", "rank", "length"), [(1, 1, 1), (2, 4, 300), (1, 3, 5000), (2, 32, 40), (1, 48, 64)])
def test_orthonormal_rows_have_the_bits_of_the_reference(batch: int, rank: int, length: int) -> None:
    """And they are orthonormal to the rounding of sums of so many products, and span what Householder's rows span."""
    vectors = drawn(batch, rank, length, seed=rank)
    found = low_rank.orthonormalise(vectors)
    assert same_bits(found, reference_matrices.orthonormalise(vectors))
    q, bound = found.double(), 8 * math.sqrt(rank) * torch.finfo(torch.float32).eps
    assert (q @ q.mT - torch.eye(rank)).abs().max() < bound
    householder = torch.linalg.qr(vectors.double().mT).Q
    conditions = float(torch.linalg.cond(vectors.double()).max())
    assert ((q.mT * householder).sum(1).abs() - 1).abs().max() < bound * conditions


def degenerate() -> Tensor:
    vectors = drawn(3, 4, 200, seed=1)
    vectors[0, 2] = 2 * vectors[0, 0] - vectors[0, 1]
    vectors[1] = 0
    vectors[2, 1, 3] = float("nan")
    return vectors


def test_dependent_rows_vanish_and_what_is_not_finite_stays_so() -> None:
    vectors = degenerate()
    q = low_rank.orthonormalise(vectors)
    assert same_bits(q[:2], reference_matrices.orthonormalise(vectors)[:2])
    assert q[0].square().sum(1).round(decimals=3).tolist() == [1, 1, 0, 1]
    assert not q[1].any()
    assert not q[2].isfinite().all()
    torch.testing.assert_close(vectors[0] @ q[0].T @ q[0], vectors[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exponent", [-140, -100, -20, 60, 100])
def test_orthonormal_rows_do_not_depend_on_lengths(exponent: int) -> None:
    """Each row times a power of two of its own: the same bits, also where 1 / what is left of a row leaves float32."""
    vectors = (drawn(2, 4, 300) * 2**18).round()  # multiples of 1, so that scaling is exact far down
    vectors[:, 1] = vectors[:, 0]
    vectors[:, 1, 7] += 2**8
    sizes = torch.tensor([2.0**exponent, 2.0**exponent, 1.0, 2.0 ** (exponent // 2)])[None, :, None]
    for module in (cpu_matrices, reference_matrices):
        expected = module.orthonormalise(vectors)
        assert expected.square().sum(2).round(decimals=3).eq(1).all()
        assert same_bits(module.orthonormalise(vectors * sizes), expected)


def test_rows_of_subnormal_numbers_are_zero() -> None:
    """As they are on processors that take subnormal numbers for zero."""
    vectors = drawn(1, 3, 200)
    vectors[0, 1] = vectors[0, 1].sign() * 2.0**-127
    for module in (cpu_matrices, reference_matrices):
        assert module.orthonormalise(vectors)[0].square().sum(1).round(decimals=3).tolist() == [1, 0, 1]


def test_inner_products_are_those_of_the_gram_matrix() -> None:
    a, b = drawn(2, 3, 2100), drawn(2, 3, 2100, seed=1)
    torch.testing.assert_close(low_rank.products(a, b), (a.double() * b.double()).sum(2))


def test_gaussian_numbers_have_the_bits_of_the_reference_and_are_normal() -> None:
    x = cpu_matrices.gaussian(12345, 300_001)
    assert same_bits(x, reference_matrices.gaussian(12345, 300_001))
    assert same_bits(x[:100], cpu_matrices.gaussian(12345, 100))
    assert not same_bits(x[:100], cpu_matrices.gaussian(12346, 100))
    assert stats.kstest(x.numpy(), "norm").pvalue > 0.01
    assert kernels.gaussian(1, (2, 3), torch.device("meta")).shape == (2, 3)


def test_misuse_is_told() -> None:
    M, factor = torch.zeros(1, 4, 6), torch.zeros(1, 2, 6)
    with pytest.raises(ValueError, match="rank <= length"):
        low_rank.orthonormalise(torch.zeros(1, 4, 3))
    with pytest.raises(ValueError, match="contiguous"):
        low_rank.project_columns(M.mT, torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="is needed"):
        low_rank.project_rows(factor, M)
    with pytest.raises(ValueError, match="have no product"):
        low_rank.low_rank_(M, torch.zeros(1, 3, 4), factor)
    with pytest.raises(TypeError, match="float32 only"):
        low_rank.project_columns(M, factor.double())


def test_without_data_the_shapes_are_the_same() -> None:
    M, Pt, Qt = drawn(2, 6, 5), drawn(2, 3, 6, seed=1), drawn(2, 3, 5, seed=2)
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (low_rank.project_columns, (M, Qt)),
        (low_rank.project_rows, (Pt, M)),
        (low_rank.low_rank, (Pt, Qt)),
        (low_rank.products, (Qt, Qt)),
        (low_rank.orthonormalise, (Qt,)),
    ]
    for kernel, tensors in calls:
        real, shape = kernel(*tensors), kernel(*(tensor.to("meta") for tensor in tensors))
        assert (shape.shape, shape.dtype, shape.is_meta) == (real.shape, real.dtype, True)
        assert shape.is_contiguous()
