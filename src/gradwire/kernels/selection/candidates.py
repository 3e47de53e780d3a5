# pyright: basic
"""Passes over a tensor that look at 64 magnitudes at a time, and a sample that guesses how large the largest are."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch

from gradwire.core import buffers
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import compiled, inline, raw_bits_of
from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN
from gradwire.kernels.runtime.vectors import at_least_64, count_ones, trailing_zeros

Words = np.ndarray[Any, Any]
"""The bits of float32 elements."""

RUN = 64


@inline
def bound_of(least):
    """What bits without their sign are to be compared with, so that all NaN are one, the largest magnitude."""
    if least <= 0x7F800000:
        return np.uint32(least)
    return np.uint32(0x7F800001 if least <= CANONICAL_NAN else 0x80000000)


@inline
def mask_of_64(raw, start, whole, bound):
    """Bit i is whether the magnitude of raw[start + i] reaches `bound`, for the next 64."""
    if start < whole:
        return at_least_64(raw, np.uintp(start), bound)
    word = np.uint64(0)
    for i in range(start, raw.size):
        reaches = np.uint32(raw[np.uintp(i)] & np.uint32(0x7FFFFFFF)) >= bound
        word |= np.uint64(reaches) << np.uint64(i - start)
    return word


@inline
def write_chosen(raw, start, word, first, indices, values, n):
    """Write index and value of what `word` chooses of raw[start : start + 64] from `n` on; return where that ends.

    Bits are taken off one by one. Asking of each element whether it is chosen would be guessed wrong by the processor
    each time that it is.
    """
    while word != np.uint64(0):
        i = np.uintp(start) + np.uintp(trailing_zeros(word))
        word &= word - np.uint64(1)
        indices[n], values[n] = np.int32(first + np.int64(i)), raw[i]
        n += np.uintp(1)
    return n


@compiled("void(uint32[::1], int64, int64, int32[::1], uint32[::1])")
def _write_from(raw, first, least, indices, values):
    """Write elements of magnitude `least` or more, and where they are: there is room for just these."""
    n, whole, bound = np.uintp(0), raw.size // RUN * RUN, bound_of(least)
    for start in range(0, raw.size, RUN):
        n = write_chosen(raw, start, mask_of_64(raw, start, whole, bound), first, indices, values, n)


@compiled("void(uint32[::1], int64, int64, int64, int32[::1], uint32[::1])")
def write_largest(raw, first, threshold, quota, indices, values):
    """Write those above `threshold` and the first `quota` equal to it: there is room for just these."""
    above, bound, whole, n = bound_of(threshold + 1), bound_of(threshold), raw.size // RUN * RUN, np.uintp(0)
    for start in range(0, raw.size, RUN):
        if n == np.uintp(indices.size):
            break
        word = mask_of_64(raw, start, whole, above)
        tied = mask_of_64(raw, start, whole, bound) & ~word if quota > 0 else np.uint64(0)
        while tied != np.uint64(0) and quota > 0:
            word |= tied & (~tied + np.uint64(1))
            tied &= tied - np.uint64(1)
            quota -= 1
        n = write_chosen(raw, start, word, first, indices, values, n)


@compiled("int64(uint32[::1], int64)")
def _count_from(raw, least):
    """How many magnitudes are at least `least`."""
    count, bound, whole = np.uint64(0), bound_of(least), raw.size // RUN * RUN
    for start in range(0, raw.size, RUN):
        count += count_ones(mask_of_64(raw, start, whole, bound))
    return np.int64(count)


def pieces_of(raw: Words) -> list[Words]:
    """The pieces of a tensor that threads look through, in order."""
    return [raw[i:j] for i, j in pool.chunks(raw.size)]


def counts_from(pieces: list[Words], least: int) -> list[int]:
    """How many of each piece are of magnitude `least` or more."""
    tasks = [functools.partial(_count_from, piece, least) for piece in pieces]
    return pool.run(tasks, numel=sum(piece.size for piece in pieces))


def magnitudes_of(raw: Words) -> Words:
    """|x| as integers, which order as |x| does, all NaN alike and on top; new."""
    magnitudes = np.bitwise_and(raw, np.uint32(0x7FFFFFFF), out=new_words(raw.size))
    return np.minimum(magnitudes, np.uint32(CANONICAL_NAN), out=magnitudes)


def kth_largest(words: Words, k: int) -> int:
    """The k-th largest of `words`, which are left in another order."""
    words.partition(words.size - k)
    return int(words[words.size - k])


def new_words(n: int) -> Words:
    """An array of `n` words that holds nothing yet."""
    return raw_bits_of(buffers.empty((n,), torch.float32, torch.device("cpu")))


_SAMPLE = 4096
"""So few elements say well enough where the k-th largest lies."""

SAMPLED = 1 << 17
"""Smaller tensors are looked through whole."""


def guessed_least(raw: Words, k: int) -> int:
    """A magnitude that the k-th largest almost surely reaches, and few others do; 1 at least.

    Among s elements of a sample the number of those that belong to the k largest of n has the mean s k / n. The guess
    lies six standard deviations further down, since what is drawn at equal distances is not quite drawn at random. To
    find the k-th largest without it all magnitudes have to be partitioned: a step of `topk:0.01` codes for 2.6 to 3.4
    times as long.
    """
    apart = max(1, raw.size // _SAMPLE)
    while math.gcd(apart, 210) > 1:  # for who sees every tenth element sees a tenth of a matrix's columns
        apart += 1
    sample, density = magnitudes_of(raw[::apart]), k / raw.size
    mean, deviation = density * sample.size, (density * (1 - density) * sample.size) ** 0.5
    return max(1, kth_largest(sample, min(sample.size, int(mean + 6 * deviation + 2))))


def candidates_from(pieces: list[Words], least: int, counts: list[int]) -> list[tuple[Words, Words]]:
    """Indices and bits of elements of magnitude `least` or more, by piece, when `counts_from` has counted them.

    Counting first costs a pass over memory, and nothing is reserved that is not needed.
    """
    starts = itertools.accumulate((piece.size for piece in pieces[:-1]), initial=0)
    found = [(new_words(n).view(np.int32), new_words(n)) for n in counts]
    tasks = [
        functools.partial(_write_from, piece, start, least, *rooms)
        for piece, start, rooms in zip(pieces, starts, found, strict=True)
    ]
    pool.run(tasks, numel=sum(piece.size for piece in pieces))
    return found


def magnitudes_of_all(pieces: list[Words]) -> Words:
    """The magnitudes of several pieces, one after the other; new."""
    return magnitudes_of(pieces[0]) if len(pieces) == 1 else np.concatenate([magnitudes_of(piece) for piece in pieces])
