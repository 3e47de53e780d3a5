"""Top-k of the coefficients of a cosine transform, chunk by chunk."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.codecs.topk import VALUE_DTYPES, check_density, kept
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.kernels import low_rank

TILE_NUMEL = 1 << 16
"""Elements that are transformed at a time: they stay in the second cache, and nothing of x's size is made."""


@dataclass(frozen=True)
class DCTTopK(Float32Codec):
    """Cut x into chunks, transform each by an orthonormal DCT-II, keep k = max(1, round(density * chunk)) coefficients.

        c_f = s_f sum_i x_i cos(pi (2 i + 1) f / 2 N),   s_0 = sqrt(1/N), else sqrt(2/N),   f, i = 0 .. N - 1

    The k of largest magnitude of every chunk are sent, ties going to the lowest frequency, and transformed back. The
    transform keeps norms, so it is a contraction with delta = k / chunk as top-k is, and spends its k on what is smooth
    along a row of a weight instead of on single entries. Every chunk has its share of the payload, so indices take
    log2(chunk) bits and payloads can be cut. Decoding adds terms in a fixed order: all ranks get the same bits.

    Payload: for each chunk in turn k values; then k indices a chunk of log2(chunk) bits, packed side by side. The last
    chunk is filled up with zeros.

    Where it deviates from DeMo, Algorithm 1: there chunks are tiles of a matrix, transformed in both dimensions, and
    here they run along the flat tensor. DeMo sends coefficients with their magnitudes, as this does; the signs are
    those of its step, which every rank takes of what it has decoded. Here a mean is a mean. See `DeMo` for the rest.

    Args:
        density: fraction of coefficients sent, in (0, 1].
        chunk: elements transformed together, a power of two from 8 to 256.
        values: "fp32", "bf16" or "fp16", the precision of coefficients on the wire.

    Raises:
        CompositionError: density, chunk or values out of range.

    References:
        Peng, Quesnelle & Kingma 2024, "DeMo: decoupled momentum optimization", arXiv:2411.19870.

    >>> codec = DCTTopK(1 / 8, chunk=8)
    >>> codec.decode(codec.encode(torch.ones(8)), torch.ones(8)).round(decimals=4)
    tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """

    density: float = 1 / 16
    chunk: int = 64
    values: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.chunk not in (8, 16, 32, 64, 128, 256):
            raise CompositionError(f"chunk {self.chunk} is no power of two from 8 to 256")
        if self.values not in VALUE_DTYPES:
            raise CompositionError(f"values {self.values!r} is none of {', '.join(VALUE_DTYPES)}")

    @property
    def kept(self) -> int:
        """Coefficients of a chunk that are sent."""
        return kept(self.density, self.chunk)

    @property
    def granularity(self) -> int:
        """Chunks whose indices fill whole bytes."""
        return self.chunk * (8 // math.gcd(8, self.kept * self._bits))

    @property
    def _bits(self) -> int:
        return self.chunk.bit_length() - 1

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Values, then packed indices."""
        k = -(-numel // self.chunk) * self.kept
        return Layout((Field(VALUE_DTYPES[self.values], k), Field(torch.uint8, kernels.packed_nbytes(k, self._bits))))

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Transform and select, a tile at a time."""
        basis, codes = cosines(self.chunk, x.device), buffers.empty(out[0].shape, torch.uint8, x.device)
        direct = out[0].dtype == torch.float32
        values = out[0] if direct else buffers.empty(out[0].shape, torch.float32, x.device)
        for (first, stop), tile in self._tiles(as_float32(x)):
            part = slice(first * self.kept, stop * self.kept)
            coefficients = low_rank.low_rank(tile.mT[None], basis.mT.contiguous()[None])[0]
            kernels.topk_rows(coefficients, self.kept, values[part], codes[part])
        if values is not out[0]:
            out[0].copy_(values)
        kernels.pack_bits(codes, self._bits, out[1])

    def _tiles(self, x: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Chunks [first, stop) as rows, the last one filled up with zeros."""
        for start, piece in zip(range(0, x.numel(), TILE_NUMEL), x.split(TILE_NUMEL), strict=False):
            tile = buffers.padded(piece, -(-piece.numel() // self.chunk) * self.chunk).view(-1, self.chunk)
            yield (start // self.chunk, start // self.chunk + tile.shape[0]), tile

    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """Transform back and add, a tile at a time."""
        values, codes = (
            buffers.as_dtype(payload[0], torch.float32),
            kernels.unpack_bits(payload[1], self._bits, payload[0].numel()),
        )
        basis, scratch = (
            cosines(self.chunk, into.device),
            buffers.empty((TILE_NUMEL,), torch.float32, into.device),
        )
        for start, piece in zip(range(0, into.numel(), TILE_NUMEL), into.split(TILE_NUMEL), strict=False):
            first, rows = start // self.chunk, -(-piece.numel() // self.chunk)
            part = slice(first * self.kept, (first + rows) * self.kept)
            tile = scratch[: rows * self.chunk]
            kernels.combine_rows(values[part], codes[part], basis, tile.view(rows, self.chunk))
            kernels.add_scaled_(piece, tile[: piece.numel()], alpha)

    def contraction(self, numel: int) -> float | None:
        """k / chunk, less what the transform and 16-bit values round away; fp16 may overflow and promises nothing."""
        share = self.kept / self.chunk
        return {"fp32": share * (1 - 2.0**-16), "bf16": share * (1 - 2.0**-12), "fp16": None}[self.values]


@functools.cache
def cosines(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II as a (size, size) matrix, a frequency in each row.

    All ranks decode with it, so its cosines are of our own making: those of C libraries and of torch differ from one
    processor to another.
    """
    table = torch.tensor([_cosine(turns, 2 * size) for turns in range(4 * size)], dtype=torch.float64)
    f = torch.arange(size)
    basis = table[(2 * f + 1) * f[:, None] % (4 * size)] * math.sqrt(2 / size)
    basis[0] *= math.sqrt(0.5)
    return basis.float().to(device)


def _cosine(turns: int, half: int) -> float:
    """cos(pi * turns / half), by symmetries and Taylor's series of the first octant."""
    turns %= 2 * half
    turns = min(turns, 2 * half - turns)
    if 2 * turns > half:
        return -_cosine(half - turns, half)
    if 4 * turns > half:
        return _series(math.pi * (half - 2 * turns) / (2 * half), first=1)
    return _series(math.pi * turns / half, first=0)


def _series(x: float, first: int) -> float:
    """The cosine (`first` 0) or the sine (1) of x in [0, pi/4], as sums and products that are the same everywhere."""
    term = total = x if first else 1.0
    for i in range(first + 1, 20, 2):
        term = -term * x * x / (i * (i + 1))
        total += term
    return total
