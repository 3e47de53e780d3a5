"""Floats of 8 bits with a power of two as scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32, check_block
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload

Format = Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class FP8(Float32Codec):
    """Cast to an 8-bit float after division by the least power of two that makes the block fit.

    s = 2^k with max|x| / s in (max/2, max], max = 448 (e4m3) or 57344 (e5m2); decodes to s fp8(x / s), rounded to
    nearest. Nothing saturates, and being powers of two, scales take a byte and lose nothing. Where it
    deviates: the OCP microscaling formats take k = floor(log2 max|x|) - floor(log2 max), so that the largest elements
    may saturate by an eighth, and blocks of 32; Micikevicius et al. 2022 leave scales open.
    Bytes travel as uint8: Gloo refuses tensors of 8-bit floats, and their sums would not fit in the format.

    Relative errors are at most r = 2^-4 (e4m3) or 2^-3 (e5m2) while x / s is a normal number of the format, and below
    that at most half its least step h = 2^-9 or 2^-16, so a contraction with delta = 1 - r^2 - block (h / max)^2, for
    blocks of normal numbers of float32. A block with NaN or infinity decodes to NaN.

    Args:
        format: "e4m3", more precise, or "e5m2", which reaches further down within a block.
        block: elements that share a scale; a multiple of 8.

    Raises:
        CompositionError: another format, or a block that is not a positive multiple of 8.

    References:
        Micikevicius et al. 2022, "FP8 formats for deep learning". Rouhani et al. 2023, "OCP microscaling formats (MX)
        specification", section 6.3.

    >>> codec = FP8("e4m3", block=8)
    >>> x = torch.tensor([100.0, -1.1, 0.001])
    >>> codec.decode(codec.encode(x), x)
    tensor([ 9.6000e+01, -1.1250e+00,  9.7656e-04])
    """

    format: Format = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise CompositionError(f"format {self.format!r} is unknown; use one of {', '.join(get_args(Format))}")
        check_block(self.block)

    @property
    @override
    def granularity(self) -> int:
        return self.block

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Exponents of the scales, then one byte an element."""
        return Layout((Field(torch.uint8, -(-numel // self.block)), Field(torch.uint8, numel)))

    @property
    def _float8(self) -> torch.dtype:
        return kernels.FLOAT8[self.format]

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.float8_encode(as_float32(x), self._float8, self.block, out[1], out[0])

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.float8_decode(payload[1], payload[0], self._float8, self.block, out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.float8_decode(payload[1], payload[0], self._float8, self.block, into, alpha)

    def contraction(self, numel: int) -> float | None:
        """1 - r^2 - block (h / max)^2: the errors of the large elements, and of those below the least normal one."""
        relative, half_step, most = (
            (2.0**-4, 2.0**-10, 224.0) if self.format == "e4m3" else (2.0**-3, 2.0**-17, 28672.0)
        )
        return 1.0 - relative**2 - max(1, min(self.block, numel)) * (half_step / most) ** 2
