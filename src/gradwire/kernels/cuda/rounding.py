# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""How block codecs round: scales of rows, codes of tiles and back. Used by every kernel that encodes or decodes.

Each function repeats the formulas of `gradwire.kernels.reference`, one rounding an operation. Where a row cannot be
used its products are replaced before they become integers, since NaN has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.cuda.tiles import floor_int, is_finite, magnitude_bits, round_even, uniform_at


@triton.jit
def each(row):
    """A value of each row, for its elements."""
    return row[:, None, None]


@triton.jit
def row_sum(tile):
    """Sums of rows."""
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
