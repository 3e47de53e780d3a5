"""QSGD in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.packing.reference import pack_bits, unpack_bits
from gradwire.kernels.random.reference import uniform
from gradwire.kernels.runtime.torch_blocks import for_each_element, inverse_of, rows_of_blocks, write_or_add


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    squares = rows_of_blocks(x, block).to(torch.float64).square().sum(1)
    inverse, usable, stored = inverse_of(squares.sqrt().to(torch.float32), levels)
    scaled = x.abs() * for_each_element(inverse, block, x.numel())
    level = (scaled + uniform(key, x.numel(), x.device)).floor().clamp(max=levels)
    usable = for_each_element(usable, block, x.numel())
    level = torch.where(usable, level, 0.0).to(torch.int32)
    negative = (usable & (x < 0)).to(torch.int32)
    pack_bits(level | (negative << levels.bit_length()), levels.bit_length() + 1, packed)
    norms.copy_(stored)
    if keep:
        qsgd_decode(packed, norms, levels, block, x, -1.0)


def _qsgd_values(packed: Tensor, norms: Tensor, levels: int, block: int, numel: int) -> Tensor:
    level_bits = levels.bit_length()
    code = unpack_bits(packed, level_bits + 1, numel).to(torch.int32)
    step = norms / torch.full_like(norms, levels)
    value = (code & ((1 << level_bits) - 1)).to(torch.float32) * for_each_element(step, block, numel)
    return torch.where(code >> level_bits != 0, -value, value)


def qsgd_decode(
    packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    write_or_add(_qsgd_values(packed, norms, levels, block, out.numel()), out, weight)
