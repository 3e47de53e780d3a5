"""The kernels of `gradwire.kernels.quantise` in plain torch: what they mean, on any device, `meta` included."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.reference import magnitude_bits, pack_bits, uniform, unpack_bits

AFFINE_LEVELS = 255
BROKEN = 255
"""The exponent byte of a block that holds NaN or infinity."""

_AFFINE_PIECE = 1 << 14


def _rows(x: Tensor, block: int) -> Tensor:
    return pad(x, (0, -x.numel() % block)).view(-1, block)


def _each(scales: Tensor, block: int, numel: int) -> Tensor:
    return scales.repeat_interleave(block, output_size=scales.numel() * block)[:numel]


def _numels(numel: int, scales: Tensor, block: int) -> Tensor:
    """How many elements each block has, in float64: the last may be short."""
    numels = torch.full_like(scales, block, dtype=torch.float64)
    numels[-1:] = numel - (scales.numel() - 1) * block
    return numels


def _from_bits(bits: Tensor) -> Tensor:
    """float32 of the low 32 bits of int64 values."""
    return bits.to(torch.int32).view(torch.float32)


# Floats of 8 bits -------------------------------------------------------------------------------------------


def float8_encode(x: Tensor, dtype: torch.dtype, block: int, codes: Tensor, exponents: Tensor) -> None:
    """See `gradwire.kernels.quantise.float8_encode`."""
    top = 8 if dtype == torch.float8_e4m3fn else 15
    largest = _rows(magnitude_bits(x), block).amax(1).to(torch.int64)
    fits = largest < 0x7F800000
    exponent = (((largest + 0x1FFFFF) >> 23) - top).clamp(min=1)
    inverse = _from_bits((254 - exponent) << 23)
    scaled = x * _each(torch.where(fits, inverse, 0.0), block, x.numel())
    raw = scaled.to(dtype).view(torch.uint8)
    codes.copy_(torch.where(_each(fits, block, x.numel()), raw, 0))
    exponents.copy_(torch.where(fits, exponent, BROKEN))


def float8_scales(exponents: Tensor) -> Tensor:
    """2^(e - 127), and infinity for 255; a damaged 0 is 0."""
    return _from_bits(exponents.to(torch.int64) << 23)


def _float8_values(codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    values = codes.contiguous().view(dtype).to(torch.float32)
    return values * _each(float8_scales(exponents), block, codes.numel())


def float8_accumulate(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.quantise.float8_accumulate`."""
    into.add_(_float8_values(codes, exponents, dtype, block) * alpha)


def float8_decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.float8_decode`."""
    out.copy_(_float8_values(codes, exponents, dtype, block))


# Powers of two and bfloat16, rounded at random --------------------------------------------------------------


def natural_encode(x: Tensor, key: int, exponents: Tensor, signs: Tensor) -> None:
    """See `gradwire.kernels.quantise.natural_encode`."""
    magnitude = magnitude_bits(x).to(torch.int64)
    word = (uniform(key, x.numel(), x.device) * 2.0**23).to(torch.int64)
    rounded = ((magnitude + word) >> 23).clamp(max=254)
    exponents.copy_(torch.where(magnitude < 0x7F800000, rounded, 255))
    pack_bits(x.view(torch.int32) < 0, 1, signs)


def _natural_values(exponents: Tensor, signs: Tensor) -> Tensor:
    magnitude = exponents.to(torch.int64) << 23
    negative = unpack_bits(signs, 1, exponents.numel()) != 0
    return _from_bits(torch.where(negative, magnitude - (1 << 31), magnitude))


def natural_accumulate(exponents: Tensor, signs: Tensor, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.quantise.natural_accumulate`."""
    into.add_(_natural_values(exponents, signs) * alpha)


def natural_decode(exponents: Tensor, signs: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.natural_decode`."""
    out.copy_(_natural_values(exponents, signs))


def bfloat16_encode(x: Tensor, key: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.bfloat16_encode`."""
    magnitude = magnitude_bits(x).to(torch.int64)
    word = (uniform(key, x.numel(), x.device) * 2.0**16).to(torch.int64)
    kept = torch.where(magnitude < 0x7F800000, (magnitude + word) >> 16, magnitude >> 16)
    kept = torch.where(magnitude > 0x7F800000, kept | 0x40, kept)
    out.view(torch.int16).copy_(torch.where(x.view(torch.int32) < 0, kept - (1 << 15), kept))


# Ternary ----------------------------------------------------------------------------------------------------


def ternary_scales(x: Tensor, clip: float, block: int, scales: Tensor) -> None:
    """See `gradwire.kernels.quantise.ternary_scales`."""
    largest = _rows(magnitude_bits(x), block).amax(1).view(torch.float32)
    squares = _rows(x, block).to(torch.float64).square().sum(1)
    limit = ((squares / _numels(x.numel(), scales, block)).sqrt() * clip).to(torch.float32)
    scale = torch.where(torch.isfinite(largest) & (limit < largest), limit, largest)
    scales.copy_(torch.where(torch.isinf(torch.ones_like(scale) / scale), 0.0, scale))


def ternary_encode(
    x: Tensor, scales: Tensor, key: int, block: int, digits: int, packed: Tensor, clip: float | None = None
) -> None:
    """See `gradwire.kernels.quantise.ternary_encode`."""
    if clip is not None:
        ternary_scales(x, clip, block, scales)
    inverse = torch.ones_like(scales) / scales
    inverse = _each(torch.where(torch.isfinite(inverse), inverse, 0.0), block, x.numel())
    hit = x.abs() * inverse + uniform(key, x.numel(), x.device) >= 1
    digit = 1 + torch.where(x < 0, -1, 1) * hit
    full = x.numel() // block * block
    base = 3 if digits == 5 else 4
    packed[: full // digits].copy_(_join_digits(digit[:full].view(-1, digits, block // digits), base).view(-1))
    rest = pad(digit[full:], (0, -(x.numel() - full) % digits)).view(1, digits, -1)
    packed[full // digits :].copy_(_join_digits(rest, base).view(-1))


def _join_digits(planes: Tensor, base: int) -> Tensor:
    """(blocks, digits, bytes) to (blocks, bytes): the first plane is the lowest digit."""
    total = torch.zeros_like(planes[:, 0])
    for plane in reversed(planes.unbind(1)):
        total = total * base + plane
    return total


def _split_digits(packed: Tensor, digits: int) -> Tensor:
    """(blocks, bytes) to (blocks, digits, bytes)."""
    base, rest, planes = 3 if digits == 5 else 4, packed.to(torch.int32), list[Tensor]()
    for _ in range(digits):
        planes.append(rest % base)
        rest = rest // base
    return torch.stack(planes, 1)


def _ternary_values(packed: Tensor, scales: Tensor, block: int, digits: int, numel: int) -> Tensor:
    full = numel // block * block
    whole = _split_digits(packed[: full // digits].view(-1, block // digits), digits).reshape(-1)
    rest = _split_digits(packed[full // digits :].view(1, -1), digits).reshape(-1)[: numel - full]
    return (torch.cat([whole, rest]) - 1).to(torch.float32) * _each(scales, block, numel)


def ternary_accumulate(
    packed: Tensor, scales: Tensor, block: int, digits: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.quantise.ternary_accumulate`."""
    into.add_(_ternary_values(packed, scales, block, digits, into.numel()) * alpha)


def ternary_decode(packed: Tensor, scales: Tensor, block: int, digits: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.ternary_decode`."""
    out.copy_(_ternary_values(packed, scales, block, digits, out.numel()))


# One bit ----------------------------------------------------------------------------------------------------


def one_bit_encode(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    """See `gradwire.kernels.quantise.one_bit_encode`."""
    up = x >= 0
    for column, part in enumerate((up, ~up)):
        total = _rows(torch.where(part, x, 0.0), block).sum(1, dtype=torch.float64)
        count = _rows(part.to(torch.float64), block).sum(1)
        means[column::2].copy_(total / count.clamp(min=1.0))
    pack_bits(up, 1, packed)


def _one_bit_values(packed: Tensor, means: Tensor, block: int, numel: int) -> Tensor:
    up, down = (_each(means[column::2], block, numel) for column in (0, 1))
    return torch.where(unpack_bits(packed, 1, numel) != 0, up, down)


def one_bit_accumulate(packed: Tensor, means: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.quantise.one_bit_accumulate`."""
    into.add_(_one_bit_values(packed, means, block, into.numel()) * alpha)


def one_bit_decode(packed: Tensor, means: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.one_bit_decode`."""
    out.copy_(_one_bit_values(packed, means, block, out.numel()))


def majority(ballots: Tensor, casting: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.majority`."""
    voters, nbytes = ballots.shape
    votes = torch.zeros(8 * nbytes, dtype=torch.int32, device=ballots.device)
    for voter, ballot in enumerate(ballots):
        votes += unpack_bits(ballot, 1, 8 * nbytes).to(torch.int32) * (3 if voter == casting else 2)
    pack_bits(votes > voters, 1, out)


# An affine grid ---------------------------------------------------------------------------------------------


def _affine_pieces(numel: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Cut a tensor into (its elements, their blocks), small enough that temporaries stay small."""
    size = block or max(1, numel)
    step = max(1, _AFFINE_PIECE // size) * size if block else _AFFINE_PIECE
    for start in range(0, numel, step):
        blocks = slice(start // size, -(-min(start + step, numel) // size)) if block else slice(0, 1)
        yield slice(start, min(start + step, numel)), blocks


def _affine_rows(piece: Tensor, block: int) -> Tensor:
    """One row a block, the last one padded with zeros, which change no extreme."""
    return _rows(piece, block or max(1, piece.numel()))


def affine_encode(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    """See `gradwire.kernels.quantise.affine_encode`."""
    extremes = torch.zeros(2, scales.numel(), dtype=torch.float32, device=x.device)
    for part, blocks in _affine_pieces(x.numel(), block):
        rows = _affine_rows(x[part], block)
        low, high = extremes[0, blocks], extremes[1, blocks]
        low.copy_(torch.minimum(low, rows.amin(1)))
        high.copy_(torch.maximum(high, rows.amax(1)))
    count = torch.full_like(scales, AFFINE_LEVELS)
    scales.copy_(extremes[1] / count - extremes[0] / count)  # high - low could overflow
    scales.masked_fill_(~torch.isfinite(scales), float("nan"))
    usable = torch.isfinite(scales) & (scales != 0)
    divisor = torch.where(usable, scales, 1.0)
    zero = torch.where(usable, (-extremes[0] / divisor).round_().clamp_(0, AFFINE_LEVELS), 0.0)
    zeros.copy_(zero)
    for part, blocks in _affine_pieces(x.numel(), block):
        q = (_affine_rows(x[part], block) / divisor[blocks, None]).round_().add_(zero[blocks, None])
        q = torch.where(usable[blocks, None], q.clamp_(0, AFFINE_LEVELS), 0.0)
        levels[part].copy_(q.view(-1)[: part.stop - part.start])


def _affine_values(scales: Tensor, zeros: Tensor, levels: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    for part, blocks in _affine_pieces(levels.numel(), block):
        rows = _affine_rows(levels[part].float(), block)
        values = rows.sub_(zeros[blocks, None]).mul_(scales[blocks, None])
        yield part, values.view(-1)[: part.stop - part.start]


def affine_accumulate(
    scales: Tensor, zeros: Tensor, levels: Tensor, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.quantise.affine_accumulate`."""
    for part, values in _affine_values(scales, zeros, levels, block):
        into[part].add_(values.mul_(alpha))


def affine_decode(scales: Tensor, zeros: Tensor, levels: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.affine_decode`."""
    for part, values in _affine_values(scales, zeros, levels, block):
        out[part].copy_(values)
