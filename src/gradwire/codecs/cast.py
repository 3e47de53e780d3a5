"""Identity and casts to 16 bits: additive, so they ride an all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Codec, as_float32
from gradwire.core import buffers
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


class _Elements(Codec):
    """Every element travels for itself, as a number of the payload's dtype."""

    additive: ClassVar[bool] = True

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Copy, rounded where the payload is narrower."""
        out[0].copy_(x)

    def encode_divided_into(self, x: Tensor, divisor: int, key: Key, out: Payload) -> None:
        """Divide straight into the payload."""
        if out[0].dtype == x.dtype or x.device.type != "cpu":
            torch.div(x, divisor, out=out[0])
        else:
            buffers.write_rounded(out[0], x, x.dtype, lambda piece, made: torch.div(piece, divisor, out=made))

    @override
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        out.copy_(payload[0])

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        """into += alpha * payload, in the precision of `into`."""
        kernels.add_scaled_(into, payload[0], alpha)


@dataclass(frozen=True)
class Identity(_Elements):
    """Send the gradient as it is: payload = x, in x's own dtype. The baseline, of no paper, on the path of all others.

    >>> Identity().payload_bytes(10)
    40
    """

    lossless: ClassVar[bool] = True

    @property
    def unbiased(self) -> bool:
        """True: nothing is lost."""
        return True

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """`numel` elements of the gradient's dtype."""
        return Layout((Field(dtype, numel),))


class _Cast(_Elements):
    """Round to the nearest value of a 16-bit format."""

    dtype: ClassVar[torch.dtype]

    @property
    def shows_non_finite(self) -> bool:
        """True: every element travels for itself."""
        return True

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout((Field(self.dtype, numel),))


@dataclass(frozen=True)
class FP16(_Cast):
    """Cast to IEEE half precision: 2 bytes an element, 11 significant bits, range 6e-8 to 65504.

    Not a contraction: values below 6e-8 vanish and values above 65504 overflow to infinity, which the guard
    reports as it does any other. No paper has it as a method of its own.

    >>> FP16().payload_bytes(10)
    24
    """

    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class BF16(_Cast):
    """Cast to bfloat16: 2 bytes an element, float32's range with 8 significant bits.

    delta = 1 - 2^-18 for normal numbers: the relative error of each element is at most 2^-9. Numbers below
    float32's smallest normal are kept as far as bfloat16's subnormals reach. No paper has it as a method of its own.

    >>> BF16().payload_bytes(10)
    24
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def contraction(self, numel: int) -> float | None:
        """1 - 2^-16: relative error at most 2^-8 with room for sums that overflow the last place."""
        return 1.0 - 2.0**-16


@dataclass(frozen=True)
class StochasticBF16(Codec):
    """Round to a bfloat16 below or above at random, so that the mean over keys is x: 2 bytes an element.

    Relative errors are below 2^-7 and their variance at most x^2 2^-16, so it is a contraction too. Not additive: an
    all-reduce would round its sums to nearest, and no longer be unbiased; two-shot and all-gather sum in float32.
    Magnitudes beyond the largest bfloat16 may overflow, as in `BF16`. No paper has it as a method of its own.

    >>> StochasticBF16().payload_bytes(10)
    24
    """

    @property
    def keyed(self) -> bool:
        """True: rounding is drawn."""
        return True

    @property
    @override
    def unbiased(self) -> bool:
        return True

    def omega(self) -> float | None:
        """p (1 - p) of the spacing squared, 2^-14 x^2 at most."""
        return 2.0**-16

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout((Field(torch.bfloat16, numel),))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.bfloat16_encode(as_float32(x), key.stream_seed, out[0])

    @override
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        out.copy_(payload[0])

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        """into += alpha * payload, in the precision of `into`."""
        kernels.add_scaled_(into, payload[0], alpha)

    def contraction(self, numel: int) -> float | None:
        """1 - 2^-16, for normal numbers."""
        return 1.0 - 2.0**-16
