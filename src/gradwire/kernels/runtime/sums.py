# pyright: basic
"""Products and sums spelled in LLVM's vectors, and the one sum whose order of additions is the same everywhere.

numba keeps the sums of a loop in memory: with the sums in registers M Q takes a sixth of the time. A processor with
narrower vectors takes several for one, and rounds alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array

from gradwire.kernels.runtime.torch_blocks import LANES
from gradwire.kernels.runtime.vectors import vector_intrinsic

FLOATS, DOUBLES = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.DoubleType(), LANES)
INDEX = ir.IntType(64)


def element_at(context: Any, builder: Any, kind: Any, array: Any, *offsets: Any) -> Any:
    """A pointer to the element of a 1-d array at the sum of some offsets."""
    return builder.gep(make_array(kind)(context, builder, array).data, [functools.reduce(builder.add, offsets)])


def load_vector(builder: Any, pointer: Any, vector: Any = FLOATS) -> Any:
    """Load a vector that need be aligned to its elements only."""
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)


def store_vector(builder: Any, value: Any, pointer: Any) -> None:
    """Store a vector where it need be aligned to its elements only."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def index_constant(value: int) -> Any:
    """A constant for indexing."""
    return ir.Constant(INDEX, value)


def zero_sums(builder: Any, count: int, vector: Any = FLOATS) -> list[Any]:
    """Sums of zero, which LLVM keeps in registers."""
    made = [cgutils.alloca_once(builder, vector) for _ in range(count)]
    for sum_ in made:
        builder.store(ir.Constant(vector, None), sum_)
    return made


FUSED = ("contract",)
"""Flags of operations that a processor may fuse: only in what a rank computes before it sends, where it halves them."""


def add_product(builder: Any, sum_: Any, a: Any, b: Any, flags: tuple[str, ...] = ()) -> None:
    """Add a * b to a sum of `zero_sums`."""
    builder.store(builder.fadd(builder.load(sum_), builder.fmul(a, b, flags=flags), flags=flags), sum_)


def folded_sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes: the upper half is added to the lower until one is left."""
    word = ir.IntType(32)
    while (half := vector.type.count // 2) > 0:
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(word, half), list(range(at, at + half))))
            for at in (0, half)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(word, 0))


def segment_sum(lanes_type: Any, factors: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Any:
    """A function f(a, i, b, j, n): the sum over the segments a[i : i + n] and b[j : j + n] of products in float64.

    Lanes in turn, then halves: `torch_blocks.add_segments` has the same order. n is a
    multiple of LANES and at most SEGMENT: what would follow in a short segment is zeros.

    Args:
        lanes_type: the vector to load from both.
        factors: makes the two factors, vectors of float64, of what was loaded: called with LLVM's builder.
    """

    @vector_intrinsic
    def sum_(context, a, i, b, j, n):
        def generate(context, builder, signature, args):
            A, i, B, j, n = args
            (lanes,) = zero_sums(builder, 1, DOUBLES)
            with cgutils.for_range_slice(builder, index_constant(0), n, index_constant(LANES), INDEX) as (c, _):
                x = load_vector(builder, element_at(context, builder, a, A, i, c), lanes_type)
                y = load_vector(builder, element_at(context, builder, b, B, j, c), lanes_type)
                add_product(builder, lanes, *factors(builder, x, y))
            return folded_sum(builder, builder.load(lanes))

        return types.float64(a, types.intp, b, types.intp, types.intp), generate

    return sum_
