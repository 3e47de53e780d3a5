"""One bit an element: signs with a mean magnitude, signs with two means (1-bit), and votes over signs."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.block_checks import block_count, require_blocks, require_fields
from gradwire.kernels.checks import require, require_range, require_size
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.packing import packed_nbytes
from gradwire.kernels.sign import reference

__all__ = [
    "MOST_VOTERS",
    "majority",
    "one_bit_decode",
    "one_bit_encode",
    "sign_decode",
    "sign_encode",
]

_majority = Kernel(reference.majority, "cpu")
_one_bit_decode = Kernel(reference.one_bit_decode, "cpu")
_one_bit_encode = Kernel(reference.one_bit_encode, "cpu")
_sign_decode = Kernel(reference.sign_decode, "cpu", "cuda")
_sign_encode = Kernel(reference.sign_encode, "cpu", "cuda")


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    """One bit an element, 1 where x >= 0 (so for -0.0, and not for NaN), and scale = mean |x| over the block.

    The mean is taken in float64 and rounded once; its order of summation is not specified.

    Args:
        x: (numel,).
        block: elements that share a scale, a multiple of 8.
        packed: (packed_nbytes(numel, 1),) uint8, written.
        scales: (ceil(numel / block),) float32, written.
        keep: leave in `x` what was not encoded, x - decoded, in the same pass.

    Raises:
        ValueError: block or a size that does not fit.
        TypeError: x is not float32.

    >>> packed, scales = torch.empty(1, dtype=torch.uint8), torch.empty(1)
    >>> sign_encode(torch.tensor([1.0, -2.0, 3.0]), 8, packed, scales)
    >>> packed.tolist(), scales.tolist()
    ([5], [2.0])
    """
    require_blocks(x, packed, scales, 1, block)
    _sign_encode.on(x.device, x.numel())(x, block, packed, scales, keep)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    """out = scale where the bit is 1, else -scale; with a weight, out += weight * that; one pass.

    Raises:
        ValueError: block out of range.
        PayloadError: a size that does not fit.
    """
    require_blocks(out, packed, scales, 1, block)
    _sign_decode.on(out.device, out.numel())(packed, scales, block, out, weight)


MOST_VOTERS = 127
"""Whose votes fit in a byte; more of them are counted in plain torch."""


def _check_one_bit(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    if block % 8:
        raise ValueError(f"block {block} is not a multiple of 8")
    nbytes = packed_nbytes(x.numel(), 1)
    require_fields(
        x, block, packed=(packed, torch.uint8, nbytes), means=(means, torch.float32, 2 * block_count(x, block))
    )


def one_bit_encode(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    """One bit an element, 1 where x >= 0, and of each block the mean of those with 1 and the mean of all others.

    Means are taken in float64 and rounded once; their order of summation is not specified. A mean of nothing is 0.

    Args:
        x: (numel,).
        block: elements that share two means, a multiple of 8.
        packed: (packed_nbytes(numel, 1),) uint8, written.
        means: (2 ceil(numel / block),) float32, written: those of the upper part and the lower in turn.

    Raises:
        ValueError: block or a size that does not fit.
        TypeError: x is not float32.

    >>> packed, means = torch.empty(1, dtype=torch.uint8), torch.empty(2)
    >>> one_bit_encode(torch.tensor([1.0, -2.0, 3.0]), 8, packed, means)
    >>> packed.tolist(), means.tolist()
    ([5], [2.0, -2.0])
    """
    _check_one_bit(x, block, packed, means)
    _one_bit_encode.on(x.device, x.numel())(x, block, packed, means)


def one_bit_decode(packed: Tensor, means: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    """out = the upper mean where the bit is 1, else the lower; with a weight, out += weight * that; one pass.

    Raises:
        ValueError: a block that is no multiple of 8.
        PayloadError: a size that does not fit.
    """
    _check_one_bit(out, block, packed, means)
    _one_bit_decode.on(out.device, out.numel())(packed, means, block, out, weight)


def majority(ballots: Tensor, casting: int, out: Tensor) -> None:
    """Bit i of `out` is that of most rows of `ballots`, and of row `casting` where as many have 0 as 1.

    Args:
        ballots: (voters, bytes) uint8, contiguous.
        casting: whose vote breaks a tie, 0 to voters - 1.
        out: (bytes,) uint8, written.

    Raises:
        ValueError: `casting` out of range.
        PayloadError: an `out` of another size.

    >>> out = torch.empty(1, dtype=torch.uint8)
    >>> majority(torch.tensor([[0b0011], [0b0101]], dtype=torch.uint8), 1, out)
    >>> out.tolist() == [0b0101]
    True
    """
    voters, nbytes = ballots.shape
    require_range("casting", casting, 0, voters - 1)
    require("ballots", ballots.view(-1), torch.uint8)
    require("out", out, torch.uint8)
    require_size("out", out, nbytes)
    counted = _majority.on(out.device, 8 * nbytes) if voters <= MOST_VOTERS else reference.majority
    counted(ballots, casting, out)
