"""Ternary digits in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.random.reference import uniform
from gradwire.kernels.runtime.torch_blocks import (
    block_numels,
    for_each_element,
    magnitude_bits,
    rows_of_blocks,
    write_or_add,
)


def ternary_scales(x: Tensor, clip: float, block: int, scales: Tensor) -> None:
    largest = rows_of_blocks(magnitude_bits(x), block).amax(1).view(torch.float32)
    squares = rows_of_blocks(x, block).to(torch.float64).square().sum(1)
    limit = ((squares / block_numels(x.numel(), scales, block)).sqrt() * clip).to(torch.float32)
    scale = torch.where(torch.isfinite(largest) & (limit < largest), limit, largest)
    scales.copy_(torch.where(torch.isinf(torch.ones_like(scale) / scale), 0.0, scale))


def ternary_encode(
    x: Tensor, scales: Tensor, key: int, block: int, digits: int, packed: Tensor, clip: float | None = None
) -> None:
    if clip is not None:
        ternary_scales(x, clip, block, scales)
    inverse = torch.ones_like(scales) / scales
    inverse = for_each_element(torch.where(torch.isfinite(inverse), inverse, 0.0), block, x.numel())
    hit = x.abs() * inverse + uniform(key, x.numel(), x.device) >= 1
    digit = 1 + torch.where(x < 0, -1, 1) * hit
    full = x.numel() // block * block
    base = 3 if digits == 5 else 4
    packed[: full // digits].copy_(_join_digits(digit[:full].view(-1, digits, block // digits), base).view(-1))
    rest = pad(digit[full:], (0, -(x.numel() - full) % digits)).view(1, digits, -1)
    packed[full // digits :].copy_(_join_digits(rest, base).view(-1))


def _join_digits(planes: Tensor, base: int) -> Tensor:
    """(blocks, digits, bytes) to (blocks, bytes): the first plane is the lowest digit."""
    total = torch.zeros_like(planes[:, 0])
    for plane in reversed(planes.unbind(1)):
        total = total * base + plane
    return total


def _split_digits(packed: Tensor, digits: int) -> Tensor:
    """(blocks, bytes) to (blocks, digits, bytes)."""
    base, rest, planes = 3 if digits == 5 else 4, packed.to(torch.int32), list[Tensor]()
    for _ in range(digits):
        planes.append(rest % base)
        rest = rest // base
    return torch.stack(planes, 1)


def _ternary_values(packed: Tensor, scales: Tensor, block: int, digits: int, numel: int) -> Tensor:
    full = numel // block * block
    whole = _split_digits(packed[: full // digits].view(-1, block // digits), digits).reshape(-1)
    rest = _split_digits(packed[full // digits :].view(1, -1), digits).reshape(-1)[: numel - full]
    return (torch.cat([whole, rest]) - 1).to(torch.float32) * for_each_element(scales, block, numel)


def ternary_decode(
    packed: Tensor, scales: Tensor, block: int, digits: int, out: Tensor, weight: float | None = None
) -> None:
    write_or_add(_ternary_values(packed, scales, block, digits, out.numel()), out, weight)
