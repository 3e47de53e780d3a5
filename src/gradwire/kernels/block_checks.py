"""What the contracts of kernels with a scale for each block refuse."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.checks import require, require_size
from gradwire.kernels.packing import packed_nbytes


def require_blocks(x: Tensor, packed: Tensor, scales: Tensor, bits: int, block: int) -> None:
    """Refuse blocks that do not begin at bytes, and tensors of another dtype, shape or size."""
    if block < 8 or block % 8:
        raise ValueError(f"block {block} is not a positive multiple of 8")
    require("the tensor", x, torch.float32)
    require("packed", packed, torch.uint8)
    require("scales", scales, torch.float32)
    require_size("packed", packed, packed_nbytes(x.numel(), bits))
    require_size("scales", scales, -(-x.numel() // block))


def require_fields(x: Tensor, block: int, **sizes: tuple[Tensor, torch.dtype, int]) -> None:
    """Refuse what a kernel would misread: `sizes` maps a name to (tensor, its dtype, its number of elements)."""
    if block < 1:
        raise ValueError(f"block {block} is not positive")
    require("the tensor", x, torch.float32)
    for name, (tensor, dtype, numel) in sizes.items():
        require(name, tensor, dtype)
        require_size(name, tensor, numel)


def block_count(x: Tensor, block: int) -> int:
    """How many blocks x has, the last of which may be short."""
    return -(-x.numel() // block)
