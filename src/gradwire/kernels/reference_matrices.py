"""The kernels of low-rank methods in plain torch: what each does, on any device.

Where bits must be the same everywhere only elementwise additions, multiplications, divisions and square roots are used,
one operator for each: these are rounded as IEEE 754 says on every processor. Products of matrices, sums along a
dimension and operators that fuse (`addcmul`, `add` with `alpha`, `lerp`) are not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.reference import uniform
from gradwire.kernels.rounding import square_root

LANES = 32
SEGMENT = 1024
"""Elements whose sum is complete before the next segment's is added to it."""

TOLERANCES = (2.0**-40, 0.25)
"""What may be left of a vector's squared length in each round before it counts as dependent."""

_TILE_NUMEL = 1 << 18
"""Elements of a product that are made at a time, so that temporaries stay small."""

_ALIGNMENT = 64


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    """See `gradwire.kernels.matrices.low_rank_`."""
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
    """See `gradwire.kernels.matrices.subtract_low_rank_`."""
    low_rank_(x, Pt, Qt, -scale, add=True)


def project_columns(M: Tensor, Qt: Tensor) -> Tensor:
    """See `gradwire.kernels.matrices.project_columns`."""
    return torch.bmm(_placed(Qt), _placed(M).mT)


def project_rows(Pt: Tensor, M: Tensor) -> Tensor:
    """See `gradwire.kernels.matrices.project_rows`."""
    return torch.bmm(_placed(Pt), _placed(M))


def _placed(x: Tensor) -> Tensor:
    """The same values, contiguous and where BLAS libraries round alike: some look at a tensor's address."""
    x = x.contiguous()
    aligned = x.device.type != "cpu" or x.data_ptr() % _ALIGNMENT == 0
    return x if aligned else x.clone()


def orthonormalise(vectors: Tensor) -> Tensor:
    """See `gradwire.kernels.matrices.orthonormalise`."""
    for tolerance in TOLERANCES:
        vectors = _orthonormal_round(vectors, tolerance)
    return vectors


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


def add_segments(total: Tensor, products: Tensor) -> Tensor:
    """`total` and the sums of `products` along the last dimension, float64, one segment after the other."""
    steps = pad(products, (0, -products.shape[-1] % SEGMENT)).unflatten(-1, (-1, SEGMENT // LANES, LANES))
    lanes = torch.zeros_like(steps[..., 0, :])
    for step in steps.unbind(-2):
        lanes = lanes + step
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    for segment in lanes[..., 0].unbind(-1):
        total = total + segment
    return total


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


# Gaussian numbers -------------------------------------------------------------------------------------------

CENTRE = (3.3871327179, 50.434271938, 159.29113202, 59.109374720), (1.0, 17.895169469, 78.757757664, 67.187563600)
TAIL = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103), (1.0, 0.73700164250, 0.12021132975)
"""Numerators and denominators of Wichura 1988, PPND7, lowest power first."""

LOGARITHM = tuple(2.0 / (2 * i + 1) for i in range(9))
LOG_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476


def gaussian(bits: int, numel: int) -> Tensor:
    """See `gradwire.kernels.matrices.gaussian`."""
    u = uniform(bits, numel, torch.device("cpu")).double() + 2.0**-25
    q = u - 0.5
    centre = 0.180625 - q * q
    near = q * _polynomial(CENTRE[0], centre) / _polynomial(CENTRE[1], centre)
    tail = square_root(-_log(torch.where(q < 0, u, 1.0 - u))) - 1.6
    far = _polynomial(TAIL[0], tail) / _polynomial(TAIL[1], tail)
    return torch.where(q.abs() <= 0.425, near, torch.where(q < 0, -far, far)).float()


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's rule: a multiplication, then an addition, each rounded."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _log(x: Tensor) -> Tensor:
    """The natural logarithm of positive numbers: log m + e log 2 of x = m 2^e, log m = 2 atanh((m - 1) / (m + 1))."""
    m, e = torch.frexp(x)
    small = m < SQRT_HALF
    m, e = torch.where(small, m + m, m), torch.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    return s * _polynomial(LOGARITHM, s * s) + e.double() * LOG_2
