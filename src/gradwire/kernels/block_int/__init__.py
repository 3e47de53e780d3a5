"""Integers of 2 to 8 bits with a scale for each block."""

from __future__ import annotations

from torch import Tensor

from gradwire.kernels.block_checks import require_blocks
from gradwire.kernels.block_int import reference
from gradwire.kernels.checks import require_range
from gradwire.kernels.dispatch import Kernel

__all__ = [
    "block_int_decode",
    "block_int_encode",
]

_block_int_decode = Kernel(reference.block_int_decode, "cpu", "cuda")
_block_int_encode = Kernel(reference.block_int_encode, "cpu", "cuda")


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    """Round to 2L + 1 levels of the block's largest magnitude, L = 2^(bits-1) - 1; one pass.

        scale = max |x| over the block
        q = rint(x * (L / scale)), ties to even, with key None
        q = clamp(floor(x * (L / scale) + u_i), -L, L) with a key

    with u = `uniform(key, numel)`; the code is q + L. Where L / scale overflows (a block of zeros, or nearly)
    q and the stored scale are 0. Where a block holds NaN or infinity its scale is that and q is 0: it decodes
    to NaN.

    Args:
        x: (numel,).
        bits: 2 to 8.
        block: elements that share a scale, a multiple of 8.
        key: of stochastic rounding, or None for rounding to nearest.
        packed: (packed_nbytes(numel, bits),) uint8, written.
        scales: (ceil(numel / block),) float32, written.
        keep: leave in `x` what was not encoded, x - decoded, in the same pass.

    Raises:
        ValueError: bits, block or a size that does not fit.
        TypeError: x is not float32.

    >>> import torch
    >>> from gradwire.kernels import unpack_bits
    >>> packed, scales = torch.empty(2, dtype=torch.uint8), torch.empty(1)
    >>> block_int_encode(torch.tensor([0.0, 7.0, -3.0, 1.4]), 4, 8, None, packed, scales)
    >>> unpack_bits(packed, 4, 4), scales
    (tensor([ 7, 14,  4,  8], dtype=torch.uint8), tensor([7.]))
    """
    require_range("bits", bits, 2, 8)
    require_blocks(x, packed, scales, bits, block)
    _block_int_encode.on(x.device, x.numel())(x, bits, block, key, packed, scales, keep)


def block_int_decode(
    packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    """out = q * (scale / L), the inverse of `block_int_encode`; with a weight, out += weight * that; one pass.

    Raises:
        ValueError: bits or block out of range.
        PayloadError: a size that does not fit.
    """
    require_range("bits", bits, 2, 8)
    require_blocks(out, packed, scales, bits, block)
    _block_int_decode.on(out.device, out.numel())(packed, scales, bits, block, out, weight)
