"""What the low-rank and sketching kernels do, in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.reference import CANONICAL_NAN, key_words, magnitude_bits, mix, uniform


def unit_rows_(Q: Tensor, bits: int) -> None:
    """Scale by the power of two that brings a row's largest magnitude to [1, 2); redraw rows of zeros."""
    largest = Q.abs().amax(1, keepdim=True)
    exponent = largest.view(torch.int32) >> 23
    scale = ((254 - exponent).clamp(1, 254) << 23).view(torch.float32)
    fresh = uniform(bits, Q.numel(), Q.device).view(Q.shape) * 2 - 1
    Q.copy_(torch.where(largest == 0, fresh, Q * scale))


# Count sketch -----------------------------------------------------------------------------------------------


def sketch_words(bits: int, rows: int) -> list[tuple[int, int]]:
    """Two 32-bit words for every row."""
    words = key_words(bits, 2 * rows)
    return list(zip(words[::2], words[1::2], strict=True))


def hashed(numel: int, columns: int, words: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Column and sign of every element in one row."""
    counter = torch.arange(numel, device=device, dtype=torch.int64)
    word = mix(mix(counter ^ words[0]) ^ words[1])
    sign = 1.0 - 2.0 * (word & 1).to(torch.float32)
    return ((word >> 1) * columns) >> 31, sign


def count_sketch(x: Tensor, bits: int, sketch: Tensor) -> None:
    """Add each element, with its sign, to its column of every row."""
    sketch.zero_()
    for row, words in zip(sketch, sketch_words(bits, sketch.shape[0]), strict=True):
        column, sign = hashed(x.numel(), row.numel(), words, x.device)
        row.index_add_(0, column, sign * x)


def count_unsketch(sketch: Tensor, bits: int, out: Tensor) -> None:
    """The median over rows of what the element's columns hold, in its sign."""
    rows, columns = sketch.shape
    estimates = torch.empty(rows, out.numel(), dtype=torch.float32, device=out.device)
    for j, words in enumerate(sketch_words(bits, rows)):
        column, sign = hashed(out.numel(), columns, words, out.device)
        torch.mul(sketch[j].index_select(0, column), sign, out=estimates[j])
    out.copy_(estimates.median(0).values)


# Transforms -------------------------------------------------------------------------------------------------


def topk_rows(x: Tensor, k: int, values: Tensor, codes: Tensor) -> None:
    """The k largest magnitudes of every row, in the order of their columns; ties go to the lowest."""
    magnitudes = magnitude_bits(x).clamp(max=CANONICAL_NAN)
    chosen = magnitudes.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    values.view(-1, k).copy_(x.gather(1, chosen))
    codes.view(-1, k).copy_(chosen)


def combine_rows(values: Tensor, codes: Tensor, basis: Tensor, out: Tensor) -> None:
    """Each row a sum of rows of the basis, term by term."""
    k = values.numel() // max(1, out.shape[0])
    v, c = values.view(out.shape[0], k), codes.view(out.shape[0], k).long()
    out.zero_()
    for j in range(k):
        out.add_(v[:, j : j + 1] * basis[c[:, j]])


def _signs(bits: int, numel: int, device: torch.device) -> Tensor:
    """1 where uniform(bits) is below a half, else -1."""
    return torch.where(uniform(bits, numel, device) < 0.5, 1.0, -1.0)


def _hadamard(x: Tensor) -> Tensor:
    """Each row times the Hadamard matrix of its size in Sylvester's order, not normalised."""
    rows, size = x.shape
    half = 1
    while half < size:
        a, b = x.view(rows, -1, 2, half).unbind(2)
        x = torch.stack([a + b, a - b], dim=2)
        half *= 2
    return x.view(rows, size)


def hadamard_encode(x: Tensor, block: int, bits: int, chosen: Tensor, out: Tensor) -> None:
    """Signs, transform, scale, select."""
    signed = pad(x * _signs(bits, x.numel(), x.device), (0, -x.numel() % block)).view(-1, block)
    out.view(signed.shape[0], chosen.numel()).copy_(_hadamard(signed)[:, chosen.long()] * block**-0.5)


def hadamard_accumulate(values: Tensor, block: int, bits: int, chosen: Tensor, into: Tensor, alpha: float) -> None:
    """Place, transform, scale, signs."""
    spread = torch.zeros(-(-into.numel() // block), block, dtype=torch.float32, device=into.device)
    spread[:, chosen.long()] = values.view(spread.shape[0], chosen.numel())
    signed = (_hadamard(spread) * block**-0.5).view(-1)[: into.numel()] * _signs(bits, into.numel(), into.device)
    into.add_(signed * alpha)


_PIECE = 1 << 16

# Sums and half-precision memory -----------------------------------------------------------------------------


def add_bf16_(x: Tensor, r: Tensor, alpha: float) -> None:
    """x += alpha * r."""
    x.add_(r.float() * alpha)


def add_scaled_(into: Tensor, x: Tensor, alpha: float) -> None:
    """into += alpha * x, a piece at a time, so that the products stay small."""
    for piece, part in zip(into.split(_PIECE), x.split(_PIECE), strict=True):
        piece.add_(part.to(into.dtype) * alpha)


def round_bf16(x: Tensor, bits: int, out: Tensor) -> None:
    """Add sixteen random bits below the last one that is kept, and cut."""
    raw = x.view(torch.int32).to(torch.int64)
    cut = raw >> 16
    up = (raw + (uniform(bits, x.numel(), x.device) * 65536).to(torch.int64)) >> 16
    overflows = ((up & 0x7F80) == 0x7F80) | ~torch.isfinite(x)
    cut = torch.where(x.isnan(), cut | 0x40, cut)  # a NaN whose upper bits are zero would become infinity
    out.view(torch.int16).copy_(torch.where(overflows, cut, up))
