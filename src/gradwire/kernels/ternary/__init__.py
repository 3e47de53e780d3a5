"""Minus, zero or plus a scale: four or five digits to a byte (TernGrad)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.block_checks import block_count, require_fields
from gradwire.kernels.checks import require_range
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.ternary import reference

__all__ = [
    "ternary_decode",
    "ternary_encode",
    "ternary_scales",
]

_ternary_decode = Kernel(reference.ternary_decode, "cpu")
_ternary_encode = Kernel(reference.ternary_encode, "cpu")
_ternary_scales = Kernel(reference.ternary_scales, "cpu")


def ternary_scales(x: Tensor, clip: float, block: int, scales: Tensor) -> None:
    """s = min(max|x|, clip * sqrt(mean x^2)) of each block: the largest magnitude after clipping.

    The mean is taken in float64 and its order of summation is not specified. Where 1 / s overflows s is 0; where a
    block holds NaN or infinity it is that.

    Args:
        x: (numel,).
        clip: in root mean squares; infinity for no clipping.
        block: elements that share a scale.
        scales: (ceil(numel / block),) float32, written.

    Raises:
        ValueError: a size that does not fit.
        TypeError: x is not float32.

    >>> scales = torch.empty(1)
    >>> ternary_scales(torch.tensor([1.0, 1.0, 1.0, -5.0]), 1.0, 40, scales)
    >>> scales  # sqrt(28 / 4)
    tensor([2.6458])
    """
    require_fields(x, block, scales=(scales, torch.float32, block_count(x, block)))
    _ternary_scales.on(x.device, x.numel())(x, clip, block, scales)


def _check_ternary(x: Tensor, scales: Tensor, block: int, digits: int, packed: Tensor) -> None:
    require_range("digits", digits, 4, 5)
    if block % digits:
        raise ValueError(f"block {block} is not a multiple of the {digits} digits of a byte")
    nbytes = -(-x.numel() // digits)
    require_fields(
        x, block, scales=(scales, torch.float32, block_count(x, block)), packed=(packed, torch.uint8, nbytes)
    )


def ternary_encode(
    x: Tensor, scales: Tensor, key: int, block: int, digits: int, packed: Tensor, clip: float | None = None
) -> None:
    """Round each element to -s, 0 or s, several to a byte; one pass.

        t_i = sign(x_i) where |x_i| (1 / s) + u_i >= 1, else 0;   u = uniform(key, numel)

    Elements beyond s, which clipping would bring to s, always round to it. The digits t + 1 of a block of n elements
    lie in ceil(n / digits) bytes: byte j is the sum over p of base^p digit[p * bytes + j], with base 3 where five share
    a byte and base 4 where four do, and digits behind the end zero.

    Args:
        x: (numel,).
        scales: (ceil(numel / block),) of `ternary_scales`, or agreed on otherwise; where one is 0 or not finite all
            digits are those of 0.
        key: of the rounding.
        block: elements that share a scale, a multiple of `digits`.
        digits: 5 (1.6 bits an element) or 4 (2 bits).
        packed: (ceil(numel / digits),) uint8, written.
        clip: write the scales first, as `ternary_scales` does with it, in the same pass.

    Raises:
        ValueError: digits, block or a size that does not fit.
        TypeError: x is not float32.

    References:
        Wen et al. 2017, "TernGrad".

    >>> packed = torch.empty(1, dtype=torch.uint8)
    >>> ternary_encode(torch.tensor([2.0, -2.0, 0.0]), torch.tensor([2.0]), 1, 40, 5, packed)
    >>> packed.tolist()  # 2 + 3 * 0 + 9 * 1
    [11]
    """
    _check_ternary(x, scales, block, digits, packed)
    _ternary_encode.on(x.device, x.numel())(x, scales, key, block, digits, packed, clip)


def ternary_decode(
    packed: Tensor, scales: Tensor, block: int, digits: int, out: Tensor, weight: float | None = None
) -> None:
    """out = t * s; with a weight, out += weight * that.

    Raises:
        ValueError: digits or block out of range.
        PayloadError: a size that does not fit.
    """
    _check_ternary(out, scales, block, digits, packed)
    _ternary_decode.on(out.device, out.numel())(packed, scales, block, digits, out, weight)
