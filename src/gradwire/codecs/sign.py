"""Scaled sign: one bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32, check_block
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class Sign(Float32Codec):
    """sign(x) * mean|x| per block: one bit an element, eight to a byte, and a float32 scale a block.

    A contraction with delta = ||x||_1^2 / (d ||x||_2^2) >= 1/block (Karimireddy et al. 2019, "Error feedback
    fixes SignSGD", Lemma 8, applied to each block). Biased, so it needs error feedback. Where it deviates: the paper
    has one scale for all elements, and here zero counts as positive.

    Args:
        block: elements that share a scale; a multiple of 8.

    Raises:
        CompositionError: a block that is not a positive multiple of 8.

    References:
        Karimireddy, Rebjock, Stich & Jaggi 2019, "Error feedback fixes SignSGD and other gradient compression schemes".

    >>> Sign(block=4096).payload_bytes(8192)
    1032
    """

    block: int = 4096

    order_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def shows_non_finite(self) -> bool:
        """True: its block's scale is not finite."""
        return True

    @property
    @override
    def granularity(self) -> int:
        return self.block

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(
            (Field(torch.float32, -(-numel // self.block)), Field(torch.uint8, kernels.packed_nbytes(numel, 1)))
        )

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.sign_encode(as_float32(x), self.block, out[1], out[0])

    @override
    def encode_keeping_into(self, x: Tensor, key: Key, out: Payload) -> None:
        if x.dtype != torch.float32:
            super().encode_keeping_into(x, key, out)
            return
        kernels.sign_encode(x, self.block, out[1], out[0], keep=True)

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.sign_decode(payload[1], payload[0], self.block, out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.sign_decode(payload[1], payload[0], self.block, into, alpha)

    def contraction(self, numel: int) -> float | None:
        """1 / block, the worst case: a block with a single entry that is not zero."""
        return 1.0 / max(1, min(self.block, numel))
