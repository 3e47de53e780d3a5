"""Kernels of low-rank methods: products with thin factors, and orthonormal rows.

Factors are kept transposed, `Pt` of shape (batch, rank, rows) and `Qt` of shape (batch, rank, columns), so that
each of their vectors is contiguous. Everything is float32.

What ranks compute from what all of them received must be the same bits on every rank, although their processors, thread
counts and BLAS libraries differ. `low_rank_` and `orthonormalise` therefore add in a fixed order and never fuse a
multiplication with an addition, in `reference`, numba and Triton alike. `project_columns`, `project_rows` and
`subtract_low_rank_` serve what a rank computes for itself: their rounding is that of each implementation, but it does
not depend on strides or on where a tensor lies in memory, so that a resumed run goes on as the run before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.low_rank import reference

__all__ = [
    "LARGEST_RANK",
    "low_rank",
    "low_rank_",
    "orthonormalise",
    "products",
    "project_columns",
    "project_rows",
    "subtract_low_rank_",
    "unit_rows_",
]

_inner_products = Kernel(reference.inner_products, "meta")
_orthonormalise = Kernel(reference.orthonormalise, "cpu", "cuda", "meta")
_low_rank_ = Kernel(reference.low_rank_, "cpu", "cuda", "meta")
_project_columns = Kernel(reference.project_columns, "cpu", "meta")
_project_rows = Kernel(reference.project_rows, "cpu", "meta")
_subtract_low_rank_ = Kernel(reference.subtract_low_rank_, "cpu", "cuda", "meta", in_torch=("cuda",))
_unit_rows_ = Kernel(reference.unit_rows_, "cpu")


def unit_rows_(Q: Tensor, seed: int) -> None:
    """Scale each row to a largest magnitude in [1, 2) by a power of two, which rounds nothing, in place.

    A row of zeros is redrawn: element i of the matrix, counted row by row, becomes 2 u_i - 1 with u =
    `random.reference.uniform(seed)`. Rows that are not finite stay so.

    Args:
        Q: (rows, columns) float32, contiguous, changed in place.
        seed: the key.

    Raises:
        TypeError: not float32.
        ValueError: not 2-d and contiguous.

    >>> Q = torch.tensor([[0.0, -6.0], [0.0, 0.0]])
    >>> unit_rows_(Q, seed=1)
    >>> Q[0], bool((Q[1] != 0).any())
    (tensor([ 0.0000, -1.5000]), True)
    """
    if Q.dtype != torch.float32:
        raise TypeError(f"Q is {Q.dtype}, and kernels take torch.float32 only")
    if Q.ndim != 2 or not Q.is_contiguous():
        raise ValueError(f"Q has shape {tuple(Q.shape)} and strides {Q.stride()}; pass a contiguous matrix")
    _unit_rows_.on(Q.device, Q.numel())(Q, seed)


LARGEST_RANK = 64
"""Vectors that the kernel on a GPU makes orthonormal at once; more take the reference."""


def _require_factor(name: str, factor: Tensor, batch: int, length: int) -> None:
    """Refuse a factor that does not belong to the matrices.

    Raises:
        ValueError: shapes that differ.
        TypeError: another dtype than float32.
    """
    if factor.ndim != 3 or factor.shape[0] != batch or factor.shape[2] != length:
        raise ValueError(f"{name} of {tuple(factor.shape)}: (batch, rank, length) with {batch} and {length} is needed")
    if factor.dtype != torch.float32:
        raise TypeError(f"{name} is {factor.dtype}, and kernels take torch.float32 only")


def _require_matrices(matrices: Tensor) -> None:
    if matrices.ndim != 3 or not matrices.is_contiguous():
        raise ValueError(f"matrices of {tuple(matrices.shape)} must be (batch, rows, columns) and contiguous")
    if matrices.dtype != torch.float32:
        raise TypeError(f"the matrices are {matrices.dtype}, and kernels take torch.float32 only")


def _require_product(out: Tensor, Pt: Tensor, Qt: Tensor) -> None:
    _require_matrices(out)
    batch, rows, columns = out.shape
    _require_factor("Pt", Pt, batch, rows)
    _require_factor("Qt", Qt, batch, columns)
    if Pt.shape[1] != Qt.shape[1]:
        raise ValueError(f"factors of rank {Pt.shape[1]} and {Qt.shape[1]} have no product")


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float = 1.0, add: bool = False) -> None:
    """out = alpha * P Q^T, or out += alpha * P Q^T, in a fixed order: the same bits on every processor.

        s = 0;   s = s + P[i, k] * Qt[k, j]   for k = 0, 1, ...;   out[i, j] = (out[i, j] +) s * alpha

    Args:
        out: (batch, rows, columns) float32, contiguous, written.
        Pt: (batch, rank, rows) float32, P transposed.
        Qt: (batch, rank, columns) float32, Q transposed.
        alpha: rounded to float32.
        add: add to what `out` holds.

    Raises:
        ValueError: shapes that do not fit, or an `out` that is not contiguous.
        TypeError: another dtype than float32.

    >>> out = torch.zeros(1, 2, 2)
    >>> low_rank_(out, torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]))
    >>> out
    tensor([[[3., 4.],
             [6., 8.]]])
    """
    _require_product(out, Pt, Qt)
    _low_rank_.on(out.device, out.numel())(out, Pt, Qt, alpha, add)


def low_rank(Pt: Tensor, Qt: Tensor) -> Tensor:
    """P Q^T as new matrices (batch, rows, columns), as `low_rank_` computes it.

    >>> low_rank(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]))
    tensor([[[3., 4.],
             [6., 8.]]])
    """
    out = buffers.empty((Pt.shape[0], Pt.shape[2], Qt.shape[2]), torch.float32, Qt.device)
    low_rank_(out, Pt, Qt)
    return out


def subtract_low_rank_(x: Tensor, Pt: Tensor, Qt: Tensor, scale: float) -> None:
    """x -= scale * P Q^T, for what a rank keeps for itself: a processor may fuse, which takes two thirds of the time.

    Args:
        x: (batch, rows, columns) float32, contiguous, changed in place.
        Pt: (batch, rank, rows) float32.
        Qt: (batch, rank, columns) float32.
        scale: rounded to float32.

    Raises:
        ValueError: shapes that do not fit, or an `x` that is not contiguous.
        TypeError: another dtype than float32.

    >>> x = torch.ones(1, 1, 2)
    >>> subtract_low_rank_(x, torch.tensor([[[1.0]]]), torch.tensor([[[3.0, 4.0]]]), 0.5)
    >>> x
    tensor([[[-0.5000, -1.0000]]])
    """
    _require_product(x, Pt, Qt)
    _subtract_low_rank_.on(x.device, x.numel())(x, Pt, Qt, scale)


def project_columns(M: Tensor, Qt: Tensor) -> Tensor:
    """(M Q)^T of shape (batch, rank, rows), for what a rank computes before it sends.

    Args:
        M: (batch, rows, columns) float32, contiguous.
        Qt: (batch, rank, columns) float32.

    Raises:
        ValueError: shapes that do not fit, or matrices that are not contiguous.
        TypeError: another dtype than float32.

    >>> project_columns(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[1.0, 0.5]]]))
    tensor([[[2., 5.]]])
    """
    _require_matrices(M)
    _require_factor("Qt", Qt, M.shape[0], M.shape[2])
    return _project_columns.on(M.device, M.numel())(M, Qt)


def project_rows(Pt: Tensor, M: Tensor) -> Tensor:
    """P^T M of shape (batch, rank, columns), for what a rank computes before it sends.

    Args:
        Pt: (batch, rank, rows) float32.
        M: (batch, rows, columns) float32, contiguous.

    Raises:
        ValueError: shapes that do not fit, or matrices that are not contiguous.
        TypeError: another dtype than float32.

    >>> project_rows(torch.tensor([[[1.0, 0.5]]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[[2.5000, 4.0000]]])
    """
    _require_matrices(M)
    _require_factor("Pt", Pt, M.shape[0], M.shape[1])
    return _project_rows.on(M.device, M.numel())(Pt, M)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows of a with those of b, (batch, rank) in float64, the same bits on every processor.

    Args:
        a: (batch, rank, length) float32.
        b: of the same shape.

    >>> products(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]))
    tensor([[11.]], dtype=torch.float64)
    """
    return _inner_products.on(a.device, a.numel())(buffers.copied(a, torch.float64), buffers.copied(b, torch.float64))


def orthonormalise(vectors: Tensor) -> Tensor:
    """Orthonormal rows that span what the rows of each matrix span, the same bits on every processor.

    Two rounds of Cholesky QR: with A of shape (rank, length) and G = A A^T in float64, the Cholesky factorisation
    G = R^T R gives R^-T A; the second round takes the error of the first to float32's own. Sums run over 32 lanes
    within segments of 1024 elements, so their order depends on the length alone. A row that depends on those before it
    up to 2^-20 of its length becomes zero, so rank-deficient and all-zero matrices stay finite. Rows are scaled by
    powers of two first, so their lengths change no bit of the result; a row of subnormal numbers counts as zero.
    Matrices that are not finite give results that are not.

    Args:
        vectors: (batch, rank, length) float32, rank <= length.

    Raises:
        ValueError: another shape.
        TypeError: another dtype than float32.

    References:
        Yamamoto, Nakatsukasa, Yanagisawa & Fukaya 2015, "Roundoff error analysis of the CholeskyQR2 algorithm".

    >>> orthonormalise(torch.tensor([[[3.0, 4.0]]]))
    tensor([[[0.6000, 0.8000]]])
    """
    if vectors.ndim != 3 or not 0 < vectors.shape[1] <= vectors.shape[2]:
        raise ValueError(f"vectors of {tuple(vectors.shape)}: (batch, rank, length) with rank <= length is needed")
    _require_factor("vectors", vectors, vectors.shape[0], vectors.shape[2])
    if not vectors.numel():
        return vectors.clone(memory_format=torch.contiguous_format)
    fits = vectors.device.type != "cuda" or vectors.shape[1] <= LARGEST_RANK
    chosen = _orthonormalise.on(vectors.device, vectors.numel()) if fits else reference.orthonormalise
    return chosen(vectors.contiguous())
