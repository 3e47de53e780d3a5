"""Short floats: 8 bits with a power of two for each block, powers of two, and bfloat16 rounded at random."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.block_checks import block_count, require_fields
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.floats import reference
from gradwire.kernels.packing import packed_nbytes

__all__ = [
    "FLOAT8",
    "bfloat16_encode",
    "float8_decode",
    "float8_encode",
    "natural_decode",
    "natural_encode",
]

_bfloat16_encode = Kernel(reference.bfloat16_encode, "cpu")
_float8_decode = Kernel(reference.float8_decode, "cpu")
_float8_encode = Kernel(reference.float8_encode, "cpu")
_natural_decode = Kernel(reference.natural_decode, "cpu")
_natural_encode = Kernel(reference.natural_encode, "cpu")
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _check_float8(x: Tensor, block: int, codes: Tensor, exponents: Tensor) -> None:
    blocks = block_count(x, block)
    require_fields(x, block, codes=(codes, torch.uint8, x.numel()), exponents=(exponents, torch.uint8, blocks))


def float8_encode(x: Tensor, dtype: torch.dtype, block: int, codes: Tensor, exponents: Tensor) -> None:
    """Round to a float of 8 bits, to nearest with ties to even, after division by the block's power of two.

        s = the least 2^(e - 127), e >= 1, with max|x| / s <= max(dtype)
        code = dtype(x / s)

    so nothing saturates, and the largest magnitude has at least half the range of the format. A block with NaN or
    infinity has e = 255 and codes 0, and decodes to NaN.

    Args:
        x: (numel,).
        dtype: `torch.float8_e4m3fn` (largest 448) or `torch.float8_e5m2` (largest 57344).
        block: elements that share a scale.
        codes: (numel,) uint8, written.
        exponents: (ceil(numel / block),) uint8, written: e.

    Raises:
        ValueError: a size that does not fit.
        TypeError: x is not float32.

    References:
        Micikevicius et al. 2022, "FP8 formats for deep learning", Table 1.

    >>> codes, exponents = torch.empty(2, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
    >>> float8_encode(torch.tensor([448.0, -1.0]), torch.float8_e4m3fn, 8, codes, exponents)
    >>> codes.view(torch.float8_e4m3fn).float(), exponents.tolist()
    (tensor([448.,  -1.]), [127])
    """
    _check_float8(x, block, codes, exponents)
    _float8_encode.on(x.device, x.numel())(x, dtype, block, codes, exponents)


def float8_decode(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, out: Tensor, weight: float | None = None
) -> None:
    """out = code * 2^(e - 127); with a weight, out += weight * that.

    Raises:
        PayloadError: a size that does not fit.
    """
    _check_float8(out, block, codes, exponents)
    _float8_decode.on(out.device, out.numel())(codes, exponents, dtype, block, out, weight)


def natural_encode(x: Tensor, key: int, exponents: Tensor, signs: Tensor) -> None:
    """Round |x| to the power of two below or above, up with probability |x| / 2^floor(log2 |x|) - 1.

    On the bits of a float32 that is adding a random fraction and cutting the fraction off:

        e = min(254, (bits(|x|) + floor(2^23 u_i)) >> 23),  u = uniform(key, numel)

    which is exact, subnormal numbers included (they become 0 or 2^-126). Numbers above 2^127 would round up to 2^128,
    which float32 has not: they become 2^127. NaN and infinity have e = 255 and decode to infinity.

    Args:
        x: (numel,).
        key: of the rounding.
        exponents: (numel,) uint8, written: e.
        signs: (packed_nbytes(numel, 1),) uint8, written: 1 where the sign bit of x is set.

    Raises:
        ValueError: a size that does not fit.
        TypeError: x is not float32.

    References:
        Horvath et al. 2019, "Natural compression for distributed deep learning".

    >>> exponents, signs = torch.empty(3, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
    >>> natural_encode(torch.tensor([1.0, -4.0, 0.0]), 1, exponents, signs)
    >>> exponents.tolist(), signs.tolist()
    ([127, 129, 0], [2])
    """
    _check_natural(x, exponents, signs)
    _natural_encode.on(x.device, x.numel())(x, key, exponents, signs)


def _check_natural(x: Tensor, exponents: Tensor, signs: Tensor) -> None:
    packed = packed_nbytes(x.numel(), 1)
    require_fields(x, 8, exponents=(exponents, torch.uint8, x.numel()), signs=(signs, torch.uint8, packed))


def natural_decode(exponents: Tensor, signs: Tensor, out: Tensor, weight: float | None = None) -> None:
    """out = sign * 2^(e - 127), 0 where e = 0; with a weight, out += weight * that.

    Raises:
        PayloadError: a size that does not fit.
    """
    _check_natural(out, exponents, signs)
    _natural_decode.on(out.device, out.numel())(exponents, signs, out, weight)


def bfloat16_encode(x: Tensor, key: int, out: Tensor) -> None:
    """Round to a bfloat16 below or above at random: the upper 16 bits of bits(x) + floor(2^16 u_i).

    Unbiased and exact, subnormal numbers included. Magnitudes beyond the largest bfloat16 may become infinite, as they
    do when rounded to nearest; infinity stays, and NaN stays NaN.

    Args:
        x: (numel,).
        key: of u = uniform(key, numel).
        out: (numel,) bfloat16, written.

    Raises:
        ValueError: a size that does not fit.
        TypeError: x is not float32.

    >>> out = torch.empty(2, dtype=torch.bfloat16)
    >>> bfloat16_encode(torch.tensor([1.0, -0.5]), 1, out)
    >>> out
    tensor([ 1.0000, -0.5000], dtype=torch.bfloat16)
    """
    require_fields(x, 1, out=(out, torch.bfloat16, x.numel()))
    _bfloat16_encode.on(x.device, x.numel())(x, key, out)
