"""QSGD: unbiased stochastic rounding to levels of the block's Euclidean norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32, check_block
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class QSGD(Float32Codec):
    """Q(x)_i = ||x|| sign(x_i) xi_i / s, where xi_i is s|x_i|/||x|| rounded up or down at random, per block.

    Unbiased, with variance E||Q(x) - x||^2 <= min(d/s^2, sqrt(d)/s) ||x||^2 for blocks of d elements (Alistarh et
    al. 2017, "QSGD", Lemma 3.1). A level and a sign take ceil(log2(s + 1)) + 1 bits, really packed.
    Where it deviates: the paper codes levels by Elias' code, whose length varies; here all have as many bits.

    Args:
        levels: s, at least 1 and at most 32767.
        block: d, elements that share a norm; a multiple of 8.

    Raises:
        CompositionError: levels or block out of range.

    References:
        Alistarh, Grubic, Li, Tomioka & Vojnovic 2017, "QSGD: communication-efficient SGD via gradient quantization and
        encoding".

    >>> QSGD(levels=15, block=512).payload_bytes(512)  # 512 * 5 bits, a norm, padding
    328
    """

    levels: int = 15
    block: int = 512

    order_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 32767:
            raise CompositionError(f"levels {self.levels} is outside 1 to 32767")
        check_block(self.block)

    @property
    def shows_non_finite(self) -> bool:
        """True: its block's norm is not finite."""
        return True

    @property
    def keyed(self) -> bool:
        """True: rounding is drawn."""
        return True

    @property
    @override
    def unbiased(self) -> bool:
        return True

    @property
    @override
    def granularity(self) -> int:
        return self.block

    def omega(self) -> float | None:
        """The bound on the relative variance: min(d/s^2, sqrt(d)/s)."""
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Norms, then packed signs and levels."""
        packed = kernels.packed_nbytes(numel, kernels.qsgd_bits(self.levels))
        return Layout((Field(torch.float32, -(-numel // self.block)), Field(torch.uint8, packed)))

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """One pass for the norm, one to round."""
        kernels.qsgd_encode(as_float32(x), self.levels, self.block, key.stream_seed, out[1], out[0])

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.qsgd_decode(payload[1], payload[0], self.levels, self.block, out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.qsgd_decode(payload[1], payload[0], self.levels, self.block, into, alpha)
