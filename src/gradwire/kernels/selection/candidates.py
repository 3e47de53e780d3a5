# pyright: basic
"""Elements that may be among the largest: a sample guesses how large those are, and one pass collects them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline, raw_bits_of
from gradwire.kernels.runtime.tiles import AHEAD, prefetch_range
from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN
from gradwire.kernels.runtime.vectors import (
    COMPRESSES,
    at_least_16,
    at_least_64,
    close_up_16,
    close_up_places_16,
    count_ones,
    trailing_zeros,
    use_widest_vectors,
)


@inline
def magnitude_of(raw):
    """The bits of |x|, all NaN alike."""
    return min(np.uint32(raw & np.uint32(0x7FFFFFFF)), np.uint32(CANONICAL_NAN))


RUN = 64


@inline
def bound_of(least):
    """What bits without their sign are to be compared with, so that all NaN are one: as if they were `magnitude_of`."""
    if least <= 0x7F800000:
        return np.uint32(least)
    return np.uint32(0x7F800001 if least <= CANONICAL_NAN else 0x80000000)


@inline
def reaches(raw, bound):
    """Whether a magnitude is at least `bound`."""
    return np.uint32(raw & np.uint32(0x7FFFFFFF)) >= bound


@inline
def mask_of_64(raw, start, whole, bound):
    """Bit i is whether the magnitude of raw[start + i] reaches `bound`, for the next 64."""
    if start < whole:
        return at_least_64(raw, np.uintp(start), bound)
    word = np.uint64(0)
    for i in range(start, raw.size):
        word |= np.uint64(reaches(raw[np.uintp(i)], bound)) << np.uint64(i - start)
    return word


@inline
def choose_of_64(raw, start, whole, word, first, indices, values, n):
    """Write index and value of what `word` chooses of raw[start : start + 64] from `n` on; return where that ends."""
    if COMPRESSES and start < whole and n + np.uintp(RUN) <= np.uintp(indices.size) and count_ones(word) > np.uint64(1):
        for i in range(start, start + RUN, 16):
            mask = np.uint16(word)
            close_up_places_16(np.int32(first + i), mask, indices, n)
            close_up_16(raw, np.uintp(i), mask, values, n)
            n += np.uintp(count_ones(np.uint64(mask)))
            word >>= np.uint64(16)
        return n
    while word != np.uint64(0):
        i = np.uintp(start) + np.uintp(trailing_zeros(word))
        word &= word - np.uint64(1)
        indices[n], values[n] = np.int32(first + np.int64(i)), raw[i]
        n += np.uintp(1)
    return n


@compiled("int64(uint32[::1], int64, int64, int32[::1], uint32[::1])")
def _candidates(raw, first, least, indices, values):
    """Write each element of magnitude `least` or more, and where it is; return how many, or -1 where there is no room.

    A word says which of the next 64 are: most of a sparse selection are passed over unseen, and of a dense one every
    step writes something. Nothing is guessed element by element.
    """
    use_widest_vectors()
    n, whole, room, bound = np.uintp(0), raw.size // RUN * RUN, np.uintp(indices.size), bound_of(least)
    for start in range(0, raw.size, RUN):
        prefetch_range(raw, start + AHEAD, start + AHEAD + RUN)
        word = mask_of_64(raw, start, whole, bound)
        if n + np.uintp(count_ones(word)) > room:
            return -1
        n = choose_of_64(raw, start, whole, word, first, indices, values, n)
    return np.int64(n)


@compiled("int64(uint32[::1], int64)")
def count_at_least(raw, least):
    """How many magnitudes are at least `least`."""
    use_widest_vectors()
    count, bound, whole = np.uint64(0), bound_of(least), raw.size // RUN * RUN
    for start in range(0, raw.size, RUN):
        count += count_ones(mask_of_64(raw, start, whole, bound))
    return np.int64(count)


@compiled("int64(uint32[::1], int64, uint32[::1])")
def magnitudes_to(values, most, found):
    """Write the magnitudes up to `most`; return how many, or -1 where there is no room for them and 16 more."""
    use_widest_vectors()
    n, bound, whole = np.uintp(0), bound_of(most + 1), values.size // 16 * 16 if COMPRESSES else 0
    room = np.uintp(max(found.size - 16, 0))
    for i in range(0, whole, 16):
        if n >= room:
            return -1
        mask = np.uint16(~at_least_16(values, np.uintp(i), bound))
        close_up_16(values, np.uintp(i), mask, found, n)
        n += np.uintp(count_ones(np.uint64(mask)))
    for i in range(whole, values.size):
        if n >= room:
            return -1
        found[n] = values[np.uintp(i)]  # overwritten where it is not to be kept: nothing is guessed
        n += np.uintp(not reaches(values[np.uintp(i)], bound))
    for i in range(np.int64(n)):
        found[np.uintp(i)] = magnitude_of(found[np.uintp(i)])
    return np.int64(n)


Piece = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Places and values of what was selected in a piece of a tensor."""

_SAMPLE, _NEIGHBOURS = 4096, 4
"""As few say about where the k-th largest lies, and so many of them come from one cache line."""

SAMPLED = 1 << 17
_BUCKET = 18
"""Low bits of a magnitude that a sample is not asked about: a thirty-second of an octave."""


@inline
def _bucket(magnitude):
    """0 of zero alone, which most of a sparse tensor is; b from (b - 1 << _BUCKET) + 1 to b << _BUCKET."""
    return (np.int64(magnitude) + ((1 << _BUCKET) - 1)) >> _BUCKET


@inline
def _room(seen, each, numel):
    """For as many of `numel` as a sample has seen, and four standard deviations more; and a vector's width."""
    return min(numel, np.int64(each * (seen + 2 + 4 * np.sqrt(seen + 2.0)))) + 32


@compiled("void(uint32[::1], int64, int64, int64, int64, int64, int64[:, ::1])")
def _guess(raw, apart, few, many, least, piece, answers):
    """Where, in a sample of neighbours so far apart, the magnitudes of ranks `few` and `many` lie.

    Writes a row for each piece of the tensor: a magnitude that is no more than that of rank `many`; one that is no less
    than that of rank `few`; room for those from the first on, and for those between the two. `least` is taken for the
    first where it is not negative.
    """
    use_widest_vectors()
    runs, each = raw.size // apart, apart / _NEIGHBOURS
    seen = np.empty(runs * _NEIGHBOURS, np.uint16)
    counts = np.zeros(_bucket(CANONICAL_NAN) + 1, np.int32)
    for run in range(runs):
        for i in range(_NEIGHBOURS):
            bucket = _bucket(magnitude_of(raw[np.uintp(run * apart + i)]))
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


def guessed_bounds(raw: np.ndarray[Any, Any], cuts: list[pool.Chunk], k: int, least: int = -1) -> np.ndarray[Any, Any]:
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


class Candidates:
    """All elements of magnitude `least` or more, piece by piece: where they are, in one buffer, and their bits."""

    def __init__(self, raw: np.ndarray[Any, Any], cuts: list[pool.Chunk], least: int, rooms: list[int]) -> None:
        self._indices = torch.empty(sum(rooms), dtype=torch.int32)
        places, ends = array_of(self._indices), itertools.accumulate(rooms)
        buffers = [(places[end - room : end], new_words(room)) for end, room in zip(ends, rooms, strict=True)]
        both = zip(cuts, buffers, strict=True)
        self.counts = pool.run([functools.partial(_candidates, raw[i:j], i, least, *buffer) for (i, j), buffer in both])
        self.found = min(self.counts) >= 0  # or there was no room
        parts = zip(buffers, self.counts, strict=True)
        self.pieces = [(places[:n], found[:n]) for (places, found), n in parts] if self.found else []

    def closed_up(self, shares: list[slice], values: Tensor | None) -> Tensor:
        """The first of each piece's indices, side by side; and its bits as `values`, where these are given."""
        for (places, found), share in zip(self.pieces, shares, strict=True):
            n = share.stop - share.start
            array_of(self._indices)[share] = places[:n]
            if values is not None:
                values[share].copy_(torch.from_numpy(found[:n].view(np.float32)))
        return self._indices[: shares[-1].stop]


def new_words(n: int) -> np.ndarray[Any, Any]:
    """An array of `n` words that holds nothing yet."""
    return raw_bits_of(torch.empty(n, dtype=torch.float32))


def counts_at_least(raw: np.ndarray[Any, Any], cuts: list[pool.Chunk], least: int) -> list[int]:
    """How many of each piece are of magnitude `least` or more."""
    return pool.run([functools.partial(count_at_least, raw[i:j], least) for i, j in cuts])
