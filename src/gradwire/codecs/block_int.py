"""Integers of 2 to 8 bits with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32, check_block
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class BlockInt(Float32Codec):
    """Round each element to one of 2L + 1 levels, L = 2^(bits-1) - 1, of its block's largest magnitude.

    q = round(x L / s) with s = max|x| over the block; decodes to q s / L. With nearest rounding it is a
    contraction at any width: every error is at most |x| and the largest element is exact, so
    delta >= max(1/block, 1 - block / (4 L^2)). With `stochastic=True` it is unbiased and no contraction.

    Sums of such integers overflow and scales differ, so payloads never ride a plain all-reduce: use two-shot.

    No paper has quite this: integers with a scale for each block are common practice.

    Args:
        bits: 2 to 8.
        block: elements that share a scale; a multiple of 8.
        stochastic: round up with probability equal to the fraction, else to the nearest.

    Raises:
        CompositionError: bits or block out of range.

    >>> import torch
    >>> codec = BlockInt(bits=4, block=8)
    >>> x = torch.tensor([0.0, 7.0, -3.0, 1.4])
    >>> codec.decode(codec.encode(x), x)
    tensor([ 0.,  7., -3.,  1.])
    """

    bits: int = 8
    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise CompositionError(f"bits {self.bits} is outside 2 to 8; for one bit use `sign`, for 16 `bf16`")
        check_block(self.block)

    @property
    def shows_non_finite(self) -> bool:
        """True: its block decodes to NaN."""
        return True

    @property
    @override
    def keyed(self) -> bool:
        return self.stochastic

    @property
    def unbiased(self) -> bool:
        """Only with stochastic rounding."""
        return self.stochastic

    @property
    @override
    def granularity(self) -> int:
        return self.block

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Scales, then packed integers."""
        packed = kernels.packed_nbytes(numel, self.bits)
        return Layout((Field(torch.float32, -(-numel // self.block)), Field(torch.uint8, packed)))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        seed = key.stream_seed if self.stochastic else None
        kernels.block_int_encode(as_float32(x), self.bits, self.block, seed, out[1], out[0])

    @override
    def encode_keeping_into(self, x: Tensor, key: Key, out: Payload) -> None:
        if x.dtype != torch.float32:
            super().encode_keeping_into(x, key, out)
            return
        seed = key.stream_seed if self.stochastic else None
        kernels.block_int_encode(x, self.bits, self.block, seed, out[1], out[0], keep=True)

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.block_int_decode(payload[1], payload[0], self.bits, self.block, out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.block_int_decode(payload[1], payload[0], self.bits, self.block, into, alpha)

    def contraction(self, numel: int) -> float | None:
        """max(1/block, 1 - block / (4 L^2)) with nearest rounding."""
        if self.stochastic:
            return None
        levels = 2 ** (self.bits - 1) - 1
        block = max(1, min(self.block, numel))
        return max(1.0 / block, 1.0 - block / (4.0 * levels**2))

    def omega(self) -> float | None:
        """block / (4 L^2) with stochastic rounding: no element varies by more than half a level."""
        levels = 2 ** (self.bits - 1) - 1
        return self.block / (4.0 * levels**2) if self.stochastic else None
