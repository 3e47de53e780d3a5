"""How kernels are started, and how a tensor of blocks is cut into tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.kernels.random.reference import MASK32

TILE = 4096
"""Elements of a program: 16 a thread, four loads of 16 bytes in flight."""

WARPS = 8


def launch(kernel: Any, programs: int | tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Start programs on the device's current stream, and nothing where there is nothing to do.

    Multiplications are never fused with additions, since every rounding must be that of the other devices.
    """
    grid = (programs,) if isinstance(programs, int) else programs
    if 0 in grid:
        return
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[grid](*args, **{"num_warps": WARPS, "enable_fp_fusion": False, **meta})


def programs_at_once(device: torch.device, per_processor: int = 4) -> int:
    """How many programs that loop over tiles keep the device busy; for the interpreter a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * per_processor


def signed(words: Sequence[int]) -> list[int]:
    """32-bit words as int32, since Triton gives integers of 2^31 and more another type, and compiles anew."""
    return [(word & MASK32) - ((word & 0x80000000) << 1) for word in words]


def power_of_two(n: int) -> int:
    """The least power of two that is not below n.

    >>> power_of_two(24)
    32
    """
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def codes_meta(bits: int) -> dict[str, int]:
    """Constants of codes of `bits` bits: how many bytes hold eight of them, and how many one may touch."""
    step = math.gcd(bits, 8)
    return {"BITS": bits, "BYTES": power_of_two(bits), "SPAN": ceil_div(8 - step + bits, 8)}


@dataclass(frozen=True)
class Tiling:
    """Blocks cut into tiles of `rows` rows of `width` elements.

    A row is a block, padded to a power of two; or, of blocks wider than a tile, one of its `parts`.
    """

    block: int
    width: int
    rows: int
    parts: int
    blocks: int

    @property
    def programs(self) -> int:
        """How many programs run: one for each tile."""
        return ceil_div(self.blocks, self.rows) * self.parts

    @property
    def meta(self) -> dict[str, int]:
        """Constants of the kernels."""
        return {"BLOCK": self.block, "WIDTH": self.width, "ROWS": self.rows, "PARTS": self.parts}


def tiling(numel: int, block: int) -> Tiling:
    """Cut `numel` elements in blocks.

    >>> tiling(10_000, 24)
    Tiling(block=24, width=32, rows=128, parts=1, blocks=417)
    >>> tiling(10_000, 8192)
    Tiling(block=8192, width=4096, rows=1, parts=2, blocks=2)
    """
    width = min(power_of_two(block), TILE)
    return Tiling(block, width, TILE // width, ceil_div(block, width), ceil_div(numel, block))
