# pyright: basic
"""Operations on vectors that numba has no words for, spelled in LLVM's own: masks and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

# A comparison of a vector gives a bit a lane, which is how bits lie in a packed byte. Loops that say so are not
# recognised, so these are spelled in LLVM's vectors: instructions of their own where a processor has masks, and
# lowered to others everywhere else. Places are not checked: there must be as many elements as lanes. With loops over
# elements instead a step of `sign` codes for 1.5 times as long.
_Values = Any  # of llvmlite, which has no types


def in_every_lane(builder: _Values, value: _Values, lanes: int) -> _Values:
    """`value` in every lane."""
    whole = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(whole, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(whole, ir.Undefined), order)


def vector_intrinsic(make: Callable[..., Any]) -> Any:
    """Numba's `intrinsic`, as what callers see: the first argument is not theirs to give."""
    return intrinsic(make)


def _lanes_at(context: _Values, builder: _Values, kind: _Values, array: _Values, start: _Values, lanes: int) -> _Values:
    """A pointer to the vector of `lanes` elements from `start`."""
    vector = ir.VectorType(context.get_value_type(kind.dtype), lanes)
    at = builder.gep(make_array(kind)(context, builder, array).data, [start])
    return builder.bitcast(at, vector.as_pointer())


def _mask(lanes: int, compare: Callable[..., _Values]) -> Any:
    """A function f(array, start, bound): bit i is compare(array[start + i], bound)."""
    word = {8: types.uint8, 64: types.uint64}[lanes]

    @vector_intrinsic
    def mask(context, array, start, bound):
        def generate(context, builder, signature, args):
            vector = builder.load(_lanes_at(context, builder, array, args[0], args[1], lanes), align=4)
            bits = compare(builder, vector, in_every_lane(builder, args[2], lanes))
            return builder.bitcast(bits, ir.IntType(lanes))

        return word(array, types.uintp, array.dtype), generate

    return mask


def _magnitude_is_at_least(builder: _Values, vector: _Values, least: _Values) -> _Values:
    magnitude = builder.and_(vector, ir.Constant(vector.type, [0x7FFFFFFF] * vector.type.count))
    return builder.icmp_unsigned(">=", magnitude, least)


at_least_8 = _mask(8, lambda builder, vector, least: builder.fcmp_ordered(">=", vector, least))
at_least_64 = _mask(64, _magnitude_is_at_least)
below_8 = _mask(8, lambda builder, vector, bound: builder.icmp_signed("<", vector, bound))


@vector_intrinsic
def choose_8(context, out, start, bits, up, down):
    """out[start + i] = up where bit i is 1, else down."""

    def generate(context, builder, signature, args):
        mask = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 8))
        chosen = builder.select(mask, in_every_lane(builder, args[3], 8), in_every_lane(builder, args[4], 8))
        builder.store(chosen, _lanes_at(context, builder, out, args[0], args[1], 8), align=4)
        return context.get_dummy_value()

    return types.void(out, types.uintp, types.uint8, out.dtype, out.dtype), generate


def _word_at_byte(context: _Values, builder: _Values, kind: _Values, array: _Values, at: _Values) -> _Values:
    """A pointer to the eight bytes from byte `at`, which need not be aligned."""
    first = builder.gep(make_array(kind)(context, builder, array).data, [at])
    return builder.bitcast(first, ir.IntType(64).as_pointer())


@vector_intrinsic
def load_word(context, packed, at):
    """Eight bytes as a word, the first the lowest. Byte by byte, a step of `int4` codes a fifth longer."""

    def generate(context, builder, signature, args):
        return builder.load(_word_at_byte(context, builder, packed, *args), align=1)

    return types.uint64(packed, types.uintp), generate


@vector_intrinsic
def store_word(context, packed, at, word):
    """Write eight bytes, the lowest first."""

    def generate(context, builder, signature, args):
        builder.store(args[2], _word_at_byte(context, builder, packed, *args[:2]), align=1)
        return context.get_dummy_value()

    return types.void(packed, types.uintp, types.uint64), generate


@vector_intrinsic
def count_ones(context, word):
    """How many bits are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@vector_intrinsic
def trailing_zeros(context, word):
    """The place of the lowest set bit of a word that is not zero: one instruction."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@vector_intrinsic
def bits_of(context, value):
    """The bits of a float32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@vector_intrinsic
def float_of(context, bits):
    """The float32 of these bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )
