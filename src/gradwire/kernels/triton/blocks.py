# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""What kernels with a scale for each block share on GPUs: scales of rows, codes of tiles and back, and decoding.

Each function repeats the formulas of the references, one rounding an operation. Where a row cannot be used its products
are replaced before they become integers, since NaN has none. A block that fits into a tile is read once. A wider one is
reduced first, part by part, and read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.launch import Tiling, codes_meta, launch, tiling
from gradwire.kernels.triton.tiles import (
    code_tile,
    floor_int,
    is_finite,
    load_codes,
    load_tile,
    magnitude_bits,
    round_even,
    store_tile,
    tile_left,
    tile_start,
    uniform_at,
)


@triton.jit
def each(row):
    """A value of each row, for its elements."""
    return row[:, None, None]


@triton.jit
def row_sum(tile):
    """Add up each row of a tile."""
    return tl.sum(tl.sum(tile, 2), 1)


@triton.jit
def row_largest(x):
    """The largest magnitude of each row; NaN is largest."""
    return tl.max(tl.max(magnitude_bits(x), 2), 1).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale, LEVELS: tl.constexpr):
    """Return levels / scale, whether it can be used, and the scale to store."""
    inverse = tl.div_rn(tl.full(scale.shape, LEVELS, tl.float32), scale)
    usable = is_finite(inverse) & is_finite(scale)
    return inverse, usable, tl.where(usable | (is_finite(scale) == 0), scale, 0.0)


@triton.jit
def step_of(scale, LEVELS: tl.constexpr):
    """The distance of two levels."""
    return tl.div_rn(scale, tl.full(scale.shape, LEVELS, tl.float32))


@triton.jit
def block_int_levels(x, inverse, usable, counter, k0, k1, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """q in [-LEVELS, LEVELS], int32."""
    scaled = tl.where(each(usable), x * each(inverse), 0.0)
    if STOCHASTIC:
        q = floor_int(scaled + uniform_at(counter, k0, k1))
        q = tl.minimum(tl.maximum(q, -LEVELS), LEVELS)
        q = tl.where(each(usable), q, 0)
    else:
        q = round_even(scaled).to(tl.int32)
    return q


@triton.jit
def qsgd_codes(x, inverse, usable, counter, k0, k1, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Level and sign, int32."""
    scaled = tl.where(each(usable), tl.abs(x) * each(inverse), 0.0)
    # Nothing here is below zero, so cutting off is rounding down.
    level = tl.minimum((scaled + uniform_at(counter, k0, k1)).to(tl.int32), LEVELS)
    code = level | ((x < 0).to(tl.int32) << (BITS - 1))
    return tl.where(each(usable), code, 0)


@triton.jit
def negated_where(negative, value):
    """-value there. Triton's minus sign subtracts from zero, which makes 0 of what should be -0."""
    return tl.where(negative, value * -1.0, value)


@triton.jit
def qsgd_values(codes, step, BITS: tl.constexpr):
    """What codes stand for."""
    value = (codes & ((1 << (BITS - 1)) - 1)).to(tl.float32) * each(step)
    return negated_where((codes >> (BITS - 1)) != 0, value)


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


def given_largest(x: Tensor, tiles: Tiling) -> Tensor | None:
    """Each block's largest magnitude, where a program cannot see it all."""
    if tiles.parts == 1:
        return None
    parts = torch.empty(tiles.programs, dtype=torch.int32, device=x.device)
    launch(_part_largest, tiles.programs, x.device, x, parts, x.numel(), **tiles.meta)
    return parts.view(tiles.blocks, tiles.parts).amax(1).view(torch.float32)


def given_sum(x: Tensor, tiles: Tiling, squares: bool) -> Tensor | None:
    """Each block's sum of magnitudes or of squares in float64, where a program cannot see it all."""
    if tiles.parts == 1:
        return None
    parts = torch.empty(tiles.programs, dtype=torch.float64, device=x.device)
    launch(_part_sum, tiles.programs, x.device, x, parts, x.numel(), SQUARES=squares, **tiles.meta)
    return parts.view(tiles.blocks, tiles.parts).sum(1)


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


def decode_blocks(
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
