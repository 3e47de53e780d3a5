"""Every kernel in plain torch: what it means, on any device, `meta` included.

No shape depends on data and nothing is read back to the host. Formulas are spelled so that each float
operation is one correctly rounded float32 operation; kernels in other languages repeat them and agree bit for
bit. Divisors are tensors on purpose: torch divides by a Python number on CUDA as a multiplication by its
reciprocal.

`gradwire.kernels` documents and checks the arguments.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

MASK32 = 0xFFFFFFFF
CANONICAL_NAN = 0x7F800001
"""All NaNs rank alike, above infinity, when magnitudes are compared as integers."""

PERMUTATION_ROUNDS = 6


# Random bits ------------------------------------------------------------------------------------------------


def key_words(bits: int, count: int) -> list[int]:
    """Return `count` 32-bit words from splitmix64 seeded with `bits`, the low half of each output first."""
    words: list[int] = []
    for j in range(1, -(-count // 2) + 1):
        z = (bits + j * 0x9E3779B97F4A7C15) % (1 << 64)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
        z ^= z >> 31
        words += [z & MASK32, z >> 32]
    return words[:count]


def uniform_words(bits: int) -> list[int]:
    """The two words that key `uniform`."""
    return key_words(bits, 2)


def permutation_words(bits: int) -> list[int]:
    """The words that key the rounds of `permuted_indices`, none of them shared with `uniform`."""
    return key_words(bits, 2 + PERMUTATION_ROUNDS)[2:]


T = TypeVar("T", Tensor, int)


def mix(x: T) -> T:
    """lowbias32 of values in [0, 2^32): of an int64 tensor, or a number."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    # 0x846CA68B - 2^32: the same product modulo 2^32, without overflow of int64.
    x = (x * -0x7B935975) & MASK32
    return x ^ (x >> 16)


def uniform(bits: int, numel: int, device: torch.device, start: int = 0) -> Tensor:
    """24 bits of mix(mix(c ^ k0) ^ k1)."""
    k0, k1 = uniform_words(bits)
    counter = torch.arange(start, start + numel, device=device, dtype=torch.int64)
    return (mix(mix(counter ^ k0) ^ k1) >> 8).to(torch.float32) * 2.0**-24


def permutation_domain(numel: int) -> tuple[int, int, int]:
    """Return (a, b, walks) for permutations of range(numel).

    The grid a * b >= numel is as near as can be: at most a - 1 points are too many, a fraction 1/sqrt(numel).
    After `walks` steps of cycle walking a point is still outside with chance 2^-64, and never where the
    excess is as small.
    """
    a = math.isqrt(max(numel, 1) - 1) + 1
    b = max(1, -(-numel // a))
    excess = a * b - numel
    walks = -(-128 // max(1, numel.bit_length() - 1))
    return a, b, min(excess, walks)


def permuted_indices(bits: int, numel: int, k: int, device: torch.device) -> Tensor:
    """The first k values of a Feistel permutation."""
    a, b, walks = permutation_domain(numel)
    words = permutation_words(bits)
    x = _feistel(torch.arange(k, device=device, dtype=torch.int64), a, b, words)
    for _ in range(walks):
        x = torch.where(x < numel, x, _feistel(x, a, b, words))
    return torch.where(x < numel, x, x - numel).to(torch.int32)


def _feistel(x: Tensor, a: int, b: int, words: list[int]) -> Tensor:
    left, right = x // b, x % b
    for round_, word in enumerate(words):
        if round_ % 2 == 0:
            left = (left + ((mix(right ^ word) * a) >> 32)) % a
        else:
            right = (right + ((mix(left ^ word) * b) >> 32)) % b
    return left * b + right


def strata(bits: int, numel: int, k: int) -> tuple[int, int, int, int, int, int]:
    """Return what `stratified_indices` of k > 0 are made of: (size, longer, w0, w1, turn, first).

    There are `longer` strata of size + 1 and then some of `size`; `turn` is by how much the circle is turned; `first`
    is the first stratum whose index comes to lie behind the end, that is at the beginning.
    """
    w0, w1, *halves = key_words(bits, 2 + PERMUTATION_ROUNDS + 4)[2 + PERMUTATION_ROUNDS :]
    turn = ((halves[1] << 32 | halves[0]) * numel) >> 64
    size, longer = divmod(numel, k)
    end = numel - turn
    first = end // (size + 1) if end < longer * (size + 1) else longer + (end - longer * (size + 1)) // size
    if first < k:
        width = size + (first < longer)
        within = mix(mix(first ^ w0) ^ w1) * width >> 32
        first += int(first * size + min(first, longer) + within < end)
    return size, longer, w0, w1, turn, first


def stratified_indices(bits: int, numel: int, k: int, device: torch.device) -> Tensor:
    """One of each stratum, in increasing order."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    size, longer, w0, w1, turn, first = strata(bits, numel, k)
    stratum = torch.arange(first, first + k, device=device, dtype=torch.int64) % k
    within = mix(mix(stratum ^ w0) ^ w1) * (size + (stratum < longer)) >> 32
    return ((stratum * size + stratum.clamp(max=longer) + within + turn) % numel).to(torch.int32)


# Selection --------------------------------------------------------------------------------------------------


def all_finite(x: Tensor) -> Tensor:
    """Whether no element is NaN or infinite."""
    return torch.isfinite(x).all()


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as int32, which orders as |x| does with NaN on top."""
    return x.view(torch.int32) & 0x7FFFFFFF


def topk_indices(x: Tensor, k: int) -> Tensor:
    """The threshold from `torch.topk`, then a compaction whose output has k entries whatever the data."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    bits = magnitude_bits(x).clamp(max=CANONICAL_NAN)
    threshold = bits.topk(k, sorted=True).values[-1]
    above, equal = bits > threshold, bits == threshold
    quota = k - above.sum()
    keep = above | (equal & (equal.cumsum(0) <= quota))
    slot = torch.where(keep, keep.cumsum(0) - 1, k)
    indices = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    out = torch.empty(k + 1, dtype=torch.int32, device=x.device)
    return out.scatter_(0, slot, indices)[:k]


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `gradwire.kernels.topk`."""
    indices = topk_indices(x, k)
    found = x.index_select(0, indices)
    return indices, found if values is None else values.copy_(found)


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    """out = x[indices]."""
    torch.index_select(x.detach(), 0, indices, out=out)


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Those that are none add zero to the last element."""
    if out.numel():
        scatter_add_(out.zero_(), indices.clamp(max=out.numel() - 1), values)


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """into[indices] += alpha * values."""
    into.index_add_(0, indices, values.to(torch.float32) * alpha)


# Packing ----------------------------------------------------------------------------------------------------


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Lay the bits of all codes in one row, then cut it into bytes."""
    lanes = torch.arange(bits, device=codes.device, dtype=torch.int32)
    stream = ((codes.to(torch.int32)[:, None] >> lanes) & 1).reshape(-1)
    stream = pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    out.copy_((stream << torch.arange(8, device=codes.device, dtype=torch.int32)).sum(1))


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Lay the bits of all bytes in one row, then cut it into codes."""
    lanes = torch.arange(8, device=packed.device, dtype=torch.int32)
    stream = ((packed.to(torch.int32)[:, None] >> lanes) & 1).reshape(-1)[: numel * bits].view(numel, bits)
    codes = (stream << torch.arange(bits, device=packed.device, dtype=torch.int32)).sum(1)
    return codes.to(torch.uint8 if bits <= 8 else torch.int32)


# Blocks -----------------------------------------------------------------------------------------------------


def _blocks(x: Tensor, block: int) -> Tensor:
    return pad(x, (0, -x.numel() % block)).view(-1, block)


def _each(scales: Tensor, block: int, numel: int) -> Tensor:
    return scales.repeat_interleave(block, output_size=scales.numel() * block)[:numel]


def _block_numels(x: Tensor, scales: Tensor, block: int) -> Tensor:
    """How many elements each block has, in float64: the last may be short."""
    numels = torch.full_like(scales, block, dtype=torch.float64)
    numels[-1:] = x.numel() - (scales.numel() - 1) * block
    return numels


def _inverse(scale: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels / scale, whether it can be used, and the scale to store.

    A block of zeros, or so near to it that the inverse overflows, is stored as zero. A scale that is not
    finite is kept, so that its block decodes to NaN and whoever looks for overflow finds it.
    """
    inverse = torch.full_like(scale, levels) / scale
    usable = torch.isfinite(inverse) & torch.isfinite(scale)
    return inverse, usable, torch.where(usable | ~torch.isfinite(scale), scale, 0.0)


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    """See `gradwire.kernels.block_int_encode`."""
    levels = 2 ** (bits - 1) - 1
    largest = _blocks(magnitude_bits(x), block).amax(1).view(torch.float32)
    inverse, usable, stored = _inverse(largest, levels)
    scaled = x * _each(inverse, block, x.numel())
    if key is None:
        q = scaled.round()
    else:
        q = (scaled + uniform(key, x.numel(), x.device)).floor().clamp(-levels, levels)
    q = torch.where(_each(usable, block, x.numel()), q, 0.0)
    pack_bits((q + levels).to(torch.int32), bits, packed)
    scales.copy_(stored)
    if keep:
        block_int_accumulate(packed, scales, bits, block, x, -1.0)


def _block_int_values(packed: Tensor, scales: Tensor, bits: int, block: int, numel: int) -> Tensor:
    levels = 2 ** (bits - 1) - 1
    step = scales / torch.full_like(scales, levels)
    q = unpack_bits(packed, bits, numel).to(torch.float32) - levels
    return q * _each(step, block, numel)


def block_int_accumulate(
    packed: Tensor, scales: Tensor, bits: int, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.block_int_accumulate`."""
    into.add_(_block_int_values(packed, scales, bits, block, into.numel()) * alpha)


def block_int_decode(packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.block_int_decode`."""
    out.copy_(_block_int_values(packed, scales, bits, block, out.numel()))


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    """See `gradwire.kernels.sign_encode`."""
    total = _blocks(x, block).abs().sum(1, dtype=torch.float64)
    scales.copy_(total / _block_numels(x, scales, block))
    pack_bits(x >= 0, 1, packed)
    if keep:
        sign_accumulate(packed, scales, block, x, -1.0)


def _sign_values(packed: Tensor, scales: Tensor, block: int, numel: int) -> Tensor:
    each = _each(scales, block, numel)
    return torch.where(unpack_bits(packed, 1, numel) != 0, each, -each)


def sign_accumulate(packed: Tensor, scales: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.sign_accumulate`."""
    into.add_(_sign_values(packed, scales, block, into.numel()) * alpha)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.sign_decode`."""
    out.copy_(_sign_values(packed, scales, block, out.numel()))


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    """See `gradwire.kernels.qsgd_encode`."""
    squares = _blocks(x, block).to(torch.float64).square().sum(1)
    inverse, usable, stored = _inverse(squares.sqrt().to(torch.float32), levels)
    scaled = x.abs() * _each(inverse, block, x.numel())
    level = (scaled + uniform(key, x.numel(), x.device)).floor().clamp(max=levels)
    usable = _each(usable, block, x.numel())
    level = torch.where(usable, level, 0.0).to(torch.int32)
    negative = (usable & (x < 0)).to(torch.int32)
    pack_bits(level | (negative << levels.bit_length()), levels.bit_length() + 1, packed)
    norms.copy_(stored)
    if keep:
        qsgd_accumulate(packed, norms, levels, block, x, -1.0)


def _qsgd_values(packed: Tensor, norms: Tensor, levels: int, block: int, numel: int) -> Tensor:
    level_bits = levels.bit_length()
    code = unpack_bits(packed, level_bits + 1, numel).to(torch.int32)
    step = norms / torch.full_like(norms, levels)
    value = (code & ((1 << level_bits) - 1)).to(torch.float32) * _each(step, block, numel)
    return torch.where(code >> level_bits != 0, -value, value)


def qsgd_accumulate(packed: Tensor, norms: Tensor, levels: int, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.qsgd_accumulate`."""
    into.add_(_qsgd_values(packed, norms, levels, block, into.numel()) * alpha)


def qsgd_decode(packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.qsgd_decode`."""
    out.copy_(_qsgd_values(packed, norms, levels, block, out.numel()))
