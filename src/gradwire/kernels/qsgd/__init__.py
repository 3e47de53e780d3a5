"""Levels of a block's Euclidean norm, rounded at random (QSGD)."""

from __future__ import annotations

from torch import Tensor

from gradwire.kernels.block_checks import require_blocks
from gradwire.kernels.checks import require_range
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.qsgd import reference

__all__ = [
    "qsgd_bits",
    "qsgd_decode",
    "qsgd_encode",
]

_qsgd_decode = Kernel(reference.qsgd_decode, "cpu", "cuda")
_qsgd_encode = Kernel(reference.qsgd_encode, "cpu", "cuda")


def qsgd_bits(levels: int) -> int:
    """Bits of a code of `qsgd_encode`: ceil(log2(levels + 1)) and a sign.

    >>> qsgd_bits(1), qsgd_bits(15), qsgd_bits(16)
    (2, 5, 6)
    """
    return levels.bit_length() + 1


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    """Round |x| at random to `levels` levels of the block's Euclidean norm.

        norm = ||x||_2 over the block
        level = min(levels, floor(|x| * (levels / norm) + u_i)),  u = uniform(key, numel)
        code = level | (x < 0) << (qsgd_bits(levels) - 1)

    The norm is taken in float64 and rounded once; its order of summation is not specified. Where levels /
    norm overflows codes and norm are 0. Where the norm is NaN or beyond float32 it is kept and codes are 0:
    the block decodes to NaN.

    Args:
        x: (numel,).
        levels: 1 to 32767.
        block: elements that share a norm, a multiple of 8.
        key: of the rounding.
        packed: (packed_nbytes(numel, qsgd_bits(levels)),) uint8, written.
        norms: (ceil(numel / block),) float32, written.
        keep: leave in `x` what was not encoded, x - decoded.

    Raises:
        ValueError: levels, block or a size that does not fit.
        TypeError: x is not float32.

    References:
        Alistarh et al. 2017, "QSGD", section 3.1.

    >>> import torch
    >>> from gradwire.kernels import unpack_bits
    >>> packed, norms = torch.empty(1, dtype=torch.uint8), torch.empty(1)
    >>> qsgd_encode(torch.tensor([-2.0, 0.0]), 4, 8, 0, packed, norms)
    >>> unpack_bits(packed, 4, 2).tolist(), norms.tolist()  # level 4, negative
    ([12, 0], [2.0])
    """
    require_range("levels", levels, 1, 32767)
    require_blocks(x, packed, norms, qsgd_bits(levels), block)
    _qsgd_encode.on(x.device, x.numel())(x, levels, block, key, packed, norms, keep)


def qsgd_decode(
    packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    """out = sign * level * (norm / levels); with a weight, out += weight * that; one pass.

    Raises:
        ValueError: levels or block out of range.
        PayloadError: a size that does not fit.
    """
    require_range("levels", levels, 1, 32767)
    require_blocks(out, packed, norms, qsgd_bits(levels), block)
    _qsgd_decode.on(out.device, out.numel())(packed, norms, levels, block, out, weight)
