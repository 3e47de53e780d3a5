"""TernGrad: every element becomes -s, 0 or s."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class TernGrad(Float32Codec):
    """Clip each block to c sigma, take s = max|clipped x|, and round each element at random to -s, 0 or s.

    C(x)_i = s sign(x_i) with probability |x_i| / s, else 0 (Wen et al. 2017, section 3, with its gradient clipping).
    Unbiased for the clipped block, so biased for what clipping changes: declared unbiased only with clip=0. No
    contraction: its error may be (sqrt(block) - 1) / 2 times ||x||^2. The second shot of a two-shot does not clip: the
    mean was clipped already, and of a block with few large entries little would arrive.

    Where it deviates: sigma is the root mean square, not the standard deviation, about which a constant block has none
    and would be clipped to nothing; and s is a block's, where the paper's is a layer's.

    Args:
        clip: c; the paper's 2.5 changes few elements of a bell-shaped gradient. 0 for no clipping.
        block: elements that share a scale; a multiple of 40. 160 of the default are a grain of 2^20 elements and 0.1%,
            so that on 2, 4, 8, 16 or 32 ranks hardly any shard is padded: 1.607 bits an element.
        digits: how many share a byte: 5 (base 3, 1.6 bits an element) or 4 (2 bits).

    Raises:
        CompositionError: clip, block or digits out of range.

    References:
        Wen, Xu, Yan, Wu, Wang, Chen & Li 2017, "TernGrad: ternary gradients to reduce communication in distributed
        deep learning".

    >>> TernGrad().payload_bytes(6560)  # 1312 bytes of five digits, a scale, padding
    1320
    """

    clip: float = 2.5
    block: int = 6560
    digits: int = 5

    order_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise CompositionError(f"clip {self.clip} is outside [0, inf); the paper's is 2.5, and 0 does not clip")
        if self.block < 40 or self.block % 40:
            raise CompositionError(f"block {self.block} is not a positive multiple of 40, so bytes would be shared")
        if self.digits not in (4, 5):
            raise CompositionError(f"{self.digits} digits do not share a byte: use 5 (1.6 bits) or 4 (2 bits)")

    @property
    def keyed(self) -> bool:
        """True: rounding is drawn."""
        return True

    @property
    @override
    def unbiased(self) -> bool:
        return self.clip == 0

    @property
    def second_shot_codec(self) -> TernGrad:
        """The same without clipping."""
        return replace(self, clip=0.0)

    @property
    @override
    def granularity(self) -> int:
        return self.block

    def omega(self) -> float | None:
        """(sqrt(block) - 1) / 2 without clipping.

        E||C(x) - x||^2 = max|x| ||x||_1 - ||x||^2, which is largest, relative to ||x||^2, where one element is 1 and
        all others are 1 / (1 + sqrt(block)).
        """
        return (math.sqrt(self.block) - 1.0) / 2.0 if self.unbiased else None

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Scales, then packed digits."""
        return Layout((Field(torch.float32, -(-numel // self.block)), Field(torch.uint8, -(-numel // self.digits))))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        clip = self.clip or math.inf
        kernels.ternary_encode(as_float32(x), out[0], key.stream_seed, self.block, self.digits, out[1], clip)

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.ternary_decode(payload[1], payload[0], self.block, self.digits, out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.ternary_decode(payload[1], payload[0], self.block, self.digits, into, alpha)
