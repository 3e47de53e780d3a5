# pyright: basic
"""The kernels for CPUs, in numba: serial, without the GIL, spread over our own threads by `pool`.

Inner loops are written to be vectorised, and in float32 without reassociation or contraction, so that they
agree bit for bit with `reference`; only sums may differ, and are taken in float64 for it. Codes pass through
a scratch of one tile, which stays in the nearest cache, and are packed from there eight at a time.

numba promotes uint32 arithmetic to 64 bits: each step is cast back, and LLVM narrows it again. Counters derived from
loop indices stay 64-bit and do not vectorise, so random loops keep their own uint32 counter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from torch import Tensor

from gradwire.kernels import pool, team
from gradwire.kernels.reference import (
    CANONICAL_NAN,
    permutation_domain,
    permutation_words,
    strata,
    uniform_words,
)

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

# NaN and infinity in, NaN and infinity out, where Python would raise on 1 / 0.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_inline: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(forceinline=True, **_OPTIONS)
# Sums only: their order is free, and float64 hides it.
_sum: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(fastmath={"reassoc", "nsz"}, **_OPTIONS)


@functools.cache
def _sources() -> str:
    """A digest of the modules that kernels are made of."""
    files = sorted(pathlib.Path(__file__).parent.glob("cpu*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


class _Kernel:
    """A compiled function of one signature, kept on disk under a name that changes with the sources.

    numba itself looks at the file a function stands in, and kernels take in functions of other files.

    numba writes its index of compiled code before the code itself, so a second process that starts just then
    may run what an older version of gradwire left under that name. The first call therefore compiles or loads
    under a lock that all processes share; of many ranks on a fresh machine one compiles, the others load.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        functools.update_wrapper(self, function)
        function.__qualname__ += "_" + _sources()
        self._signature = signature
        try:
            self._dispatcher: Any = numba.njit(cache=True, **_OPTIONS)(function)
        except RuntimeError:  # nowhere to write
            self._dispatcher = numba.njit(**_OPTIONS)(function)
        self._ready = False
        self._entry: team.Entry | None = None

    def _compiled(self) -> Any:
        if not self._ready:
            with _file_lock(self._dispatcher.stats.cache_path):
                self._dispatcher.compile(self._signature)
            self._ready = True
        return self._dispatcher

    def __call__(self, *args: Any) -> Any:
        return self._compiled()(*args)

    @property
    def at_once(self) -> team.Entry | None:
        """Several calls of it on torch's own threads, where that can be: see `team`."""
        if self._entry is None and team.available():
            self._entry = team.entry_of(self._compiled())
        return self._entry if team.available() else None


@contextlib.contextmanager
def _file_lock(folder: str | None) -> Iterator[None]:
    if fcntl is None or folder is None:
        yield
        return
    try:
        file = os.open(os.path.join(folder, "gradwire.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # a read-only cache: nothing will be written either
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _kernel(signature: str) -> Callable[[Callable[..., Any]], _Kernel]:
    return lambda function: _Kernel(function, signature)


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    return (x.detach() if x.requires_grad else x).numpy()


def _raw(x: Tensor) -> np.ndarray[Any, Any]:
    return _array(x).view(np.uint32)


# Lanes of bits ----------------------------------------------------------------------------------------------


# A comparison of a vector gives a bit a lane, which is how bits lie in a packed byte. Loops that say so are not
# recognised, so these are spelled in LLVM's vectors: instructions of their own where a processor has masks, and
# lowered to others everywhere else. Places are not checked: there must be as many elements as lanes.

_Values = Any  # of llvmlite, which has no types


def _lanes_of(builder: _Values, value: _Values, lanes: int) -> _Values:
    """`value` in every lane."""
    whole = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(whole, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(whole, ir.Undefined), order)


def _intrinsic(make: Callable[..., Any]) -> Any:
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

    @_intrinsic
    def mask(context, array, start, bound):
        def generate(context, builder, signature, args):
            vector = builder.load(_lanes_at(context, builder, array, args[0], args[1], lanes), align=4)
            bits = compare(builder, vector, _lanes_of(builder, args[2], lanes))
            return builder.bitcast(bits, ir.IntType(lanes))

        return word(array, types.uintp, array.dtype), generate

    return mask


def _magnitude_is_at_least(builder: _Values, vector: _Values, least: _Values) -> _Values:
    magnitude = builder.and_(vector, ir.Constant(vector.type, [0x7FFFFFFF] * vector.type.count))
    return builder.icmp_unsigned(">=", magnitude, least)


_at_least_8 = _mask(8, lambda builder, vector, least: builder.fcmp_ordered(">=", vector, least))
_at_least_16 = _mask(16, _magnitude_is_at_least)
_at_least_64 = _mask(64, _magnitude_is_at_least)
_below_8 = _mask(8, lambda builder, vector, bound: builder.icmp_signed("<", vector, bound))


@_intrinsic
def _choose_8(context, out, start, bits, up, down):
    """out[start + i] = up where bit i is 1, else down."""

    def generate(context, builder, signature, args):
        mask = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 8))
        chosen = builder.select(mask, _lanes_of(builder, args[3], 8), _lanes_of(builder, args[4], 8))
        builder.store(chosen, _lanes_at(context, builder, out, args[0], args[1], 8), align=4)
        return context.get_dummy_value()

    return types.void(out, types.uintp, types.uint8, out.dtype, out.dtype), generate


def _word_at_byte(context: _Values, builder: _Values, kind: _Values, array: _Values, at: _Values) -> _Values:
    """A pointer to the eight bytes from byte `at`, which need not be aligned."""
    first = builder.gep(make_array(kind)(context, builder, array).data, [at])
    return builder.bitcast(first, ir.IntType(64).as_pointer())


@_intrinsic
def _load_word(context, packed, at):
    """Eight bytes as a word, the first the lowest."""

    def generate(context, builder, signature, args):
        return builder.load(_word_at_byte(context, builder, packed, *args), align=1)

    return types.uint64(packed, types.uintp), generate


@_intrinsic
def _store_word(context, packed, at, word):
    """Write eight bytes, the lowest first."""

    def generate(context, builder, signature, args):
        builder.store(args[2], _word_at_byte(context, builder, packed, *args[:2]), align=1)
        return context.get_dummy_value()

    return types.void(packed, types.uintp, types.uint64), generate


@_intrinsic
def _ones(context, word):
    """How many bits are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@_intrinsic
def _trailing_zeros(context, word):
    """The place of the lowest set bit of a word that is not zero: one instruction."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@_intrinsic
def _store_16_past_caches(context, out, start, values, first):
    """out[start + i] = values[first + i] for the line of 64 bytes from out[start], which is not read first."""

    def generate(context, builder, signature, args):
        line = builder.load(_lanes_at(context, builder, values, args[2], args[3], 16), align=4)
        store = builder.store(line, _lanes_at(context, builder, out, args[0], args[1], 16), align=64)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(out, types.uintp, values, types.uintp), generate


@_intrinsic
def _prefetch(context, array, i):
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


@_intrinsic
def _bits_of(context, value):
    """The bits of a float32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@_intrinsic
def _float_of(context, bits):
    """The float32 of these bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@_intrinsic
def _widest(context):
    """Let this function's loops use the widest vectors there are: LLVM takes half of what AVX-512 has."""

    def generate(context, builder, signature, args):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def _fence(context):
    """What was stored past the caches is seen by whoever is told afterwards."""

    def generate(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _target_has(feature: str) -> bool:
    """Whether numba compiles for processors with `feature`: NUMBA_CPU_FEATURES says, or else this processor does."""
    chosen: str | None = numba.core.config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(binding.get_host_cpu_features().get(feature))


_COMPRESSES = _target_has("avx512f")
"""Whether one instruction closes up what a mask chooses of a vector. Elsewhere that is a branch for each element."""


def _close_up(context: _Values, builder: _Values, vector: _Values, mask: _Values, out: _Values) -> None:
    """Write the lanes that `mask` chooses at the pointer `out`, side by side; the rest of a vector there is lost."""
    kind = ir.FunctionType(vector.type, [vector.type, ir.VectorType(ir.IntType(1), 16), vector.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.experimental.vector.compress.v16i32")
    bits = builder.bitcast(mask, ir.VectorType(ir.IntType(1), 16))
    closed = builder.call(function, [vector, bits, ir.Constant(vector.type, ir.Undefined)])
    builder.store(closed, out, align=4)


@_intrinsic
def _close_up_16(context, source, start, mask, out, at):
    """Write what `mask` chooses of source[start : start + 16] from out[at] on, and something up to out[at + 15]."""

    def generate(context, builder, signature, args):
        vector = builder.load(_lanes_at(context, builder, source, args[0], args[1], 16), align=4)
        _close_up(context, builder, vector, args[2], _lanes_at(context, builder, out, args[3], args[4], 16))
        return context.get_dummy_value()

    return types.void(source, types.uintp, types.uint16, out, types.uintp), generate


@_intrinsic
def _close_up_places_16(context, first, mask, out, at):
    """As `_close_up_16`, of the numbers from `first` on."""

    def generate(context, builder, signature, args):
        words = ir.VectorType(ir.IntType(32), 16)
        vector = builder.add(_lanes_of(builder, args[0], 16), ir.Constant(words, list(range(16))))
        _close_up(context, builder, vector, args[1], _lanes_at(context, builder, out, args[2], args[3], 16))
        return context.get_dummy_value()

    return types.void(types.int32, types.uint16, out, types.uintp), generate


_CHUNK = 256
"""Elements between which a pass that computes asks for what comes next, so that memory does not wait for it."""

_AHEAD = 1024
"""Elements by which a pass that reads as it computes asks ahead: a few microseconds of memory."""


@_inline
def _ask(x, start, stop):
    """Ask for the lines of x[start:stop], of which none need exist."""
    _widest()
    for i in range(start, stop, 16):
        _prefetch(x, np.uintp(i))


# Random bits ------------------------------------------------------------------------------------------------

_HARD = 16
"""The weight of an element that is drawn, or found at random in memory."""


@_inline
def _mix(x):
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@_inline
def _uniform_at(counter, k0, k1):
    word = _mix(np.uint32(_mix(np.uint32(counter ^ k0)) ^ k1))
    # By way of int32: few processors turn unsigned vectors into floats.
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@_kernel("void(float32[::1], int64, int64, int64)")
def _uniform(out, start, k0, k1):
    _widest()
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(start)
    for i in range(out.size):
        out[i] = _uniform_at(counter, k0, k1)
        counter = np.uint32(counter + np.uint32(1))


def uniform(bits: int, numel: int, device: torch.device, start: int = 0) -> Tensor:
    """See `gradwire.kernels.uniform`."""
    out = torch.empty(numel, dtype=torch.float32)
    o, (k0, k1) = _array(out), uniform_words(bits)
    pool.run([functools.partial(_uniform, o[i:j], start + i, k0, k1) for i, j in pool.chunks(numel)])
    return out


@_inline
def _scale_word(word, n):
    return np.uint32((np.uint64(word) * np.uint64(n)) >> np.uint64(32))


@_inline
def _add_modulo(x, y, n):
    total = np.uint32(x + y)
    return min(total, np.uint32(total - n))  # below n the difference wraps round and is the greater


@_inline
def _feistel(x, a, b, w0, w1, w2, w3, w4, w5):
    # Exact: a quotient of 32-bit integers keeps clear of the next integer by more than float64 rounds.
    left = np.uint32(np.float64(x) / np.float64(b))
    right = np.uint32(x - np.uint32(left * b))
    left = _add_modulo(left, _scale_word(_mix(np.uint32(right ^ w0)), a), a)
    right = _add_modulo(right, _scale_word(_mix(np.uint32(left ^ w1)), b), b)
    left = _add_modulo(left, _scale_word(_mix(np.uint32(right ^ w2)), a), a)
    right = _add_modulo(right, _scale_word(_mix(np.uint32(left ^ w3)), b), b)
    left = _add_modulo(left, _scale_word(_mix(np.uint32(right ^ w4)), a), a)
    right = _add_modulo(right, _scale_word(_mix(np.uint32(left ^ w5)), b), b)
    return np.uint32(left * b + right)


@_kernel("void(int32[::1], int64, int64, int64, int64, int64, uint32[::1])")
def _permuted_indices(out, first, numel, a, b, walks, words):
    _widest()
    a, b, n = np.uint32(a), np.uint32(b), np.uint32(numel)
    # Names and no array, whose entries would be read again after every write.
    w0, w1, w2, w3, w4, w5 = words[0], words[1], words[2], words[3], words[4], words[5]
    for i in range(out.size):
        out[i] = np.int32(_feistel(np.uint32(first + i), a, b, w0, w1, w2, w3, w4, w5))
    # Few points fall outside, so walking is kept out of the loop that is vectorised.
    for i in range(out.size):
        x = np.uint32(out[i])
        for _ in range(walks):
            if x < n:
                break
            x = _feistel(x, a, b, w0, w1, w2, w3, w4, w5)
        out[i] = np.int32(x if x < n else x - n)


def permuted_indices(bits: int, numel: int, k: int, device: torch.device) -> Tensor:
    """See `gradwire.kernels.permuted_indices`."""
    out = torch.empty(k, dtype=torch.int32)
    o, words = _array(out), np.array(permutation_words(bits), np.uint32)
    a, b, walks = permutation_domain(numel)
    cuts = pool.chunks(k, weight=_HARD)
    pool.run([functools.partial(_permuted_indices, o[i:j], i, numel, a, b, walks, words) for i, j in cuts])
    return out


@_kernel("void(int32[::1], int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _stratified_indices(out, begin, numel, k, size, longer, w0, w1, turn, first):
    _widest()
    w0, w1, n, k = np.uint32(w0), np.uint32(w1), np.uint32(numel), np.uint32(k)
    size, longer, turn, at = np.uint32(size), np.uint32(longer), np.uint32(turn), np.uint32(begin)
    first = np.uint32(first)
    for i in range(out.size):
        stratum = _add_modulo(at, first, k)
        at = np.uint32(at + np.uint32(1))
        width = np.uint32(size + np.uint32(stratum < longer))
        within = _scale_word(_mix(np.uint32(_mix(np.uint32(stratum ^ w0)) ^ w1)), width)
        place = np.uint32(np.uint32(stratum * size) + np.uint32(min(stratum, longer) + within))
        out[i] = np.int32(_add_modulo(place, turn, n))


def stratified_indices(bits: int, numel: int, k: int, device: torch.device) -> Tensor:
    """See `gradwire.kernels.stratified_indices`."""
    out = torch.empty(k, dtype=torch.int32)
    if k:
        o, words = _array(out), strata(bits, numel, k)
        cuts = pool.chunks(k, weight=_HARD)
        pool.run([functools.partial(_stratified_indices, o[i:j], i, numel, k, *words) for i, j in cuts])
    return out


# Selection --------------------------------------------------------------------------------------------------


@_inline
def _max_magnitude(raw, start, stop):
    _widest()
    # As integers: NaN is the greatest, and a maximum of integers needs no leave to be reordered.
    largest = np.uint32(0)
    for i in range(start, stop):
        largest = max(largest, np.uint32(raw[np.uintp(i)] & np.uint32(0x7FFFFFFF)))
    return largest


@_kernel("uint32(uint32[::1])")
def _largest_raw(raw):
    return _max_magnitude(raw, 0, raw.size)


def all_finite(x: Tensor) -> Tensor:
    """See `gradwire.kernels.all_finite`."""
    raw = _raw(x).reshape(-1)
    largest = pool.run([functools.partial(_largest_raw, raw[i:j]) for i, j in pool.chunks(raw.size)])
    return torch.tensor(int(max(largest)) < 0x7F800000)


@_inline
def _magnitude(raw):
    return min(np.uint32(raw & np.uint32(0x7FFFFFFF)), np.uint32(CANONICAL_NAN))


_RUN = 64


@_inline
def _bound(least):
    """What bits without their sign are to be compared with, so that all NaN are one: as if they were `_magnitude`."""
    if least <= 0x7F800000:
        return np.uint32(least)
    return np.uint32(0x7F800001 if least <= CANONICAL_NAN else 0x80000000)


@_inline
def _reaches(raw, bound):
    return np.uint32(raw & np.uint32(0x7FFFFFFF)) >= bound


@_inline
def _word_at(raw, start, whole, bound):
    """Bit i is whether the magnitude of raw[start + i] reaches `bound`, for the next 64."""
    if start < whole:
        return _at_least_64(raw, np.uintp(start), bound)
    word = np.uint64(0)
    for i in range(start, raw.size):
        word |= np.uint64(_reaches(raw[np.uintp(i)], bound)) << np.uint64(i - start)
    return word


@_inline
def _choose_of_64(raw, start, whole, word, first, indices, values, n):
    """Write index and value of what `word` chooses of raw[start : start + 64] from `n` on; return where that ends."""
    if _COMPRESSES and start < whole and n + np.uintp(_RUN) <= np.uintp(indices.size) and _ones(word) > np.uint64(1):
        for i in range(start, start + _RUN, 16):
            mask = np.uint16(word)
            _close_up_places_16(np.int32(first + i), mask, indices, n)
            _close_up_16(raw, np.uintp(i), mask, values, n)
            n += np.uintp(_ones(np.uint64(mask)))
            word >>= np.uint64(16)
        return n
    while word != np.uint64(0):
        i = np.uintp(start) + np.uintp(_trailing_zeros(word))
        word &= word - np.uint64(1)
        indices[n], values[n] = np.int32(first + np.int64(i)), raw[i]
        n += np.uintp(1)
    return n


@_kernel("int64(uint32[::1], int64, int64, int32[::1], uint32[::1])")
def _candidates(raw, first, least, indices, values):
    """Write each element of magnitude `least` or more, and where it is; return how many, or -1 where there is no room.

    A word says which of the next 64 are: most of a sparse selection are passed over unseen, and of a dense one every
    step writes something. Nothing is guessed element by element.
    """
    _widest()
    n, whole, room, bound = np.uintp(0), raw.size // _RUN * _RUN, np.uintp(indices.size), _bound(least)
    for start in range(0, raw.size, _RUN):
        _ask(raw, start + _AHEAD, start + _AHEAD + _RUN)
        word = _word_at(raw, start, whole, bound)
        if n + np.uintp(_ones(word)) > room:
            return -1
        n = _choose_of_64(raw, start, whole, word, first, indices, values, n)
    return np.int64(n)


@_kernel("int64(uint32[::1], int64)")
def _count_at_least(raw, least):
    _widest()
    count, bound, whole = np.uint64(0), _bound(least), raw.size // _RUN * _RUN
    for start in range(0, raw.size, _RUN):
        count += _ones(_word_at(raw, start, whole, bound))
    return np.int64(count)


@_kernel("int64(uint32[::1], int64, uint32[::1])")
def _magnitudes_to(values, most, found):
    """Write the magnitudes up to `most`; return how many, or -1 where there is no room for them and 16 more."""
    _widest()
    n, bound, whole = np.uintp(0), _bound(most + 1), values.size // 16 * 16 if _COMPRESSES else 0
    room = np.uintp(max(found.size - 16, 0))
    for i in range(0, whole, 16):
        if n >= room:
            return -1
        mask = np.uint16(~_at_least_16(values, np.uintp(i), bound))
        _close_up_16(values, np.uintp(i), mask, found, n)
        n += np.uintp(_ones(np.uint64(mask)))
    for i in range(whole, values.size):
        if n >= room:
            return -1
        found[n] = values[np.uintp(i)]  # overwritten where it is not to be kept: nothing is guessed
        n += np.uintp(not _reaches(values[np.uintp(i)], bound))
    for i in range(np.int64(n)):
        found[np.uintp(i)] = _magnitude(found[np.uintp(i)])
    return np.int64(n)


@_kernel("void(int32[::1], uint32[::1], int64, int64, int32[::1], uint32[::1])")
def _emit(places, raw, threshold, quota, indices, values):
    """Write those above `threshold` and the first `quota` equal to it: there is room for just these.

    What is written may be where candidates stood that have been read.
    """
    _widest()
    above, bound, n, i = _bound(threshold + 1), _bound(threshold), np.uintp(0), 0
    while i < raw.size and n < np.uintp(indices.size):
        if _COMPRESSES and i + 16 <= raw.size and n + np.uintp(16) <= np.uintp(indices.size):
            mask = _at_least_16(raw, np.uintp(i), above)
            if quota == 0 or mask == _at_least_16(raw, np.uintp(i), bound):
                _close_up_16(places, np.uintp(i), mask, indices, n)
                _close_up_16(raw, np.uintp(i), mask, values, n)
                n += np.uintp(_ones(np.uint64(mask)))
                i += 16
                continue
        for j in range(i, min(i + 16, raw.size)):
            if n == np.uintp(indices.size):
                break
            value = raw[np.uintp(j)]
            indices[n], values[n] = places[np.uintp(j)], value  # overwritten where it is not to be kept
            larger = np.int64(_reaches(value, above))
            tied = np.int64(_reaches(value, bound)) & ~larger & np.int64(quota > 0)
            n += np.uintp(larger | tied)
            quota -= tied
        i += 16


@_kernel("void(uint32[::1], int64, int64, int64, int32[::1], uint32[::1])")
def _select(raw, first, threshold, quota, indices, values):
    """Write those above `threshold` and the first `quota` equal to it: there is room for just these."""
    above, bound, whole, n = _bound(threshold + 1), _bound(threshold), raw.size // _RUN * _RUN, np.uintp(0)
    for start in range(0, raw.size, _RUN):
        _ask(raw, start + _AHEAD, start + _AHEAD + _RUN)
        if n == np.uintp(indices.size):
            break
        word = _word_at(raw, start, whole, above)
        tied = _word_at(raw, start, whole, bound) & ~word if quota > 0 else np.uint64(0)
        while tied != np.uint64(0) and quota > 0:
            word |= tied & (~tied + np.uint64(1))
            tied &= tied - np.uint64(1)
            quota -= 1
        n = _choose_of_64(raw, start, whole, word, first, indices, values, n)


_Piece = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Places and values of what was selected in a piece of a tensor."""


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Candidates in one pass, and a look at these: a sample guesses between which two magnitudes the k-th largest lies.

    Where it guessed wrong, and where there is little to look through, all are looked through.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.float32) if values is None else values
    raw, cuts = _raw(x), pool.chunks(x.numel())
    values = torch.empty(k, dtype=torch.float32) if values is None else values
    few = raw.size >= _SAMPLED and 2 * k <= raw.size  # for candidates take twice the memory of what they are
    indices = _by_sample(raw, k, cuts, values) if few else None
    if indices is None:
        indices = _those_from(raw, cuts, _kth_largest(_magnitudes(raw), k), values)
    return indices, values


def _shares(k: int, above: list[int], at_least: list[int]) -> list[tuple[int, slice]]:
    """How many that equal the threshold each piece is to keep, those that come first, and which of all it writes."""
    left, stop, shares = k - sum(above), 0, []
    for more, n in zip(above, at_least, strict=True):
        quota = min(left, n - more)
        left -= quota
        start, stop = stop, stop + more + quota
        shares.append((quota, slice(start, stop)))
    return shares


def _can_be_written(values: Tensor) -> bool:
    """Whether kernels can write to it, or must leave it to a copy."""
    return values.dtype == torch.float32 and values.is_contiguous()


def topk_indices(x: Tensor, k: int) -> Tensor:
    """See `gradwire.kernels.topk_indices`."""
    return topk(x, k)[0]


_SAMPLE, _NEIGHBOURS = 4096, 4
"""As few say about where the k-th largest lies, and so many of them come from one cache line."""
_SAMPLED = 1 << 17


_BUCKET = 18
"""Low bits of a magnitude that a sample is not asked about: a thirty-second of an octave."""


@_inline
def _bucket(magnitude):
    """0 of zero alone, which most of a sparse tensor is; b from (b - 1 << _BUCKET) + 1 to b << _BUCKET."""
    return (np.int64(magnitude) + ((1 << _BUCKET) - 1)) >> _BUCKET


@_inline
def _room(seen, each, numel):
    """For as many of `numel` as a sample has seen, and four standard deviations more; and a vector's width."""
    return min(numel, np.int64(each * (seen + 2 + 4 * np.sqrt(seen + 2.0)))) + 32


@_kernel("void(uint32[::1], int64, int64, int64, int64, int64, int64[:, ::1])")
def _guess(raw, apart, few, many, least, piece, answers):
    """Where, in a sample of neighbours so far apart, the magnitudes of ranks `few` and `many` lie.

    Writes a row for each piece of the tensor: a magnitude that is no more than that of rank `many`; one that is no less
    than that of rank `few`; room for those from the first on, and for those between the two. `least` is taken for the
    first where it is not negative.
    """
    _widest()
    runs, each = raw.size // apart, apart / _NEIGHBOURS
    seen = np.empty(runs * _NEIGHBOURS, np.uint16)
    counts = np.zeros(_bucket(CANONICAL_NAN) + 1, np.int32)
    for run in range(runs):
        for i in range(_NEIGHBOURS):
            bucket = _bucket(_magnitude(raw[np.uintp(run * apart + i)]))
            seen[np.uintp(run * _NEIGHBOURS + i)] = np.uint16(bucket)
            counts[np.uintp(bucket)] += 1
    high = low = counts.size
    total = 0
    while low > 0 and total < many:
        if total < few:
            high = low - 1
        low -= 1
        total += counts[np.uintp(low)]
    if least >= 0:
        low = _bucket(least)
    else:
        low = max(low, 1)
        least = ((low - 1) << _BUCKET) + 1
    most = high << _BUCKET
    for p in range(answers.shape[0]):
        start, stop, chosen, between = p * piece, min((p + 1) * piece, raw.size), 0, 0
        for i in range(start // apart * _NEIGHBOURS, min(stop // apart * _NEIGHBOURS, seen.size)):
            bucket = np.int64(seen[np.uintp(i)])
            chosen += bucket >= low
            between += np.int64(bucket >= low) & np.int64(bucket <= high)
        answers[p, 0], answers[p, 1] = least, most
        answers[p, 2], answers[p, 3] = _room(chosen, each, stop - start), _room(between, each, stop - start)


def _guessed(raw: np.ndarray[Any, Any], cuts: list[pool.Chunk], k: int, least: int = -1) -> np.ndarray[Any, Any]:
    """`_guess` of what is between the k-th largest and `least`, or so far below it as it lies once in ten thousand.

    Neighbours are alike, and so tell less: deviations are taken for 3/2 of what others would have.
    """
    apart = max(_NEIGHBOURS, raw.size * _NEIGHBOURS // _SAMPLE)
    while math.gcd(apart, 210) > 1:  # for who sees every tenth element sees a tenth of a matrix's columns
        apart += 1
    sampled, density = raw.size // apart * _NEIGHBOURS, k / raw.size
    rank, slack = density * sampled, 6 * (density * (1 - density) * sampled) ** 0.5 + 2
    answers = np.empty((len(cuts), 4), np.int64)
    _guess(raw, apart, max(1, int(rank - slack)), int(rank + slack), least, cuts[0][1], answers)
    return answers


class _Candidates:
    """All elements of magnitude `least` or more, piece by piece: where they are, in one buffer, and their bits."""

    def __init__(self, raw: np.ndarray[Any, Any], cuts: list[pool.Chunk], least: int, rooms: list[int]) -> None:
        self._indices = torch.empty(sum(rooms), dtype=torch.int32)
        places, ends = _array(self._indices), itertools.accumulate(rooms)
        buffers = [(places[end - room : end], _words(room)) for end, room in zip(ends, rooms, strict=True)]
        both = zip(cuts, buffers, strict=True)
        self.counts = pool.run([functools.partial(_candidates, raw[i:j], i, least, *buffer) for (i, j), buffer in both])
        self.found = min(self.counts) >= 0  # or there was no room
        parts = zip(buffers, self.counts, strict=True)
        self.pieces = [(places[:n], found[:n]) for (places, found), n in parts] if self.found else []

    def closed_up(self, shares: list[slice], values: Tensor | None) -> Tensor:
        """The first of each piece's indices, side by side; and its bits as `values`, where these are given."""
        for (places, found), share in zip(self.pieces, shares, strict=True):
            n = share.stop - share.start
            _array(self._indices)[share] = places[:n]
            if values is not None:
                values[share].copy_(torch.from_numpy(found[:n].view(np.float32)))
        return self._indices[: shares[-1].stop]


def _kth_largest(words: np.ndarray[Any, Any], k: int) -> int:
    """The k-th largest of `words`, which are left in another order."""
    words.partition(words.size - k)
    return int(words[words.size - k])


def _words(n: int) -> np.ndarray[Any, Any]:
    return _raw(torch.empty(n, dtype=torch.float32))


def _magnitudes(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    magnitudes = np.bitwise_and(raw, np.uint32(0x7FFFFFFF), out=_words(raw.size))
    return np.minimum(magnitudes, np.uint32(CANONICAL_NAN), out=magnitudes)


def _by_sample(raw: np.ndarray[Any, Any], k: int, cuts: list[pool.Chunk], values: Tensor) -> Tensor | None:
    """The k largest, out of the few above a magnitude that the k-th largest is hardly ever below; or None."""
    guess = _guessed(raw, cuts, k)
    (least, most), rooms = guess[0, :2].tolist(), guess[:, 2:].T.tolist()
    if sum(rooms[0]) > 2 * k + raw.size // 8:  # many are nearly equal
        return None
    candidates = _Candidates(raw, cuts, least, rooms[0])
    if not candidates.found:
        return None
    pieces, counts = candidates.pieces, candidates.counts
    if sum(counts) < k:  # as of a sparse tensor, whose k-th largest is 0
        return _those_from(raw, cuts, 0, values, counts, [j - i for i, j in cuts]) if least == 1 else None
    low = [_words(room) for room in rooms[1]]
    both = zip(pieces, low, strict=True)
    tasks = [functools.partial(_magnitudes_to, found, most, some) for (_, found), some in both]
    lower = pool.run(tasks, numel=sum(counts))
    larger = [count - n for count, n in zip(counts, lower, strict=True)]
    rank = k - sum(larger)
    if min(lower) < 0 or rank < 1:
        return None
    low = [some[:n] for some, n in zip(low, lower, strict=True)]
    threshold = _kth_largest(low[0] if len(low) == 1 else np.concatenate(low), rank)
    above, at_least = (
        [n + _count_at_least(some, least) for n, some in zip(larger, low, strict=True)]
        for least in (threshold + 1, threshold)
    )
    shares, direct, tasks = _shares(k, above, at_least), _can_be_written(values), []
    for (places, found), (quota, share) in zip(pieces, shares, strict=True):
        n = share.stop - share.start
        target = _raw(values)[share] if direct else found[:n]
        tasks.append(functools.partial(_emit, places, found, threshold, quota, places[:n], target))
    pool.run(tasks, numel=2 * sum(counts))
    return candidates.closed_up([share for _, share in shares], None if direct else values)


def _counts(raw: np.ndarray[Any, Any], cuts: list[pool.Chunk], least: int) -> list[int]:
    """How many of each piece are of magnitude `least` or more."""
    return pool.run([functools.partial(_count_at_least, raw[i:j], least) for i, j in cuts])


def _those_from(
    raw: np.ndarray[Any, Any],
    cuts: list[pool.Chunk],
    threshold: int,
    values: Tensor,
    above: list[int] | None = None,
    at_least: list[int] | None = None,
) -> Tensor:
    """The largest, of which `threshold` is the least; how many are above it in each piece, and no less than it."""
    above = _counts(raw, cuts, threshold + 1) if above is None else above
    at_least = _counts(raw, cuts, threshold) if at_least is None else at_least
    indices = torch.empty(values.numel(), dtype=torch.int32)
    found = values if _can_be_written(values) else torch.empty(values.numel(), dtype=torch.float32)
    at, words, tasks = _array(indices), _raw(found), []
    for (i, j), (quota, share) in zip(cuts, _shares(at.size, above, at_least), strict=True):
        tasks.append(functools.partial(_select, raw[i:j], i, threshold, quota, at[share], words[share]))
    pool.run(tasks)
    if found is not values:
        values.copy_(found)
    return indices


@_kernel("void(float32[::1], int32[::1], float32[::1])")
def _gather(x, indices, out):
    _widest()
    for i in range(indices.size):
        out[i] = x[np.uint32(indices[i])]


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.gather`."""
    source, at, o = _array(x), _array(indices), _array(out)
    pool.run([functools.partial(_gather, source, at[i:j], o[i:j]) for i, j in pool.chunks(at.size, weight=_HARD)])


@_kernel("void(float32[::1], int32[::1], float32[::1], float32)")
def _scatter_add(into, indices, values, alpha):
    _widest()
    for i in range(indices.size):
        into[np.uint32(indices[i])] += values[i] * alpha


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """One thread where indices may repeat: the order of addition must not depend on the number of threads."""
    o, at, v = _array(into), _array(indices), _array(values.to(torch.float32))
    cuts = pool.chunks(at.size, weight=_HARD) if distinct else [(0, at.size)]
    pool.run([functools.partial(_scatter_add, o, at[i:j], v[i:j], np.float32(alpha)) for i, j in cuts])


@_inline
def _increase(indices, start, stop):
    """Whether each of indices[start:stop] is greater than the one before."""
    _widest()
    least = np.int32(1)
    for i in range(start, stop):
        least = min(least, np.int32(indices[np.uintp(i)] - indices[np.uintp(i - 1)]))
    return least > 0


@_kernel("boolean(int32[::1], float32[::1], int64, float32[::1])")
def _scatter(indices, values, first, out):
    """out[indices - first] = values and 0 elsewhere; false where the indices are none of these places, or unordered."""
    _widest()
    at, past_caches = 0, out.size >= _PAST_CACHES
    tile = np.zeros(_TILE, np.float32)
    for origin in range(0, out.size, _TILE):
        piece, begin = out[origin : origin + _TILE], at
        base, size = np.int32(first + origin), np.uint32(piece.size)
        while at < indices.size:
            place = np.uint32(indices[np.uintp(at)] - base)
            if place >= size:
                break
            tile[np.uintp(place)] = np.float32(0) + values[np.uintp(at)]  # which is not -0.0
            at += 1
        if not _increase(indices, max(begin, 1), at):
            return False
        _deliver(tile, piece, 0, piece.size, np.float32(0), True, past_caches)
        if (at - begin) * 16 > _TILE:
            tile[:] = np.float32(0)
        else:
            for i in range(begin, at):
                tile[np.uintp(np.uint32(indices[np.uintp(i)] - base))] = np.float32(0)
    _fence()
    return at == indices.size


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """One pass over `out` where indices increase, as they do unless they are damaged."""
    at, v, o = _array(indices), _array(values.to(torch.float32)), _array(out)
    some = int(np.searchsorted(at, np.int32(o.size)))  # behind them stand those that are none
    if some < at.size and at[some:].min() < o.size:
        some = 0  # they do not increase, so it is not known where those that are none stand
    at = at[:some] if some else at
    cuts = pool.chunks(o.size)
    ends = [0, *np.searchsorted(at, np.array([j for _, j in cuts[:-1]], np.int32)), at.size]
    parts = zip(cuts, ends[:-1], ends[1:], strict=True)
    if not all(pool.run([functools.partial(_scatter, at[a:b], v[a:b], i, o[i:j]) for (i, j), a, b in parts])):
        keep = indices < out.numel()
        scatter_add_(out.zero_(), indices[keep], values[keep])


@_kernel("uint32(uint32[::1])")
def _largest_index(raw):
    _widest()
    largest = np.uint32(0)
    for i in range(raw.size):
        largest = max(largest, raw[i])
    return largest


def indices_within(indices: Tensor, numel: int) -> bool:
    """Whether all lie in [0, numel). Negative ones look huge as unsigned."""
    return not indices.numel() or int(_largest_index(_raw(indices))) < numel


# Packing ----------------------------------------------------------------------------------------------------


@_inline
def _pack(codes, bits, out):
    """Pack uint8 codes, which may be changed: whole groups of eight with word arithmetic, the rest bit by bit."""
    _widest()
    whole = codes.size // 8 * 8
    if bits == 8:
        for j in range(whole):
            out[j] = codes[j]
    elif bits == 4:
        pairs = codes[:whole].view(np.uint16)
        for j in range(pairs.size):
            out[j] = np.uint8(np.uint16(pairs[j] | np.uint16(pairs[j] >> np.uint16(4))))
    elif bits == 2:
        fours = codes[:whole].view(np.uint32)
        for j in range(fours.size):
            w = fours[j]
            w = np.uint32(w | np.uint32(w >> np.uint32(6)))
            out[j] = np.uint8(np.uint32(w | np.uint32(w >> np.uint32(12))))
    elif bits == 1:
        eights = codes[:whole].view(np.uint64)
        for j in range(eights.size):
            # The multiplier moves bit 0 of byte i to bit 56 + i; no two products meet, so nothing carries.
            out[j] = np.uint8((eights[j] * np.uint64(0x0102040810204080)) >> np.uint64(56))
    else:
        _pack_eights(codes[:whole].view(np.uint64), bits, out)
    _pack_slowly(codes[whole:], bits, out[whole // 8 * bits :])


@_inline
def _pack_eights(eights, bits, out):
    """Close the gaps between neighbours, then between pairs, then between fours.

    Words are closed in place, as vectors, and written whole: each overwrites what the one before has too much, and
    the last ones, which must not, are written byte by byte.
    """
    _widest()
    gap = np.uint64(8 - bits)
    for j in range(eights.size):
        w = eights[j]
        w = (w & np.uint64(0x00FF00FF00FF00FF)) | ((w & np.uint64(0xFF00FF00FF00FF00)) >> gap)
        w = (w & np.uint64(0x0000FFFF0000FFFF)) | ((w & np.uint64(0xFFFF0000FFFF0000)) >> (gap + gap))
        eights[j] = (w & np.uint64(0x00000000FFFFFFFF)) | ((w & np.uint64(0xFFFFFFFF00000000)) >> np.uint64(4 * gap))
    roomy = max(eights.size - 8, 0)
    for j in range(roomy):
        _store_word(out, np.uintp(j * bits), eights[j])
    for j in range(roomy, eights.size):
        for byte in range(bits):
            out[j * bits + byte] = np.uint8(eights[j] >> np.uint64(8 * byte))


@_inline
def _pack_wide_eights(codes, bits, out):
    """Pack eight codes of 9 to 16 bits at a time, four to a word."""
    _widest()
    half, b = np.uint64(4 * bits), np.uint64(bits)
    for j in range(codes.size // 8):
        low = high = np.uint64(0)
        for lane in range(4):
            low |= np.uint64(np.uint32(codes[8 * j + lane])) << (b * np.uint64(lane))
            high |= np.uint64(np.uint32(codes[8 * j + 4 + lane])) << (b * np.uint64(lane))
        if bits < 16:
            low |= high << half
            high >>= np.uint64(64) - half
        for byte in range(8):
            out[j * bits + byte] = np.uint8(low >> np.uint64(8 * byte))
        for byte in range(8, bits):
            out[j * bits + byte] = np.uint8(high >> np.uint64(8 * byte - 64))
    whole = codes.size // 8 * 8
    _pack_slowly(codes[whole:], bits, out[whole // 8 * bits :])


@_inline
def _pack_slowly(codes, bits, out):
    _widest()
    word, filled, at = np.uint64(0), 0, 0
    for i in range(codes.size):
        word |= np.uint64(codes[i]) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            out[at] = np.uint8(word & np.uint64(255))
            word >>= np.uint64(8)
            filled -= 8
            at += 1
    if filled > 0:
        out[at] = np.uint8(word)


@_inline
def _unpack(packed, bits, codes):
    """Unpack into uint8 codes: the inverse of `_pack`."""
    _widest()
    whole = codes.size // 8 * 8
    if bits == 8:
        for j in range(whole):
            codes[j] = packed[j]
    elif bits == 4:
        pairs = codes[:whole].view(np.uint16)
        for j in range(pairs.size):
            w = np.uint16(packed[j])
            pairs[j] = np.uint16(np.uint16(w | np.uint16(w << np.uint16(4))) & np.uint16(0x0F0F))
    elif bits == 2:
        fours = codes[:whole].view(np.uint32)
        for j in range(fours.size):
            w = np.uint32(packed[j])
            w = np.uint32(w | np.uint32(w << np.uint32(12)))
            fours[j] = np.uint32(np.uint32(w | np.uint32(w << np.uint32(6))) & np.uint32(0x03030303))
    elif bits == 1:
        eights = codes[:whole].view(np.uint64)
        for j in range(eights.size):
            # Byte i keeps bit i of the copy it is given; adding 128 minus that bit carries it to the top.
            w = (np.uint64(packed[j]) * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)
            eights[j] = ((w + np.uint64(0x00406070787C7E7F)) >> np.uint64(7)) & np.uint64(0x0101010101010101)
    else:
        _unpack_eights(packed, bits, codes[:whole].view(np.uint64))
    _unpack_slowly(packed[whole // 8 * bits :], bits, codes[whole:])


@_inline
def _unpack_eights(packed, bits, eights):
    _widest()
    gap = np.uint64(8 - bits)
    fours = np.uint64((1 << (4 * bits)) - 1)
    twos = np.uint64(((1 << (2 * bits)) - 1) * 0x0000000100000001)
    ones = np.uint64(((1 << bits) - 1) * 0x0001000100010001)
    roomy, whole = max(eights.size - 8, 0), np.uint64((1 << (8 * bits)) - 1)
    for j in range(roomy):
        eights[j] = _load_word(packed, np.uintp(j * bits))
    for j in range(roomy, eights.size):
        w = np.uint64(0)
        for byte in range(bits):
            w |= np.uint64(packed[j * bits + byte]) << np.uint64(8 * byte)
        eights[j] = w
    for j in range(eights.size):
        w = eights[j] & whole
        w = (w & fours) | ((w & ~fours) << np.uint64(4 * gap))
        w = (w & twos) | ((w & ~twos) << (gap + gap))
        eights[j] = (w & ones) | ((w & ~ones) << gap)


@_inline
def _unpack_wide_eights(packed, bits, codes):
    _widest()
    half, b, mask = np.uint64(4 * bits), np.uint64(bits), np.uint64((1 << bits) - 1)
    for j in range(codes.size // 8):
        low = high = np.uint64(0)
        for byte in range(8):
            low |= np.uint64(packed[j * bits + byte]) << np.uint64(8 * byte)
        for byte in range(8, bits):
            high |= np.uint64(packed[j * bits + byte]) << np.uint64(8 * byte - 64)
        if bits < 16:
            high = (high << (np.uint64(64) - half)) | (low >> half)
        for lane in range(4):
            codes[8 * j + lane] = np.int32((low >> (b * np.uint64(lane))) & mask)
            codes[8 * j + 4 + lane] = np.int32((high >> (b * np.uint64(lane))) & mask)
    whole = codes.size // 8 * 8
    _unpack_slowly(packed[whole // 8 * bits :], bits, codes[whole:])


@_inline
def _unpack_slowly(packed, bits, codes):
    _widest()
    word, filled, at = np.uint64(0), 0, 0
    mask = np.uint64((1 << bits) - 1)
    for i in range(codes.size):
        while filled < bits:
            word |= np.uint64(packed[at]) << np.uint64(filled)
            filled += 8
            at += 1
        codes[i] = word & mask
        word >>= np.uint64(bits)
        filled -= bits


@_kernel("void(uint8[::1], int64, uint8[::1])")
def _pack_narrow(codes, bits, out):
    _widest()
    scratch = np.empty(min(_TILE, codes.size), np.uint8)
    for start in range(0, codes.size, _TILE):
        piece = codes[start : start + _TILE]
        scratch[: piece.size] = piece
        _pack(scratch[: piece.size], bits, out[start // 8 * bits :])


@_kernel("void(int32[::1], int64, uint8[::1])")
def _pack_wide(codes, bits, out):
    _pack_wide_eights(codes, bits, out)


@_kernel("void(uint8[::1], int64, uint8[::1])")
def _unpack_narrow(packed, bits, codes):
    _unpack(packed, bits, codes)


@_kernel("void(uint8[::1], int64, int32[::1])")
def _unpack_wide(packed, bits, codes):
    _unpack_wide_eights(packed, bits, codes)


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """See `gradwire.kernels.pack_bits`."""
    kernel = _pack_narrow if codes.dtype == torch.uint8 else _pack_wide
    c, o = _array(codes), _array(out)
    pool.run([functools.partial(kernel, c[i:j], bits, o[i * bits // 8 :]) for i, j in pool.chunks(codes.numel(), 8)])


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """See `gradwire.kernels.unpack_bits`."""
    codes = torch.empty(numel, dtype=torch.uint8 if bits <= 8 else torch.int32)
    kernel = _unpack_narrow if bits <= 8 else _unpack_wide
    p, c = _array(packed), _array(codes)
    pool.run([functools.partial(kernel, p[i * bits // 8 :], bits, c[i:j]) for i, j in pool.chunks(numel, 8)])
    return codes


# Blocks -----------------------------------------------------------------------------------------------------


# A slice of an array counts a reference, which costs as much as a small block. So blocks are pairs (start, stop)
# within a tile of several, and are indexed by unsigned integers, which numba does not check for being negative.

_TILE = 4096


@_inline
def _tile(block):
    return max(1, _TILE // block) * block


@_inline
def _quantise(x, start, stop, inverse, levels, codes):
    _widest()
    # A product is at most levels * (1 + 2^-23), which rounds to levels: nothing to clamp.
    for chunk in range(start, stop, _CHUNK):
        end = min(chunk + _CHUNK, stop)
        _ask(x, chunk + (stop - start), end + (stop - start))
        for i in range(chunk, end):
            codes[np.uintp(i)] = np.uint8(np.int32(np.rint(x[np.uintp(i)] * inverse)) + levels)


@_inline
def _quantise_randomly(x, start, stop, inverse, levels, codes, first, k0, k1):
    _widest()
    counter = np.uint32(first + start)
    for chunk in range(start, stop, _CHUNK):
        end = min(chunk + _CHUNK, stop)
        _ask(x, chunk + (stop - start), end + (stop - start))
        for i in range(chunk, end):
            u = _uniform_at(counter, k0, k1)
            counter = np.uint32(counter + np.uint32(1))
            q = np.int32(np.floor(x[np.uintp(i)] * inverse + u))
            q = max(min(q, levels), np.int32(-levels))
            codes[np.uintp(i)] = np.uint8(q + levels)


@_inline
def _subtract_decoded(x, start, stop, scale, levels, codes):
    _widest()
    # As _block_int_decode spells it, so that what is left is the same bit for bit.
    step, zero = scale / np.float32(levels), np.float32(levels)
    for i in range(start, stop):
        x[np.uintp(i)] -= (np.float32(np.int32(codes[np.uintp(i)])) - zero) * step


@_kernel("void(float32[::1], int64, int64, boolean, int64, int64, int64, uint8[::1], float32[::1], boolean)")
def _block_int_encode(x, bits, block, stochastic, k0, k1, first, packed, scales, keep):
    _widest()
    levels = np.int32((1 << (bits - 1)) - 1)
    k0, k1 = np.uint32(k0), np.uint32(k1)
    scales_raw, tile = scales.view(np.uint32), _tile(block)
    scratch = np.empty(tile, np.uint8)
    for origin in range(0, x.size, tile):
        piece = x[origin : origin + tile]
        raw, at, out = piece.view(np.uint32), np.uint32(first + origin), packed[origin // 8 * bits :]
        codes = (out if bits == 8 else scratch)[: piece.size]
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), np.uintp((origin + start) // block)
            scales_raw[b] = _max_magnitude(raw, start, stop)
            scale = scales[b]
            inverse = np.float32(levels) / scale
            if not (np.isfinite(inverse) and np.isfinite(scale)):
                for i in range(start, stop):
                    codes[np.uintp(i)] = np.uint8(levels)
                if np.isfinite(scale):
                    scales[b] = np.float32(0)
            elif stochastic:
                _quantise_randomly(piece, start, stop, inverse, levels, codes, at, k0, k1)
            else:
                _quantise(piece, start, stop, inverse, levels, codes)
            if keep:
                _subtract_decoded(piece, start, stop, scales[b], levels, codes)
        if bits != 8:
            _pack(codes, bits, out)


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    """See `gradwire.kernels.block_int_encode`."""
    a, p, s = _array(x), _array(packed), _array(scales)
    words = (0, 0) if key is None else uniform_words(key)
    pool.run(
        [
            functools.partial(
                _block_int_encode,
                *(a[i:j], bits, block, key is not None, *words, i),
                *(p[i // 8 * bits :], s[i // block : -(-j // block)], keep),
            )
            for i, j in pool.chunks(x.numel(), block)
        ]
    )


# Decoders write to a tile, which is then added, or moved where it belongs.

_PAST_CACHES = 1 << 18
"""From this size on (1 MiB of float32) who reads a result will not find it in the nearest caches anyway."""


@_inline
def _deliver(values, into, start, stop, alpha, overwrite, past_caches):
    """into += alpha * values, or into = values, from `start` to `stop`."""
    _widest()
    if not overwrite:
        for i in range(start, stop):
            into[np.uintp(i)] += values[np.uintp(i)] * alpha
    elif past_caches:
        _move_past_caches(values, into, start, stop)
    else:
        for i in range(start, stop):
            into[np.uintp(i)] = values[np.uintp(i)]


@_inline
def _delivered(values, into, start, stop, alpha, overwrite, past_caches):
    """Deliver what is a chunk or the end; return where it ends. Memory takes one chunk while the next is computed."""
    if stop - start < _CHUNK and stop < into.size:
        return start
    _deliver(values, into, start, stop, alpha, overwrite, past_caches)
    return stop


@_inline
def _move_past_caches(values, into, start, stop):
    """into = values. A cache would read each line first, to no purpose: all of it is overwritten."""
    _widest()
    if np.uintp(into.ctypes.data) & np.uintp(3):  # no float begins at a line
        for i in range(start, stop):
            into[np.uintp(i)] = values[np.uintp(i)]
        return
    unaligned = ((np.uintp(into.ctypes.data) >> np.uintp(2)) + np.uintp(start)) & np.uintp(15)
    head = min(start + np.int64((np.uintp(16) - unaligned) & np.uintp(15)), stop)
    whole = head + (stop - head) // 16 * 16
    for i in range(start, head):
        into[np.uintp(i)] = values[np.uintp(i)]
    for i in range(head, whole, 16):
        _store_16_past_caches(into, np.uintp(i), values, np.uintp(i))
    for i in range(whole, stop):
        into[np.uintp(i)] = values[np.uintp(i)]


@_inline
def _end_of_block(at, origin, block, size):
    """Where within a tile the block ends that `at` is in."""
    return min(((origin + at) // block + 1) * block - origin, size)


@_kernel("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _block_int_decode(packed, scales, bits, block, into, alpha, overwrite):
    _widest()
    levels, past_caches = np.float32((1 << (bits - 1)) - 1), into.size >= _PAST_CACHES
    scratch, values = np.empty(_TILE, np.uint8), np.empty(_TILE, np.float32)
    for origin in range(0, into.size, _TILE):
        piece, start, sent = into[origin : origin + _TILE], 0, 0
        codes = (packed[origin:] if bits == 8 else scratch)[: piece.size]
        if bits != 8:
            _unpack(packed[origin // 8 * bits :], bits, codes)
        while start < piece.size:
            step = scales[np.uintp((origin + start) // block)] / levels
            stop = _end_of_block(start, origin, block, piece.size)
            for i in range(start, stop):
                values[np.uintp(i)] = (np.float32(np.int32(codes[np.uintp(i)])) - levels) * step
            start = stop
            sent = _delivered(values, piece, sent, stop, alpha, overwrite, past_caches)
    _fence()


def _decode(
    kernel: _Kernel,
    packed: Tensor,
    scales: Tensor,
    bits: int,
    parameter: int,
    block: int,
    into: Tensor,
    alpha: float | None,
) -> None:
    """Spread a decoder over the pool, cut at blocks; overwrite where alpha is None."""
    p, s, o, factor = _array(packed), _array(scales), _array(into), np.float32(alpha or 0.0)
    pool.run(
        [
            functools.partial(
                kernel,
                *(p[i // 8 * bits :], s[i // block : -(-j // block)], parameter, block),
                *(o[i:j], factor, alpha is None),
            )
            for i, j in pool.chunks(o.size, block)
        ]
    )


def block_int_accumulate(
    packed: Tensor, scales: Tensor, bits: int, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.block_int_accumulate`."""
    _decode(_block_int_decode, packed, scales, bits, bits, block, into, alpha)


def block_int_decode(packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.block_int_decode`."""
    _decode(_block_int_decode, packed, scales, bits, bits, block, out, None)


@_sum
def _sum_magnitudes(x, start, stop):
    _widest()
    total = 0.0
    for i in range(start, stop):
        total += np.float64(abs(x[np.uintp(i)]))
    return total


@_sum
def _sum_squares(x, start, stop):
    _widest()
    total = 0.0
    for i in range(start, stop):
        total += np.float64(x[np.uintp(i)]) * np.float64(x[np.uintp(i)])
    return total


def _packer(mask: Any, holds: Callable[..., Any]) -> Any:
    """A function f(x, bound, out): bit i of `out` is holds(x[i], bound), which `mask` says of eight at a time."""

    @_inline
    def pack(x, bound, out):
        _widest()
        whole = x.size // 8
        for j in range(whole):
            out[j] = mask(x, np.uintp(8 * j), bound)
        if 8 * whole < x.size:
            last = np.uint8(0)
            for i in range(8 * whole, x.size):
                last |= np.uint8(np.uint8(holds(x[i], bound)) << np.uint8(i & 7))
            out[whole] = last

    return pack


_pack_at_least = _packer(_at_least_8, _inline(lambda value, bound: value >= bound))
_pack_below = _packer(_below_8, _inline(lambda value, bound: value < bound))


@_inline
def _choose(bits, start, stop, up, down, out):
    """out[i] = up where bit i is 1, else down, for i in [start, stop); start is a multiple of 8."""
    _widest()
    whole = stop // 8 * 8
    for i in range(start, whole, 8):
        _choose_8(out, np.uintp(i), bits[np.uintp(i >> 3)], up, down)
    for i in range(max(start, whole), stop):
        out[np.uintp(i)] = up if (bits[np.uintp(i >> 3)] >> np.uint8(i & 7)) & np.uint8(1) else down


@_kernel("void(float32[::1], int64, uint8[::1], float32[::1], boolean)")
def _sign_encode(x, block, packed, scales, keep):
    _widest()
    tile = _tile(block)
    values = np.empty(tile, np.float32)
    for origin in range(0, x.size, tile):
        piece, bits = x[origin : origin + tile], packed[origin // 8 :]
        _pack_at_least(piece, np.float32(0), bits)  # a 1 for -0.0 too, and none for NaN
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), np.uintp((origin + start) // block)
            total = 0.0
            for chunk in range(start, stop, _CHUNK):
                end = min(chunk + _CHUNK, stop)
                _ask(piece, chunk + tile, end + tile)
                total += _sum_magnitudes(piece, chunk, end)
            up = np.float32(total / np.float64(stop - start))
            scales[b] = up
            if keep:
                _choose(bits, start, stop, up, -up, values)
        if keep:
            for i in range(piece.size):
                piece[i] -= values[i]


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    """See `gradwire.kernels.sign_encode`."""
    a, p, s = _array(x), _array(packed), _array(scales)
    pool.run(
        [
            functools.partial(_sign_encode, a[i:j], block, p[i // 8 :], s[i // block : -(-j // block)], keep)
            for i, j in pool.chunks(x.numel(), block)
        ]
    )


@_kernel("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _sign_decode(packed, scales, bits, block, into, alpha, overwrite):
    _widest()
    values, past_caches = np.empty(_TILE, np.float32), into.size >= _PAST_CACHES
    for origin in range(0, into.size, _TILE):
        piece, start, sent = into[origin : origin + _TILE], 0, 0
        while start < piece.size:
            up, stop = scales[np.uintp((origin + start) // block)], _end_of_block(start, origin, block, piece.size)
            _choose(packed[origin // 8 :], start, stop, up, -up, values)
            start = stop
            sent = _delivered(values, piece, sent, stop, alpha, overwrite, past_caches)
    _fence()


def sign_accumulate(packed: Tensor, scales: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.sign_accumulate`."""
    _decode(_sign_decode, packed, scales, 1, 1, block, into, alpha)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.sign_decode`."""
    _decode(_sign_decode, packed, scales, 1, 1, block, out, None)


@_inline
def _level_bits(levels):
    bits = 0
    while levels >> bits:
        bits += 1
    return bits


@_inline
def _qsgd_norm(x, start, stop, levels):
    """Return the norm to store and levels / norm, or 0 where all codes are to be 0."""
    norm = np.float32(np.sqrt(_sum_squares(x, start, stop)))
    inverse = np.float32(levels) / norm
    if np.isfinite(inverse) and np.isfinite(norm):
        return norm, inverse
    return (np.float32(0) if np.isfinite(norm) else norm), np.float32(0)


@_inline
def _qsgd_codes(x, start, stop, inverse, levels, sign_shift, codes, first, k0, k1):
    _widest()
    counter = np.uint32(first + start)
    for chunk in range(start, stop, _CHUNK):
        end = min(chunk + _CHUNK, stop)
        _ask(x, chunk + (stop - start), end + (stop - start))
        for i in range(chunk, end):
            u = _uniform_at(counter, k0, k1)
            counter = np.uint32(counter + np.uint32(1))
            level = min(np.int32(abs(x[np.uintp(i)]) * inverse + u), levels)
            negative = np.int32(x[np.uintp(i)] < np.float32(0))
            codes[np.uintp(i)] = np.int32(level | np.int32(negative << sign_shift))


@_kernel("void(float32[::1], int64, int64, int64, int64, int64, uint8[::1], float32[::1])")
def _qsgd_encode(x, levels, block, k0, k1, first, packed, norms):
    _widest()
    k0, k1, most, shift = np.uint32(k0), np.uint32(k1), np.int32(levels), np.int32(_level_bits(levels))
    bits, tile = _level_bits(levels) + 1, _tile(block)
    narrow, wide = np.empty(tile, np.uint8), np.empty(tile, np.int32)
    for origin in range(0, x.size, tile):
        piece = x[origin : origin + tile]
        at = np.uint32(first + origin)
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), np.uintp((origin + start) // block)
            norms[b], inverse = _qsgd_norm(piece, start, stop, levels)
            if inverse == np.float32(0):
                narrow[start:stop] = np.uint8(0)
                wide[start:stop] = np.int32(0)
            elif bits <= 8:
                _qsgd_codes(piece, start, stop, inverse, most, shift, narrow, at, k0, k1)
            else:
                _qsgd_codes(piece, start, stop, inverse, most, shift, wide, at, k0, k1)
        if bits <= 8:
            _pack(narrow[: piece.size], bits, packed[origin // 8 * bits :])
        else:
            _pack_wide_eights(wide[: piece.size], bits, packed[origin // 8 * bits :])


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    """See `gradwire.kernels.qsgd_encode`."""
    bits, words = levels.bit_length() + 1, uniform_words(key)
    a, p, s = _array(x), _array(packed), _array(norms)
    pool.run(
        [
            functools.partial(
                _qsgd_encode,
                *(a[i:j], levels, block, *words, i),
                *(p[i // 8 * bits :], s[i // block : -(-j // block)]),
            )
            for i, j in pool.chunks(x.numel(), block)
        ]
    )
    if keep:
        qsgd_accumulate(packed, norms, levels, block, x, -1.0)


@_inline
def _qsgd_values(codes, start, stop, mask, step, values):
    _widest()
    for i in range(start, stop):
        code = np.int32(codes[np.uintp(i)])
        value = np.float32(np.int32(code & mask)) * step
        values[np.uintp(i)] = -value if code > mask else value


@_kernel("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _qsgd_decode(packed, norms, levels, block, into, alpha, overwrite):
    _widest()
    bits, mask = _level_bits(levels) + 1, np.int32((1 << _level_bits(levels)) - 1)
    narrow, wide, values = np.empty(_TILE, np.uint8), np.empty(_TILE, np.int32), np.empty(_TILE, np.float32)
    past_caches = into.size >= _PAST_CACHES
    for origin in range(0, into.size, _TILE):
        piece, start, sent = into[origin : origin + _TILE], 0, 0
        if bits <= 8:
            _unpack(packed[origin // 8 * bits :], bits, narrow[: piece.size])
        else:
            _unpack_wide_eights(packed[origin // 8 * bits :], bits, wide[: piece.size])
        while start < piece.size:
            step = norms[np.uintp((origin + start) // block)] / np.float32(levels)
            stop = _end_of_block(start, origin, block, piece.size)
            if bits <= 8:
                _qsgd_values(narrow, start, stop, mask, step, values)
            else:
                _qsgd_values(wide, start, stop, mask, step, values)
            start = stop
            sent = _delivered(values, piece, sent, stop, alpha, overwrite, past_caches)
    _fence()


def qsgd_accumulate(packed: Tensor, norms: Tensor, levels: int, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.qsgd_accumulate`."""
    _decode(_qsgd_decode, packed, norms, levels.bit_length() + 1, levels, block, into, alpha)


def qsgd_decode(packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.qsgd_decode`."""
    _decode(_qsgd_decode, packed, norms, levels.bit_length() + 1, levels, block, out, None)
