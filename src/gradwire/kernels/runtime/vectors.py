# pyright: basic
"""Operations on vectors that numba has no words for, spelled in LLVM's own: masks, words, stores past the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

# A comparison of a vector gives a bit a lane, which is how bits lie in a packed byte. Loops that say so are not
# recognised, so these are spelled in LLVM's vectors: instructions of their own where a processor has masks, and
# lowered to others everywhere else. Places are not checked: there must be as many elements as lanes.
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
    word = {8: types.uint8, 16: types.uint16, 64: types.uint64}[lanes]

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
at_least_16 = _mask(16, _magnitude_is_at_least)
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
    """Eight bytes as a word, the first the lowest."""

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
def store_16_past_caches(context, out, start, values, first):
    """out[start + i] = values[first + i] for the line of 64 bytes from out[start], which is not read first."""

    def generate(context, builder, signature, args):
        line = builder.load(_lanes_at(context, builder, values, args[2], args[3], 16), align=4)
        store = builder.store(line, _lanes_at(context, builder, out, args[0], args[1], 16), align=64)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(out, types.uintp, values, types.uintp), generate


@vector_intrinsic
def prefetch(context, array, i):
    """Ask for the line of array[i], which need not exist."""

    def generate(context, builder, signature, args):
        at = builder.gep(make_array(array)(context, builder, args[0]).data, [args[1]])
        at = builder.bitcast(at, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [at, ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1)])
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


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


@vector_intrinsic
def use_widest_vectors(context):
    """Let this function's loops use the widest vectors there are: LLVM takes half of what AVX-512 has."""

    def generate(context, builder, signature, args):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


@vector_intrinsic
def fence(context):
    """What was stored past the caches is seen by whoever is told afterwards."""

    def generate(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def target_has(feature: str) -> bool:
    """Whether numba compiles for processors with `feature`: NUMBA_CPU_FEATURES says, or else this processor does."""
    chosen: str | None = numba.core.config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(binding.get_host_cpu_features().get(feature))


COMPRESSES = target_has("avx512f")
"""Whether one instruction closes up what a mask chooses of a vector. Elsewhere that is a branch for each element."""


def _close_up(context: _Values, builder: _Values, vector: _Values, mask: _Values, out: _Values) -> None:
    """Write the lanes that `mask` chooses at the pointer `out`, side by side; the rest of a vector there is lost."""
    kind = ir.FunctionType(vector.type, [vector.type, ir.VectorType(ir.IntType(1), 16), vector.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.experimental.vector.compress.v16i32")
    bits = builder.bitcast(mask, ir.VectorType(ir.IntType(1), 16))
    closed = builder.call(function, [vector, bits, ir.Constant(vector.type, ir.Undefined)])
    builder.store(closed, out, align=4)


@vector_intrinsic
def close_up_16(context, source, start, mask, out, at):
    """Write what `mask` chooses of source[start : start + 16] from out[at] on, and something up to out[at + 15]."""

    def generate(context, builder, signature, args):
        vector = builder.load(_lanes_at(context, builder, source, args[0], args[1], 16), align=4)
        _close_up(context, builder, vector, args[2], _lanes_at(context, builder, out, args[3], args[4], 16))
        return context.get_dummy_value()

    return types.void(source, types.uintp, types.uint16, out, types.uintp), generate


@vector_intrinsic
def close_up_places_16(context, first, mask, out, at):
    """As `close_up_16`, of the numbers from `first` on."""

    def generate(context, builder, signature, args):
        words = ir.VectorType(ir.IntType(32), 16)
        vector = builder.add(in_every_lane(builder, args[0], 16), ir.Constant(words, list(range(16))))
        _close_up(context, builder, vector, args[1], _lanes_at(context, builder, out, args[2], args[3], 16))
        return context.get_dummy_value()

    return types.void(types.int32, types.uint16, out, types.uintp), generate
