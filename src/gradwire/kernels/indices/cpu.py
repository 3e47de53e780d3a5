# pyright: basic
"""Index coding in numba, in pieces that are written and read at once. `gradwire.kernels.indices` documents the format.

Low bits are packed a tile at a time, as codes are. High parts gather in a register that is stored with each of them,
and are read by taking off set bits one by one. What is read is checked before anyone uses it, so that a damaged payload
ends a loop and nothing else.

Pieces are there for dense selections on several threads: on one thread for each stream a step of `topk:0.1` codes a
quarter longer on two threads. `topk:0.01` has too few indices to be cut.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.indices.reference import candidates
from gradwire.kernels.packing.cpu import pack_codes, pack_one_by_one, unpack_codes
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import RANDOM_ACCESS_WEIGHT
from gradwire.kernels.runtime.vectors import count_ones, trailing_zeros

_TILE = 1024
"""Indices coded at a time: a multiple of 64, so that low bits end with a word."""


def _cuts(count: int) -> list[pool.Chunk]:
    return pool.chunks(count, 64, weight=RANDOM_ACCESS_WEIGHT)


def _words(packed: Tensor) -> np.ndarray:
    return array_of(packed).view(np.uint64)


# Writing ----------------------------------------------------------------------------------------------------


@compiled("void(int32[::1], int64, int64, int64[::1], int64[::1])")
def _high_sums(indices, begin, stop, tried, sums):
    """The sum of gap >> b of indices[begin:stop], for each b tried."""
    for t in range(tried.size):
        shift = np.int32(tried[t])
        total = np.int64(indices[0] >> shift) if begin == 0 and stop > 0 else 0
        for i in range(max(begin, 1), stop):
            gap = np.int32(indices[np.uintp(i)] - indices[np.uintp(i - 1)] - np.int32(1))
            total += np.int64(gap >> shift)
        sums[t] = total


@inline
def _split(indices, origin, gaps, bits, lows, steps):
    """Low parts from `origin` on, and how far each high part ends from the one before; false where they do not rise."""
    mask, shift, falls, skip = np.int32((1 << bits) - 1), np.int32(bits), np.int32(0), 0
    if origin == 0:  # nothing stands before the first
        first = indices[0]
        lows[0], steps[0] = first & mask, (first >> shift) + np.int32(1)
        falls, skip = np.int32(first < 0), 1
    for i in range(skip, steps.size):
        place = np.int32(origin + i)
        index, previous = indices[np.uintp(origin + i)], indices[np.uintp(origin + i - 1)]
        falls = np.int32(falls | np.int32(index <= previous))  # of which a difference may tell nothing: it wraps
        gap = np.int32(index - previous - np.int32(1))
        value = gap if gaps else np.int32(index - place)
        other = np.int32(0) if gaps else np.int32((previous - place + np.int32(1)) >> shift)
        lows[np.uintp(i)] = value & mask
        steps[np.uintp(i)] = np.int32((value >> shift) - other + np.int32(1))
    return falls == 0


@inline
def _sum_of(steps):
    total = 0
    for i in range(steps.size):
        total += np.int64(steps[np.uintp(i)])
    return total


@compiled("boolean(int32[::1], int64, int64, int64, boolean, int64, uint64[::1], uint64[::1])")
def _write(indices, begin, stop, bits, gaps, before, out, shared):
    """Write indices[begin:stop] to words of zeros; false where they do not increase, or there is no room.

    `before` is where the high part before them ends. The first word of high parts, which others may write to as well,
    is returned instead: `shared` becomes that word's place and its bits.
    """
    start, packed = indices.size * bits, out.view(np.uint8)
    narrow, lows, steps = np.empty(_TILE, np.uint8), np.empty(_TILE, np.int32), np.empty(_TILE, np.int32)
    position = start + before
    first = at = (position + 1) >> 6
    first_bits = word = np.uint64(0)
    for origin in range(begin, stop, _TILE):
        size, i = min(_TILE, stop - origin), 0
        if not _split(indices, origin, gaps, bits, lows[:size], steps[:size]):
            return False
        if (position + _sum_of(steps[:size])) >> 6 >= out.size:
            return False
        bytes_ = packed[origin * bits // 8 : ((origin + size) * bits + 7) // 8]
        if 0 < bits <= 8:
            for j in range(size):
                narrow[np.uintp(j)] = np.uint8(lows[np.uintp(j)])
            pack_codes(narrow[:size], bits, bytes_)
        elif bits:
            pack_one_by_one(lows[:size], bits, bytes_)
        while i < size and (position + np.int64(steps[np.uintp(i)])) >> 6 == first:
            position += np.int64(steps[np.uintp(i)])
            first_bits |= np.uint64(1) << np.uint64(position & 63)
            i += 1
        for j in range(i, size):  # each step stores a word: where words end is not to be guessed
            position += np.int64(steps[np.uintp(j)])
            here = position >> 6
            word = (word if here == at else np.uint64(0)) | np.uint64(1) << np.uint64(position & 63)
            out[np.uintp(here)] = word
            at = here
    shared[0], shared[1] = np.uint64(first), first_bits
    return True


def _write_all(
    indices: np.ndarray, bits: int, gaps: bool, befores: list[int], cuts: list[pool.Chunk], out: np.ndarray
) -> bool:
    """Write the stream and zeros behind it; false where indices do not increase, or there is no room."""
    if max(befores) + 1 + indices.size * bits >> 6 >= out.size or min(befores) < -1:
        return False
    out[:] = 0
    shared = [np.empty(2, np.uint64) for _ in cuts]
    pieces = zip(cuts, befores, shared, strict=True)
    done = pool.run([functools.partial(_write, indices, *cut, bits, gaps, b, out, s) for cut, b, s in pieces])
    if not all(done):
        return False
    for at, word in shared:
        out[at] |= word
    return True


def encode(indices: Tensor, numel: int, bits: int, out: Tensor) -> bool:
    """Write indices in Elias-Fano's code."""
    whole, cuts = array_of(indices), _cuts(indices.numel())
    if whole[-1] >= numel:
        return False
    befores = [-1, *(((int(whole[i - 1]) - i + 1) >> bits) + i - 1 for i, _ in cuts[1:])]
    return _write_all(whole, bits, False, befores, cuts, _words(out))


def encode_rice(indices: Tensor, numel: int, bits: int, out: Tensor) -> bool:
    """Rice, with the low bits that make this payload shortest."""
    whole, words = array_of(indices), _words(out)
    some = int(np.searchsorted(whole, np.int32(numel)))  # a wider number would widen a copy of them all
    if some < whole.size and (whole[some:] != numel).any():
        return False
    whole, cuts = whole[:some], _cuts(some)
    tried = np.array(candidates(bits), np.int64)
    sums = np.empty((len(cuts), tried.size), np.int64)
    pool.run([functools.partial(_high_sums, whole, *cut, tried, row) for cut, row in zip(cuts, sums, strict=True)])
    used = (some * tried + some + sums.sum(0) + 63) // 64
    best = int(used.argmin())
    if not 0 <= used[best] < words.size:
        return False
    words[0] = int(tried[best]) | int(used[best]) << 6 | some << 32
    if some == 0:
        words[1:] = 0
        return True
    befores, total = [-1], 0
    for (_, stop), highs in zip(cuts[:-1], sums[:, best].tolist()[:-1], strict=True):
        total += highs
        befores.append(total + stop - 1)
    return _write_all(whole, int(tried[best]), True, befores, cuts, words[1:])


# Reading ----------------------------------------------------------------------------------------------------


@inline
def _read_lows(words, bits, begin, narrow, lows):
    """The low parts from `begin`, a multiple of 8, on, of which the words hold as many as are wanted."""
    if bits == 0:
        for i in range(lows.size):
            lows[np.uintp(i)] = np.int32(0)
    elif bits <= 8:
        packed = words.view(np.uint8)[begin * bits // 8 : ((begin + lows.size) * bits + 7) // 8]
        unpack_codes(packed, bits, narrow[: lows.size])
        for i in range(lows.size):
            lows[np.uintp(i)] = np.int32(narrow[np.uintp(i)])
    else:
        mask, last = np.uint64((1 << bits) - 1), np.uint64(words.size - 1)
        for i in range(lows.size):
            at = np.uint64(begin + i) * np.uint64(bits)
            shift, at = at & np.uint64(63), at >> np.uint64(6)
            low = words[at] >> shift
            low |= words[min(at + np.uint64(1), last)] << np.uint64(1) << (np.uint64(63) - shift)
            lows[np.uintp(i)] = np.int32(low & mask)


@inline
def _word_of_highs(words, w, start, before):
    """Word `w` without the low parts and the high parts up to `before`."""
    skip = start + before + 1 - w * 64
    return words[np.uintp(w)] >> np.uint64(skip) << np.uint64(skip) if skip > 0 else words[np.uintp(w)]


@compiled("boolean(uint64[::1], int64, boolean, int64, int64, int64[:, ::1])")
def _starts(words, bits, gaps, count, piece, starts):
    """For each piece, where the high part before it ends, and the index before it; false where there are too few."""
    start, seen, i = count * bits, 0, 0
    w = start >> 6
    word, sum_ = _word_of_highs(words, w, start, -1), 0
    narrow, lows = np.empty(_TILE, np.uint8), np.empty(_TILE, np.int32)
    starts[0, 0] = starts[0, 1] = -1
    for p in range(1, starts.shape[0]):
        wanted = p * piece
        while seen + np.int64(count_ones(word)) < wanted:
            seen += np.int64(count_ones(word))
            w += 1
            if w >= words.size:
                return False
            word = words[np.uintp(w)]
        rest = word
        for _ in range(wanted - seen - 1):
            rest &= rest - np.uint64(1)
        before = w * 64 - start + np.int64(trailing_zeros(rest))
        high = (before - wanted + 1) << bits
        last = 0  # the low part of the index before the piece
        while i < wanted:
            size = min(_TILE, wanted - i)
            _read_lows(words, bits, i, narrow, lows[:size])
            for j in range(size):
                sum_ += np.int64(lows[np.uintp(j)])
            last = np.int64(lows[np.uintp(size - 1)])
            i += size
        low = sum_ if gaps else last
        starts[p, 0], starts[p, 1] = before, high + low + wanted - 1
    return True


@compiled("boolean(uint64[::1], int64, boolean, int64, int64, int64, int64[::1], int32[::1])")
def _read(words, bits, gaps, numel, begin, stop, since, out):
    """Read indices[begin:stop]; false where they are not there, do not increase or point outside."""
    start, before, previous = out.size * bits, since[0], since[1]
    places, narrow, lows = np.empty(_TILE + 128, np.int32), np.empty(_TILE, np.uint8), np.empty(_TILE, np.int32)
    w, n = (start + before + 1) >> 6, np.uintp(0)
    sum_ = previous - ((before - begin + 1) << bits) - (begin - 1)
    for i in range(begin, stop, _TILE):
        size = min(_TILE, stop - i)
        while n < np.uintp(size):
            if w >= words.size:
                return False
            word, base = _word_of_highs(words, w, start, before), w * 64 - start
            while word != np.uint64(0):
                places[n] = np.int32(base + np.int64(trailing_zeros(word)))
                word &= word - np.uint64(1)
                n += np.uintp(1)
            w += 1
        _read_lows(words, bits, i, narrow, lows[:size])
        for j in range(size):
            high, at = (np.int64(places[np.uintp(j)]) - (i + j)) << bits, i + j
            sum_ += np.int64(lows[np.uintp(j)])
            index = high + at + (sum_ if gaps else np.int64(lows[np.uintp(j)]))
            if not gaps and index <= previous:  # gaps cannot but increase
                return False
            out[np.uintp(at)], previous = np.int32(index), index
        if previous >= numel:
            return False
        left = n - np.uintp(size)
        for j in range(np.int64(left)):
            places[np.uintp(j)] = places[np.uintp(size + j)]
        n = left
    return True


def _read_all(words: np.ndarray, bits: int, gaps: bool, numel: int, out: np.ndarray) -> bool:
    """Read as many indices as `out` has; false where they are not there, do not increase or point outside."""
    if out.size == 0 or out.size * bits >> 6 >= words.size:
        return out.size == 0
    cuts = _cuts(out.size)
    starts = np.empty((len(cuts), 2), np.int64)
    if not _starts(words, bits, gaps, out.size, cuts[0][1], starts):
        return False
    pieces = zip(cuts, starts, strict=True)
    return all(
        pool.run([functools.partial(_read, words, bits, gaps, numel, *cut, since, out) for cut, since in pieces])
    )


def decode(packed: Tensor, numel: int, count: int, bits: int) -> tuple[Tensor, bool]:
    """Elias-Fano; returns indices and whether they are sound."""
    indices = buffers.empty((count,), torch.int32, packed.device)
    return indices, _read_all(_words(packed), bits, False, numel, array_of(indices))


def decode_rice(packed: Tensor, numel: int, count: int, bits: int) -> tuple[Tensor, bool]:
    """Rice; returns as many indices as there are, and whether they are sound."""
    words = _words(packed)
    header = int(words[0])
    chosen, used, some = header & 63, header >> 6 & 0x3FFFFFF, header >> 32
    if chosen > 31 or used >= words.size or some > count:
        return torch.empty(0, dtype=torch.int32), False
    indices = buffers.empty((some,), torch.int32, packed.device)
    return indices, _read_all(words[1:], chosen, True, numel, array_of(indices))
