"""More quantisers, at the speeds of `gradwire.kernels`: 8-bit floats, powers of two, ternary, one bit, affine.

The conventions are those of `gradwire.kernels`: `x`, `into` and `out` are 1-d, contiguous and float32; what is
written is preallocated and written in full; `reference_quantise` says what each does and `cpu_quantise` gives the
same bits, but for scales that are sums. `uniform` is `gradwire.kernels.uniform`.
"""

# These modules are parts of one package, and share its checks and its dispatch.
# pyright: reportPrivateUsage=none

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import _require, _require_range, _require_size, packed_nbytes, reference, reference_quantise

__all__ = [
    "FLOAT8",
    "MOST_VOTERS",
    "affine_accumulate",
    "affine_decode",
    "affine_encode",
    "bfloat16_encode",
    "float8_accumulate",
    "float8_decode",
    "float8_encode",
    "majority",
    "natural_accumulate",
    "natural_decode",
    "natural_encode",
    "one_bit_accumulate",
    "one_bit_decode",
    "one_bit_encode",
    "ternary_accumulate",
    "ternary_decode",
    "ternary_encode",
    "ternary_scales",
    "warm_up",
]

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MOST_VOTERS = 127
"""Whose votes fit in a byte; more of them are counted in plain torch."""


# Dispatch and checks ----------------------------------------------------------------------------------------


def _kernels(device: torch.device, numel: int) -> ModuleType:
    if kernels._kernels(device, numel) is reference or device.type != "cpu":
        return reference_quantise
    from gradwire.kernels import cpu_quantise

    return cpu_quantise


def _check(x: Tensor, block: int, **sizes: tuple[Tensor, torch.dtype, int]) -> None:
    """Refuse what a kernel would misread: `sizes` maps a name to (tensor, its dtype, its number of elements)."""
    if block < 1:
        raise ValueError(f"block {block} is not positive")
    _require("the tensor", x, torch.float32)
    for name, (tensor, dtype, numel) in sizes.items():
        _require(name, tensor, dtype)
        _require_size(name, tensor, numel)


def _blocks(x: Tensor, block: int) -> int:
    return -(-x.numel() // block)


def warm_up() -> None:
    """Call every kernel once, so that compiling is done, and kept on disk, before the first training step."""
    x = torch.arange(40, dtype=torch.float32) - 20.0
    a, b, scales = (
        torch.zeros(40, dtype=torch.uint8),
        torch.zeros(40, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.float32),
    )
    float8_encode(x, torch.float8_e4m3fn, 40, a, b[:1])
    float8_accumulate(a, b[:1], torch.float8_e4m3fn, 40, x)
    natural_encode(x, 1, a, b[:5])
    natural_decode(a, b[:5], x)
    bfloat16_encode(x, 1, torch.empty(40, dtype=torch.bfloat16))
    ternary_scales(x, 2.5, 40, scales)
    ternary_encode(x, scales, 1, 40, 5, a[:8])
    ternary_decode(a[:8], scales, 40, 5, x)
    one_bit_encode(x, 40, a[:5], torch.empty(2, dtype=torch.float32))
    one_bit_decode(a[:5], torch.zeros(2, dtype=torch.float32), 40, x)
    majority(a.view(8, 5), 0, b[:5])
    affine_encode(x, 0, scales, b[:1], a)
    affine_decode(scales, b[:1], a, 0, x)


# Floats of 8 bits -------------------------------------------------------------------------------------------


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
    _check(x, block, codes=(codes, torch.uint8, x.numel()), exponents=(exponents, torch.uint8, _blocks(x, block)))
    _kernels(x.device, x.numel()).float8_encode(x, dtype, block, codes, exponents)


def float8_accumulate(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """into += alpha * (code * 2^(e - 127)). Raises PayloadError for a size that does not fit."""
    _check(
        into, block, codes=(codes, torch.uint8, into.numel()), exponents=(exponents, torch.uint8, _blocks(into, block))
    )
    _kernels(into.device, into.numel()).float8_accumulate(codes, exponents, dtype, block, into, alpha)


def float8_decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, out: Tensor) -> None:
    """out = code * 2^(e - 127). Raises as `float8_accumulate`."""
    _check(out, block, codes=(codes, torch.uint8, out.numel()), exponents=(exponents, torch.uint8, _blocks(out, block)))
    _kernels(out.device, out.numel()).float8_decode(codes, exponents, dtype, block, out)


# Powers of two and bfloat16, rounded at random --------------------------------------------------------------


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
    _kernels(x.device, x.numel()).natural_encode(x, key, exponents, signs)


def _check_natural(x: Tensor, exponents: Tensor, signs: Tensor) -> None:
    packed = packed_nbytes(x.numel(), 1)
    _check(x, 8, exponents=(exponents, torch.uint8, x.numel()), signs=(signs, torch.uint8, packed))


def natural_accumulate(exponents: Tensor, signs: Tensor, into: Tensor, alpha: float = 1.0) -> None:
    """into += alpha * sign * 2^(e - 127), 0 where e = 0. Raises PayloadError for a size that does not fit."""
    _check_natural(into, exponents, signs)
    _kernels(into.device, into.numel()).natural_accumulate(exponents, signs, into, alpha)


def natural_decode(exponents: Tensor, signs: Tensor, out: Tensor) -> None:
    """out = sign * 2^(e - 127), 0 where e = 0. Raises as `natural_accumulate`."""
    _check_natural(out, exponents, signs)
    _kernels(out.device, out.numel()).natural_decode(exponents, signs, out)


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
    _check(x, 1, out=(out, torch.bfloat16, x.numel()))
    _kernels(x.device, x.numel()).bfloat16_encode(x, key, out)


# Ternary ----------------------------------------------------------------------------------------------------


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
    _check(x, block, scales=(scales, torch.float32, _blocks(x, block)))
    _kernels(x.device, x.numel()).ternary_scales(x, clip, block, scales)


def _check_ternary(x: Tensor, scales: Tensor, block: int, digits: int, packed: Tensor) -> None:
    _require_range("digits", digits, 4, 5)
    if block % digits:
        raise ValueError(f"block {block} is not a multiple of the {digits} digits of a byte")
    nbytes = -(-x.numel() // digits)
    _check(x, block, scales=(scales, torch.float32, _blocks(x, block)), packed=(packed, torch.uint8, nbytes))


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
    _kernels(x.device, x.numel()).ternary_encode(x, scales, key, block, digits, packed, clip)


def ternary_accumulate(
    packed: Tensor, scales: Tensor, block: int, digits: int, into: Tensor, alpha: float = 1.0
) -> None:
    """into += alpha * (t * s). Raises PayloadError for a size that does not fit, else as `ternary_encode`."""
    _check_ternary(into, scales, block, digits, packed)
    _kernels(into.device, into.numel()).ternary_accumulate(packed, scales, block, digits, into, alpha)


def ternary_decode(packed: Tensor, scales: Tensor, block: int, digits: int, out: Tensor) -> None:
    """out = t * s. Raises as `ternary_accumulate`."""
    _check_ternary(out, scales, block, digits, packed)
    _kernels(out.device, out.numel()).ternary_decode(packed, scales, block, digits, out)


# One bit ----------------------------------------------------------------------------------------------------


def _check_one_bit(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    if block % 8:
        raise ValueError(f"block {block} is not a multiple of 8")
    nbytes = packed_nbytes(x.numel(), 1)
    _check(x, block, packed=(packed, torch.uint8, nbytes), means=(means, torch.float32, 2 * _blocks(x, block)))


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
    _kernels(x.device, x.numel()).one_bit_encode(x, block, packed, means)


def one_bit_accumulate(packed: Tensor, means: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """into += alpha * (the upper mean where the bit is 1, else the lower). PayloadError if a size does not fit."""
    _check_one_bit(into, block, packed, means)
    _kernels(into.device, into.numel()).one_bit_accumulate(packed, means, block, into, alpha)


def one_bit_decode(packed: Tensor, means: Tensor, block: int, out: Tensor) -> None:
    """out = the upper mean where the bit is 1, else the lower. Raises as `one_bit_accumulate`."""
    _check_one_bit(out, block, packed, means)
    _kernels(out.device, out.numel()).one_bit_decode(packed, means, block, out)


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
    _require_range("casting", casting, 0, voters - 1)
    _require("ballots", ballots.view(-1), torch.uint8)
    _require("out", out, torch.uint8)
    _require_size("out", out, nbytes)
    chosen = _kernels(out.device, 8 * nbytes) if voters <= MOST_VOTERS else reference_quantise
    chosen.majority(ballots, casting, out)


# An affine grid ---------------------------------------------------------------------------------------------


def _check_affine(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    size = block or max(1, x.numel())
    _check(
        x,
        size,
        scales=(scales, torch.float32, _blocks(x, size)),
        zeros=(zeros, torch.uint8, _blocks(x, size)),
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
    _kernels(x.device, x.numel()).affine_encode(x, block, scales, zeros, levels)


def affine_accumulate(
    scales: Tensor, zeros: Tensor, levels: Tensor, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """into += alpha * (s * (q - z)). Raises PayloadError for a size that does not fit."""
    _check_affine(into, block, scales, zeros, levels)
    _kernels(into.device, into.numel()).affine_accumulate(scales, zeros, levels, block, into, alpha)


def affine_decode(scales: Tensor, zeros: Tensor, levels: Tensor, block: int, out: Tensor) -> None:
    """out = s * (q - z). Raises as `affine_accumulate`."""
    _check_affine(out, block, scales, zeros, levels)
    _kernels(out.device, out.numel()).affine_decode(scales, zeros, levels, block, out)
