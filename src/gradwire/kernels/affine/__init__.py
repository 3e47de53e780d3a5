"""Integers of 8 bits on an affine grid: a scale and a zero point for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.affine import reference
from gradwire.kernels.block_checks import block_count, require_fields
from gradwire.kernels.dispatch import Kernel

__all__ = [
    "affine_decode",
    "affine_encode",
]

_affine_decode = Kernel(reference.affine_decode, "cpu")
_affine_encode = Kernel(reference.affine_encode, "cpu")


def _check_affine(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    size = block or max(1, x.numel())
    require_fields(
        x,
        size,
        scales=(scales, torch.float32, block_count(x, size)),
        zeros=(zeros, torch.uint8, block_count(x, size)),
        levels=(levels, torch.uint8, x.numel()),
    )


def affine_encode(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    """Round to 256 evenly spaced values between a block's extremes, zero among them.

        low, high = min(0, min x), max(0, max x);   s = high / 255 - low / 255
        z = clamp(rint(-low / s), 0, 255);          q = clamp(rint(x / s) + z, 0, 255)

    Where s is 0 or not finite z and q are 0.

    Args:
        x: (numel,).
        block: elements that share a grid; 0 for all of them.
        scales: (blocks,) float32, written: s.
        zeros: (blocks,) uint8, written: z.
        levels: (numel,) uint8, written: q.

    Raises:
        ValueError: a size that does not fit.
        TypeError: x is not float32.

    >>> scales, zeros, levels = torch.empty(1), torch.empty(1).byte(), torch.empty(3).byte()
    >>> affine_encode(torch.tensor([-1.0, 0.0, 254.0]), 0, scales, zeros, levels)
    >>> scales.tolist(), zeros.tolist(), levels.tolist()
    ([1.0], [1], [0, 1, 255])
    """
    _check_affine(x, block, scales, zeros, levels)
    _affine_encode.on(x.device, x.numel())(x, block, scales, zeros, levels)


def affine_decode(
    scales: Tensor, zeros: Tensor, levels: Tensor, block: int, out: Tensor, weight: float | None = None
) -> None:
    """out = s * (q - z); with a weight, out += weight * that.

    Raises:
        PayloadError: a size that does not fit.
    """
    _check_affine(out, block, scales, zeros, levels)
    _affine_decode.on(out.device, out.numel())(scales, zeros, levels, block, out, weight)
