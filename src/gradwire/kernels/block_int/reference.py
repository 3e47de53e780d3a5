"""Integers with a scale for each block, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.packing.reference import pack_bits, unpack_bits
from gradwire.kernels.random.reference import uniform
from gradwire.kernels.runtime.torch_blocks import (
    for_each_element,
    inverse_of,
    magnitude_bits,
    rows_of_blocks,
    write_or_add,
)


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    levels = 2 ** (bits - 1) - 1
    largest = rows_of_blocks(magnitude_bits(x), block).amax(1).view(torch.float32)
    inverse, usable, stored = inverse_of(largest, levels)
    scaled = x * for_each_element(inverse, block, x.numel())
    if key is None:
        q = scaled.round()
    else:
        q = (scaled + uniform(key, x.numel(), x.device)).floor().clamp(-levels, levels)
    q = torch.where(for_each_element(usable, block, x.numel()), q, 0.0)
    pack_bits((q + levels).to(torch.int32), bits, packed)
    scales.copy_(stored)
    if keep:
        block_int_decode(packed, scales, bits, block, x, -1.0)


def _block_int_values(packed: Tensor, scales: Tensor, bits: int, block: int, numel: int) -> Tensor:
    levels = 2 ** (bits - 1) - 1
    step = scales / torch.full_like(scales, levels)
    q = unpack_bits(packed, bits, numel).to(torch.float32) - levels
    return q * for_each_element(step, block, numel)


def block_int_decode(
    packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    write_or_add(_block_int_values(packed, scales, bits, block, out.numel()), out, weight)
