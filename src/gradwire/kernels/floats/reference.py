"""Short floats in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.packing.reference import pack_bits, unpack_bits
from gradwire.kernels.random.reference import uniform
from gradwire.kernels.runtime.torch_blocks import (
    floats_of_bits,
    for_each_element,
    magnitude_bits,
    rows_of_blocks,
    write_or_add,
)

BROKEN = 255
"""The exponent byte of a block that holds NaN or infinity."""


def float8_encode(x: Tensor, dtype: torch.dtype, block: int, codes: Tensor, exponents: Tensor) -> None:
    top = 8 if dtype == torch.float8_e4m3fn else 15
    largest = rows_of_blocks(magnitude_bits(x), block).amax(1).to(torch.int64)
    fits = largest < 0x7F800000
    exponent = (((largest + 0x1FFFFF) >> 23) - top).clamp(min=1)
    inverse = floats_of_bits((254 - exponent) << 23)
    scaled = x * for_each_element(torch.where(fits, inverse, 0.0), block, x.numel())
    raw = scaled.to(dtype).view(torch.uint8)
    codes.copy_(torch.where(for_each_element(fits, block, x.numel()), raw, 0))
    exponents.copy_(torch.where(fits, exponent, BROKEN))


def float8_scales(exponents: Tensor) -> Tensor:
    """2^(e - 127), and infinity for 255; a damaged 0 is 0."""
    return floats_of_bits(exponents.to(torch.int64) << 23)


def _float8_values(codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    values = codes.contiguous().view(dtype).to(torch.float32)
    return values * for_each_element(float8_scales(exponents), block, codes.numel())


def float8_decode(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, out: Tensor, weight: float | None = None
) -> None:
    write_or_add(_float8_values(codes, exponents, dtype, block), out, weight)


def natural_encode(x: Tensor, key: int, exponents: Tensor, signs: Tensor) -> None:
    magnitude = magnitude_bits(x).to(torch.int64)
    word = (uniform(key, x.numel(), x.device) * 2.0**23).to(torch.int64)
    rounded = ((magnitude + word) >> 23).clamp(max=254)
    exponents.copy_(torch.where(magnitude < 0x7F800000, rounded, 255))
    pack_bits(x.view(torch.int32) < 0, 1, signs)


def _natural_values(exponents: Tensor, signs: Tensor) -> Tensor:
    magnitude = exponents.to(torch.int64) << 23
    negative = unpack_bits(signs, 1, exponents.numel()) != 0
    return floats_of_bits(torch.where(negative, magnitude - (1 << 31), magnitude))


def natural_decode(exponents: Tensor, signs: Tensor, out: Tensor, weight: float | None = None) -> None:
    write_or_add(_natural_values(exponents, signs), out, weight)


def bfloat16_encode(x: Tensor, key: int, out: Tensor) -> None:
    magnitude = magnitude_bits(x).to(torch.int64)
    word = (uniform(key, x.numel(), x.device) * 2.0**16).to(torch.int64)
    kept = torch.where(magnitude < 0x7F800000, (magnitude + word) >> 16, magnitude >> 16)
    kept = torch.where(magnitude > 0x7F800000, kept | 0x40, kept)
    out.view(torch.int16).copy_(torch.where(x.view(torch.int32) < 0, kept - (1 << 15), kept))
