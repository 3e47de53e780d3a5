"""Natural compression: unbiased rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class Natural(Float32Codec):
    """Round each element at random to the power of two below or above: its sign and exponent, 9 bits.

    For 2^a <= |x| < 2^(a+1), C(x) = sign(x) 2^(a+1) with probability |x| / 2^a - 1, else sign(x) 2^a. Unbiased with E
    (C(x) - x)^2 <= x^2 / 8 (Horvath et al. 2019, section 2, Definition 1), elementwise and without any scale. Less than
    one, that is also a contraction with delta = 7/8, so a two-shot owner keeps what the second rounding lost.

    At the ends of float32: zeros are exact, subnormal numbers become 0 or 2^-126 without bias (but with a relative
    variance beyond 1/8), and numbers above 2^127 become 2^127, since 2^128 is no float32. NaN and infinity become
    infinity of the same sign. Of float16, numbers above 32768 may be rounded up to 65536, which is infinite there.

    Where it deviates: the paper's wire is 9 bits an element; here exponents and signs are two fields, so that both fill
    whole bytes.

    References:
        Horvath, Ho, Horvath, Sahu, Canini & Richtarik 2019, "Natural compression for distributed deep learning".

    >>> Natural().payload_bytes(8000)
    9000
    """

    @property
    def keyed(self) -> bool:
        """True: rounding is drawn."""
        return True

    @property
    @override
    def unbiased(self) -> bool:
        return True

    @property
    def granularity(self) -> int:
        """8: the signs of a byte."""
        return 8

    @override
    def omega(self) -> float | None:
        return 0.125

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """A byte of exponent an element, then packed signs."""
        return Layout((Field(torch.uint8, numel), Field(torch.uint8, kernels.packed_nbytes(numel, 1))))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.natural_encode(as_float32(x), key.stream_seed, out[0], out[1])

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.natural_decode(payload[0], payload[1], out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.natural_decode(payload[0], payload[1], into, alpha)

    def contraction(self, numel: int) -> float | None:
        """7/8 in the mean over keys, for normal numbers."""
        return 0.875
