"""One bit an element, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.packing.reference import pack_bits, unpack_bits
from gradwire.kernels.runtime.torch_blocks import block_numels, for_each_element, rows_of_blocks, write_or_add


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    total = rows_of_blocks(x, block).abs().sum(1, dtype=torch.float64)
    scales.copy_(total / block_numels(x.numel(), scales, block))
    pack_bits(x >= 0, 1, packed)
    if keep:
        sign_decode(packed, scales, block, x, -1.0)


def _sign_values(packed: Tensor, scales: Tensor, block: int, numel: int) -> Tensor:
    each = for_each_element(scales, block, numel)
    return torch.where(unpack_bits(packed, 1, numel) != 0, each, -each)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    write_or_add(_sign_values(packed, scales, block, out.numel()), out, weight)


def one_bit_encode(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    up = x >= 0
    for column, part in enumerate((up, ~up)):
        total = rows_of_blocks(torch.where(part, x, 0.0), block).sum(1, dtype=torch.float64)
        count = rows_of_blocks(part.to(torch.float64), block).sum(1)
        means[column::2].copy_(total / count.clamp(min=1.0))
    pack_bits(up, 1, packed)


def _one_bit_values(packed: Tensor, means: Tensor, block: int, numel: int) -> Tensor:
    up, down = (for_each_element(means[column::2], block, numel) for column in (0, 1))
    return torch.where(unpack_bits(packed, 1, numel) != 0, up, down)


def one_bit_decode(packed: Tensor, means: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    write_or_add(_one_bit_values(packed, means, block, out.numel()), out, weight)


def majority(ballots: Tensor, casting: int, out: Tensor) -> None:
    voters, nbytes = ballots.shape
    votes = torch.zeros(8 * nbytes, dtype=torch.int32, device=ballots.device)
    for voter, ballot in enumerate(ballots):
        votes += unpack_bits(ballot, 1, 8 * nbytes).to(torch.int32) * (3 if voter == casting else 2)
    pack_bits(votes > voters, 1, out)
