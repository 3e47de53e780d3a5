"""Bytes on an affine grid between the smallest and the largest value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gradwire.codecs.base import Codec, as_float32
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload

LEVELS = 255
PIECE = 1 << 14


@dataclass(frozen=True)
class AffineInt(Codec):
    """Round each element to one of 256 evenly spaced values between its block's extremes, zero among them.

    With low = min(0, min x) and high = max(0, max x) over the block:

        s = (high - low) / 255,   z = round(-low / s),   q = round(x / s) + z,   decoded: s (q - z)

    This is the grid of `torch.quantize_per_tensor` with a min-max observer (Jacob et al. 2018, Section 2.1). It uses
    one-sided gradients better than `BlockInt`, whose grid is symmetric. Every error is at most |x| and s / 2, so
    delta >= 1 - block / 255^2. A block with a NaN or an infinity decodes to no finite value.

    Args:
        block: elements that share a scale; 0 for the whole tensor.

    Raises:
        CompositionError: a negative block.

    References:
        Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
        Inference".

    >>> codec = AffineInt()
    >>> x = torch.tensor([0.0, 255.0, 12.3])
    >>> codec.decode(codec.encode(x), x)
    tensor([  0., 255.,  12.])
    """

    block: int = 0

    def __post_init__(self) -> None:
        if self.block < 0:
            raise CompositionError(f"a block of {self.block} elements: it must be positive, or 0 for the whole tensor")

    @property
    def shows_non_finite(self) -> bool:
        """True: its block decodes to nothing finite."""
        return True

    @property
    def granularity(self) -> int:
        """A block; a tensor with one scale is not cut."""
        return self.block

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Scales, zero points, then one byte an element."""
        blocks = -(-numel // self._size(numel))
        return Layout((Field(torch.float32, blocks), Field(torch.uint8, blocks), Field(torch.uint8, numel)))

    def _size(self, numel: int) -> int:
        return self.block or max(1, numel)

    def _pieces(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Cut a tensor into (its elements, their blocks), small enough that temporaries stay small."""
        size = self._size(numel)
        step = max(1, PIECE // size) * size if self.block else PIECE
        for start in range(0, numel, step):
            blocks = slice(start // size, -(-min(start + step, numel) // size)) if self.block else slice(0, 1)
            yield slice(start, min(start + step, numel)), blocks

    def _rows(self, piece: Tensor) -> Tensor:
        """One row a block, the last one padded with zeros, which change no extreme."""
        size = self.block or max(1, piece.numel())
        return functional.pad(piece, (0, -piece.numel() % size)).view(-1, size)

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Extremes, then rounding."""
        scales, zeros, levels = out
        x32 = as_float32(x)
        extremes = torch.zeros(2, scales.numel(), device=x.device)
        for part, blocks in self._pieces(x.numel()):
            rows = self._rows(x32[part])
            low, high = extremes[0, blocks], extremes[1, blocks]
            low.copy_(torch.minimum(low, rows.amin(1)))
            high.copy_(torch.maximum(high, rows.amax(1)))
        scales.copy_(extremes[1] / LEVELS - extremes[0] / LEVELS)  # high - low could overflow
        divisor = scales.masked_fill(scales == 0, 1.0)
        zero = (-extremes[0] / divisor).round_().clamp_(0, LEVELS)
        zeros.copy_(zero)
        for part, blocks in self._pieces(x.numel()):
            q = (self._rows(x32[part]) / divisor[blocks, None]).round_().add_(zero[blocks, None]).clamp_(0, LEVELS)
            levels[part].copy_(q.view(-1)[: part.stop - part.start])

    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        """s (q - z)."""
        for part, values in self._decoded(payload, out.numel()):
            out[part].copy_(values)

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        """into += alpha * s (q - z), piece by piece."""
        for part, values in self._decoded(payload, into.numel()):
            into[part].add_(values.to(into.dtype), alpha=alpha)

    def _decoded(self, payload: Payload, numel: int) -> Iterator[tuple[slice, Tensor]]:
        scales, zeros, levels = payload
        for part, blocks in self._pieces(numel):
            rows = self._rows(levels[part].float())
            values = rows.sub_(zeros[blocks, None]).mul_(scales[blocks, None])
            yield part, values.view(-1)[: part.stop - part.start]

    def contraction(self, numel: int) -> float | None:
        """1 - block / 255^2, since the largest magnitude is at least 127.5 s."""
        size = max(1, min(self._size(numel), numel))
        return max(1.0 / size * (1.0 - 1.0 / LEVELS**2), 1.0 - size / LEVELS**2)
