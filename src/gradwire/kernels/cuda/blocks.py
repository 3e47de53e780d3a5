# pyright: basic, reportGeneralTypeIssues=false
"""Codecs with a scale for each block: encode, decode and accumulate, each in one pass over memory.

A block that fits into a tile is read once. A wider one is reduced first, part by part, and read again.

With `keep` an encoder also leaves in `x` what the payload does not say, x - decode(payload): the residual of error
feedback, for the price of a write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.launch import Tiling, codes_meta, launch, signed, tiling
from gradwire.kernels.cuda.rounding import (
    block_int_levels,
    each,
    inverse_of,
    negated_where,
    qsgd_codes,
    qsgd_values,
    row_largest,
    row_sum,
    step_of,
)
from gradwire.kernels.cuda.tiles import (
    code_tile,
    load_codes,
    load_tile,
    magnitude_bits,
    store_codes,
    store_tile,
    tile_left,
    tile_start,
    word,
)
from gradwire.kernels.reference import uniform_words

# Blocks wider than a tile -----------------------------------------------------------------------------------


@triton.jit
def _part_largest(x, out, numel, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    start = tile_start(BLOCK, WIDTH, ROWS, PARTS)
    left = tile_left(start, numel, BLOCK, WIDTH, ROWS, PARTS)
    local = tl.arange(0, WIDTH)
    tile = load_tile(x + start, local, local < left, left >= WIDTH)
    tl.store(out + tl.program_id(0), tl.max(magnitude_bits(tile)))


@triton.jit
def _part_sum(
    x,
    out,
    numel,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start = tile_start(BLOCK, WIDTH, ROWS, PARTS)
    left = tile_left(start, numel, BLOCK, WIDTH, ROWS, PARTS)
    local = tl.arange(0, WIDTH)
    tile = tl.abs(load_tile(x + start, local, local < left, left >= WIDTH)).to(tl.float64)
    if SQUARES:
        tile = tile * tile
    tl.store(out + tl.program_id(0), tl.sum(tile))


def _given_largest(x: Tensor, tiles: Tiling) -> Tensor | None:
    """Each block's largest magnitude, where a program cannot see it all."""
    if tiles.parts == 1:
        return None
    parts = torch.empty(tiles.programs, dtype=torch.int32, device=x.device)
    launch(_part_largest, tiles.programs, x.device, x, parts, x.numel(), **tiles.meta)
    return parts.view(tiles.blocks, tiles.parts).amax(1).view(torch.float32)


def _given_sum(x: Tensor, tiles: Tiling, squares: bool) -> Tensor | None:
    """Each block's sum of magnitudes or of squares in float64, where a program cannot see it all."""
    if tiles.parts == 1:
        return None
    parts = torch.empty(tiles.programs, dtype=torch.float64, device=x.device)
    launch(_part_sum, tiles.programs, x.device, x, parts, x.numel(), SQUARES=squares, **tiles.meta)
    return parts.view(tiles.blocks, tiles.parts).sum(1)


# block_int --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["k0", "k1"])
def _block_int_encode(
    x,
    packed,
    scales,
    given,
    numel,
    blocks,
    k0,
    k1,
    LEVELS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KEEP: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start, left, full, group, inside, local, valid, block = code_tile(numel, BLOCK, WIDTH, ROWS, PARTS)

    tile = load_tile(x + start, local, valid, full)
    if PARTS == 1:
        largest = row_largest(tile)
    else:
        largest = tl.load(given + block)
    inverse, usable, stored = inverse_of(largest, LEVELS)
    counter = start.to(tl.uint32) + local.to(tl.uint32)
    q = block_int_levels(tile, inverse, usable, counter, word(k0), word(k1), LEVELS, STOCHASTIC)
    codes = tl.where(valid, q + LEVELS, 0)
    store_codes(packed + start // 8 * BITS, group, codes, left, inside, full, BITS, BYTES)
    tl.store(scales + block, stored, mask=(block < blocks) & (tl.program_id(0) % PARTS == 0))
    if KEEP:
        store_tile(x + start, local, tile - q.to(tl.float32) * each(step_of(stored, LEVELS)), valid, full)


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    """See `gradwire.kernels.block_int_encode`."""
    tiles = tiling(x.numel(), block)
    given = _given_largest(x, tiles)
    words = (0, 0) if key is None else signed(uniform_words(key))
    launch(
        _block_int_encode,
        tiles.programs,
        x.device,
        *(x, packed, scales, scales if given is None else given, x.numel(), tiles.blocks, *words),
        LEVELS=2 ** (bits - 1) - 1,
        STOCHASTIC=key is not None,
        KEEP=keep,
        **codes_meta(bits),
        **tiles.meta,
    )


# sign -------------------------------------------------------------------------------------------------------


@triton.jit
def _sign_encode(
    x,
    packed,
    scales,
    given,
    numel,
    blocks,
    KEEP: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start, left, full, group, inside, local, valid, block = code_tile(numel, BLOCK, WIDTH, ROWS, PARTS)

    tile = load_tile(x + start, local, valid, full)
    if PARTS == 1:
        total = row_sum(tl.abs(tile).to(tl.float64))
    else:
        total = tl.load(given + block)
    count = tl.maximum(tl.minimum(numel - block.to(tl.int64) * BLOCK, BLOCK), 1)
    scale = (total / count.to(tl.float64)).to(tl.float32)
    codes = ((tile >= 0) & valid).to(tl.int32)
    store_codes(packed + start // 8, group, codes, left, inside, full, BITS, BYTES)
    tl.store(scales + block, scale, mask=(block < blocks) & (tl.program_id(0) % PARTS == 0))
    if KEEP:
        store_tile(x + start, local, tile - negated_where(codes == 0, each(scale)), valid, full)


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    """See `gradwire.kernels.sign_encode`."""
    tiles = tiling(x.numel(), block)
    given = _given_sum(x, tiles, squares=False)
    launch(
        _sign_encode,
        tiles.programs,
        x.device,
        *(x, packed, scales, scales if given is None else given, x.numel(), tiles.blocks),
        KEEP=keep,
        **codes_meta(1),
        **tiles.meta,
    )


# qsgd -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["k0", "k1"])
def _qsgd_encode(
    x,
    packed,
    norms,
    given,
    numel,
    blocks,
    k0,
    k1,
    LEVELS: tl.constexpr,
    KEEP: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start, left, full, group, inside, local, valid, block = code_tile(numel, BLOCK, WIDTH, ROWS, PARTS)

    tile = load_tile(x + start, local, valid, full)
    if PARTS == 1:
        wide = tile.to(tl.float64)
        squares = row_sum(wide * wide)
    else:
        squares = tl.load(given + block)
    inverse, usable, stored = inverse_of(tl.sqrt(squares).to(tl.float32), LEVELS)
    counter = start.to(tl.uint32) + local.to(tl.uint32)
    codes = qsgd_codes(tile, inverse, usable, counter, word(k0), word(k1), LEVELS, BITS)
    codes = tl.where(valid, codes, 0)
    store_codes(packed + start // 8 * BITS, group, codes, left, inside, full, BITS, BYTES)
    tl.store(norms + block, stored, mask=(block < blocks) & (tl.program_id(0) % PARTS == 0))
    if KEEP:
        store_tile(x + start, local, tile - qsgd_values(codes, step_of(stored, LEVELS), BITS), valid, full)


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    """See `gradwire.kernels.qsgd_encode`."""
    tiles = tiling(x.numel(), block)
    given = _given_sum(x, tiles, squares=True)
    launch(
        _qsgd_encode,
        tiles.programs,
        x.device,
        *(x, packed, norms, norms if given is None else given),
        *(x.numel(), tiles.blocks, *signed(uniform_words(key))),
        LEVELS=levels,
        KEEP=keep,
        **codes_meta(levels.bit_length() + 1),
        **tiles.meta,
    )


# Decoding ---------------------------------------------------------------------------------------------------


INTEGER, SIGN, NORM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a code stands for: an integer times a step, a sign of a scale, a level of a norm."""


@triton.jit
def _decode(
    packed,
    scales,
    into,
    numel,
    blocks,
    alpha,
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    OVERWRITE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start, _left, full, group, _inside, local, valid, block = code_tile(numel, BLOCK, WIDTH, ROWS, PARTS)
    scale = tl.load(scales + block, mask=block < blocks, other=0.0)
    codes = load_codes(packed + start // 8 * BITS, group, valid, full, BITS, SPAN)
    if KIND == SIGN:
        value = negated_where(codes == 0, each(scale))
    elif KIND == NORM:
        value = qsgd_values(codes, step_of(scale, LEVELS), BITS)
    else:
        value = (codes.to(tl.float32) - LEVELS) * each(step_of(scale, LEVELS))
    if OVERWRITE == 0:
        value = load_tile(into + start, local, valid, full) + value * alpha
    store_tile(into + start, local, value, valid, full)


def _start_decode(
    kind: tl.constexpr,
    packed: Tensor,
    scales: Tensor,
    bits: int,
    levels: int,
    block: int,
    into: Tensor,
    alpha: float | None,
) -> None:
    """Start a decoder; overwrite where alpha is None."""
    tiles = tiling(into.numel(), block)
    launch(
        _decode,
        tiles.programs,
        into.device,
        *(packed, scales, into, into.numel(), tiles.blocks, float(alpha or 0.0)),
        KIND=kind.value,
        LEVELS=levels,
        OVERWRITE=alpha is None,
        **codes_meta(bits),
        **tiles.meta,
    )


def block_int_accumulate(
    packed: Tensor, scales: Tensor, bits: int, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.block_int_accumulate`."""
    _start_decode(INTEGER, packed, scales, bits, 2 ** (bits - 1) - 1, block, into, alpha)


def block_int_decode(packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.block_int_decode`."""
    _start_decode(INTEGER, packed, scales, bits, 2 ** (bits - 1) - 1, block, out, None)


def sign_accumulate(packed: Tensor, scales: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.sign_accumulate`."""
    _start_decode(SIGN, packed, scales, 1, 1, block, into, alpha)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.sign_decode`."""
    _start_decode(SIGN, packed, scales, 1, 1, block, out, None)


def qsgd_accumulate(packed: Tensor, norms: Tensor, levels: int, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.qsgd_accumulate`."""
    _start_decode(NORM, packed, norms, levels.bit_length() + 1, levels, block, into, alpha)


def qsgd_decode(packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.qsgd_decode`."""
    _start_decode(NORM, packed, norms, levels.bit_length() + 1, levels, block, out, None)
