# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""What the kernels are made of: random bits, rounding, tiles of elements, and codes packed eight at a time.

A tile has shape (ROWS, WIDTH / 8, 8): a row, a group of eight codes, which begins at a byte, and a lane. The eight
lanes lie in one or two threads, so packing needs no memory between threads. Where a tile is full it is read and written
without masks, which makes accesses of 16 bytes whatever the number of elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Mix the bits of a uint32 by lowbias32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def word(x):
    """An int32 scalar argument as the uint32 it stands for."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def uniform_at(counter, k0, k1):
    """`uniform` at uint32 places."""
    return (mix(mix(counter ^ k0) ^ k1) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even, for |x| < 2^22: beyond 1.5 * 2^23 floats have no fraction left."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def floor_int(x):
    """The integer below, of |x| < 2^31. `tl.floor` takes subnormal numbers for zero, and -1e-40 lies above -1."""
    truncated = x.to(tl.int32)
    return truncated - (truncated.to(tl.float32) > x).to(tl.int32)


@triton.jit
def magnitude_bits(x):
    """|x| as int32, which orders as |x| does with NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_finite(x):
    """Neither NaN nor infinite, of float32."""
    return magnitude_bits(x) < 0x7F800000


@triton.jit
def tile_start(BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The tile's first element, int64."""
    pid = tl.program_id(0)
    return (pid // PARTS).to(tl.int64) * (ROWS * BLOCK) + (pid % PARTS) * WIDTH


@triton.jit
def tile_left(start, numel, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """How many elements from the start are the tile's, if its rows were not padded."""
    left = tl.minimum(numel - start, ROWS * BLOCK).to(tl.int32)
    if PARTS > 1:
        left = tl.minimum(left, BLOCK - (tl.program_id(0) % PARTS) * WIDTH)
    return left


@triton.jit
def tile_group(BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Which group of eight from the start each is: (ROWS, WIDTH / 8, 1)."""
    row = tl.arange(0, ROWS)[:, None, None]
    return row * (BLOCK // 8) + tl.arange(0, WIDTH // 8)[None, :, None]


@triton.jit
def tile_inside(BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Which groups of a row are of its block and no padding: (1, WIDTH / 8, 1)."""
    return tl.arange(0, WIDTH // 8)[None, :, None] * 8 < BLOCK


@triton.jit
def code_tile(numel, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Where a tile of codes lies.

    Its first element, how many elements from there are its own, and whether that is all; its groups of eight and which
    of them are no padding; its elements and which of them exist; and the block of each row.
    """
    start = tile_start(BLOCK, WIDTH, ROWS, PARTS)
    left = tile_left(start, numel, BLOCK, WIDTH, ROWS, PARTS)
    group, inside = tile_group(BLOCK, WIDTH, ROWS), tile_inside(BLOCK, WIDTH)
    local = group * 8 + tl.arange(0, 8)[None, None, :]
    valid = inside & (local < left)
    block = (tl.program_id(0) // PARTS) * ROWS + tl.arange(0, ROWS)
    return start, left, left >= ROWS * WIDTH, group, inside, local, valid, block


@triton.jit
def load_tile(pointer, at, valid, full):
    """Elements, zero where not valid."""
    if full:
        x = tl.load(pointer + at)
    else:
        x = tl.load(pointer + at, mask=valid, other=0)
    return x


@triton.jit
def store_tile(pointer, at, x, valid, full):
    """Write elements where valid."""
    if full:
        tl.store(pointer + at, x)
    else:
        tl.store(pointer + at, x, mask=valid)


@triton.jit
def _joined(codes, places, BITS: tl.constexpr):
    """The codes of a group side by side in one word."""
    if BITS <= 4:
        joined = tl.sum(codes << (places * BITS), axis=2)
    else:
        joined = tl.sum(codes.to(tl.uint64) << (places * BITS).to(tl.uint64), axis=2)
    return joined


@triton.jit
def store_codes(packed, group, codes, left, inside, full, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Pack a tile of int32 codes, which are zero where not valid."""
    lane = tl.arange(0, 8)[None, None, :]
    j = tl.arange(0, BYTES)[None, None, :]
    unsigned = codes.to(tl.uint32)
    if BITS <= 8:
        joined = _joined(unsigned, lane.to(tl.uint32), BITS)[:, :, None]
        byte = (joined >> (8 * j).to(joined.dtype)).to(tl.uint8)
    else:
        # Two halves of four codes; the upper one fills the lower word and goes on in a second.
        lower = _joined(tl.where(lane < 4, unsigned, 0), lane.to(tl.uint32) & 3, BITS)[:, :, None]
        upper = _joined(tl.where(lane < 4, 0, unsigned), lane.to(tl.uint32) & 3, BITS)[:, :, None]
        if BITS < 16:
            first = lower | (upper << (4 * BITS))
            second = upper >> (64 - 4 * BITS)
        else:
            first = lower
            second = upper
        shift = (8 * (j & 7)).to(tl.uint64)
        byte = tl.where(j < 8, first >> shift, second >> shift).to(tl.uint8)
    at = group * BITS + j
    valid = inside & (j < BITS) & (at < (left * BITS + 7) // 8)
    if BITS == BYTES:
        store_tile(packed, at, byte, valid, full)
    else:
        tl.store(packed + at, byte, mask=valid)


@triton.jit
def load_codes(packed, group, valid, full, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Unpack a tile of int32 codes; those not valid are zero."""
    bit = tl.arange(0, 8)[None, None, :] * BITS
    at, shift = group * BITS + (bit >> 3), bit & 7
    codes = load_tile(packed, at, valid, full).to(tl.int32) >> shift
    for more in tl.static_range(1, SPAN):
        # Only where the code reaches so far: the byte behind the last code may be nobody's.
        reaches = shift + BITS > 8 * more
        byte = tl.load(packed + at + more, mask=valid & reaches, other=0).to(tl.int32)
        codes |= (byte << 8 * more) >> shift
    return codes & ((1 << BITS) - 1)
