"""The kernels of low-rank methods in plain torch: what each does, on any device.

Where bits must be the same everywhere only elementwise additions, multiplications, divisions and square roots are used,
one operator for each: these are rounded as IEEE 754 says on every processor. Products of matrices, sums along a
dimension and operators that fuse (`addcmul`, `add` with `alpha`, `lerp`) are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.random.reference import uniform
from gradwire.kernels.rounding import square_root
from gradwire.kernels.runtime.torch_blocks import add_segments


def unit_rows_(Q: Tensor, seed: int) -> None:
    """Scale by the power of two that brings a row's largest magnitude to [1, 2); redraw rows of zeros."""
    largest = Q.abs().amax(1, keepdim=True)
    fresh = uniform(seed, Q.numel(), Q.device).view(Q.shape) * 2 - 1
    Q.copy_(torch.where(largest == 0, fresh, Q * _unit_scale(_exponent(largest))))


def _exponent(magnitude: Tensor) -> Tensor:
    """The exponent's bits of magnitudes: 0 for zero and subnormal numbers, 255 for what is not finite."""
    return magnitude.view(torch.int32) >> 23


def _unit_scale(exponent: Tensor) -> Tensor:
    """The power of two that brings a magnitude to [1, 2), as near as float32 has one."""
    return ((254 - exponent).clamp(1, 254) << 23).view(torch.float32)


TOLERANCES = (2.0**-40, 0.25)
"""What may be left of a vector's squared length in each round before it counts as dependent."""

_TILE_NUMEL = 1 << 18
"""Elements of a product that are made at a time, so that temporaries stay small."""

_ALIGNMENT = 64


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    batch, rows, columns = out.shape
    size = max(1, _TILE_NUMEL // max(1, batch * columns))
    scale = torch.tensor(alpha, dtype=torch.float32, device=out.device)
    for start in range(0, rows, size):
        piece = out[:, start : start + size]
        total = torch.zeros_like(piece)
        for k in range(Pt.shape[1]):
            total.add_(Pt[:, k, start : start + size, None] * Qt[:, k, None, :])
        total.mul_(scale)
        if add:
            piece.add_(total)
        else:
            piece.copy_(total)


def subtract_low_rank_(x: Tensor, Pt: Tensor, Qt: Tensor, scale: float) -> None:
    low_rank_(x, Pt, Qt, -scale, add=True)


def project_columns(M: Tensor, Qt: Tensor) -> Tensor:
    return torch.bmm(_placed(Qt), _placed(M).mT)


def project_rows(Pt: Tensor, M: Tensor) -> Tensor:
    return torch.bmm(_placed(Pt), _placed(M))


def _placed(x: Tensor) -> Tensor:
    """The same values, contiguous and where BLAS libraries round alike: some look at a tensor's address."""
    x = x.contiguous()
    aligned = x.device.type != "cpu" or x.data_ptr() % _ALIGNMENT == 0
    return x if aligned else x.clone()


def orthonormalise(vectors: Tensor) -> Tensor:
    vectors = _sized_rows(vectors)
    for tolerance in TOLERANCES:
        vectors = _orthonormal_round(vectors, tolerance)
    return vectors


def _sized_rows(a: Tensor) -> Tensor:
    """Rows at a largest magnitude in [1, 2), as `unit_rows_` makes them: else 1 / length may overflow float32.

    Rows of subnormal numbers become zero, because some processors read them as zero.
    """
    exponent = _exponent(a.abs().amax(2, keepdim=True))
    return a * torch.where(exponent == 0, 0.0, _unit_scale(exponent))


def _orthonormal_round(a: Tensor, tolerance: float) -> Tensor:
    """One round of Cholesky QR of the rows of each matrix (batch, rank, length)."""
    out = torch.empty_like(a)
    low_rank_(out, _weights(_gram(a), tolerance), a, 1.0, add=False)
    return out


def _gram(a: Tensor) -> Tensor:
    """A A^T in float64, where products of float32 are exact: lanes in turn, then halves, then segments in turn."""
    doubles = a.double()
    return torch.stack([inner_products(doubles, doubles[:, j : j + 1]) for j in range(a.shape[1])], dim=1)


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """The sums of a * b along the last dimension, in the order of `_gram`."""
    return add_segments(torch.zeros_like(a[..., 0]), a * b)


def _weights(gram: Tensor, tolerance: float) -> Tensor:
    """R^-1 of G = R^T R, (batch, rank, rank): column after column is eliminated from G, and from the identity.

    Row k of the result transposed, times A, is the k-th orthonormal row. A column that depends on those before it
    gets weights of zero. NaN stays.
    """
    rank = gram.shape[1]
    lengths = gram.diagonal(dim1=1, dim2=2).clone()
    w = torch.eye(rank, dtype=torch.float64, device=gram.device).expand(gram.shape).clone()
    gram = gram.clone()
    for k in range(rank):
        left = gram[:, k, k]
        dependent = left <= lengths[:, k] * tolerance
        inverse = torch.where(dependent, 0.0, 1.0 / square_root(torch.where(dependent, 1.0, left)))
        share = gram[:, k, :] * inverse[:, None]
        unit = w[:, :, k] * inverse[:, None]
        gram = gram - share[:, :, None] * share[:, None, :]
        w[:, :, k] = unit
        w[:, :, k + 1 :] -= unit[:, :, None] * share[:, None, k + 1 :]
    return w.float()
