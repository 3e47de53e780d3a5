"""Bytes on an affine grid between the smallest and the largest value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload

LEVELS = 255


@dataclass(frozen=True)
class AffineInt(Float32Codec):
    """Round each element to one of 256 evenly spaced values between its block's extremes, zero among them.

    With low = min(0, min x) and high = max(0, max x) over the block:

        s = (high - low) / 255,   z = round(-low / s),   q = round(x / s) + z,   decoded: s (q - z)

    This is the grid of `torch.quantize_per_tensor` with a min-max observer (Jacob et al. 2018, Section 2.1). Where it
    deviates: there the grid is that of a trained layer, found once; here each block of each gradient has one. It uses
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

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        scales, zeros, levels = out
        kernels.affine_encode(as_float32(x), self.block, scales, zeros, levels)

    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        """s (q - z), in one pass."""
        scales, zeros, levels = payload
        kernels.affine_decode(scales, zeros, levels, self.block, out)

    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """into += alpha * s (q - z), in one pass."""
        scales, zeros, levels = payload
        kernels.affine_decode(scales, zeros, levels, self.block, into, alpha)

    def contraction(self, numel: int) -> float | None:
        """1 - block / 255^2, since the largest magnitude is at least 127.5 s."""
        size = max(1, min(self._size(numel), numel))
        return max(1.0 / size * (1.0 - 1.0 / LEVELS**2), 1.0 - size / LEVELS**2)
