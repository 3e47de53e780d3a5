# pyright: basic
"""Selection on CPUs, in numba: candidates in one pass over memory, and a look at these."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, raw_bits_of
from gradwire.kernels.runtime.tiles import AHEAD, max_magnitude, prefetch_range
from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN
from gradwire.kernels.runtime.vectors import COMPRESSES, at_least_16, close_up_16, count_ones, use_widest_vectors
from gradwire.kernels.selection.candidates import (
    RUN,
    SAMPLED,
    Candidates,
    bound_of,
    choose_of_64,
    count_at_least,
    counts_at_least,
    guessed_bounds,
    magnitudes_to,
    mask_of_64,
    new_words,
    reaches,
)
from gradwire.kernels.sparse.cpu import scatter_add_


@compiled("uint32(uint32[::1])")
def _largest_raw(raw):
    return max_magnitude(raw, 0, raw.size)


def all_finite(x: Tensor) -> Tensor:
    raw = raw_bits_of(x).reshape(-1)
    largest = pool.run([functools.partial(_largest_raw, raw[i:j]) for i, j in pool.chunks(raw.size)])
    return torch.tensor(int(max(largest)) < 0x7F800000)


@compiled("void(int32[::1], uint32[::1], int64, int64, int32[::1], uint32[::1])")
def _emit(places, raw, threshold, quota, indices, values):
    """Write those above `threshold` and the first `quota` equal to it: there is room for just these.

    What is written may be where candidates stood that have been read.
    """
    use_widest_vectors()
    above, bound, n, i = bound_of(threshold + 1), bound_of(threshold), np.uintp(0), 0
    while i < raw.size and n < np.uintp(indices.size):
        if COMPRESSES and i + 16 <= raw.size and n + np.uintp(16) <= np.uintp(indices.size):
            mask = at_least_16(raw, np.uintp(i), above)
            if quota == 0 or mask == at_least_16(raw, np.uintp(i), bound):
                close_up_16(places, np.uintp(i), mask, indices, n)
                close_up_16(raw, np.uintp(i), mask, values, n)
                n += np.uintp(count_ones(np.uint64(mask)))
                i += 16
                continue
        for j in range(i, min(i + 16, raw.size)):
            if n == np.uintp(indices.size):
                break
            value = raw[np.uintp(j)]
            indices[n], values[n] = places[np.uintp(j)], value  # overwritten where it is not to be kept
            larger = np.int64(reaches(value, above))
            tied = np.int64(reaches(value, bound)) & ~larger & np.int64(quota > 0)
            n += np.uintp(larger | tied)
            quota -= tied
        i += 16


@compiled("void(uint32[::1], int64, int64, int64, int32[::1], uint32[::1])")
def _select(raw, first, threshold, quota, indices, values):
    """Write those above `threshold` and the first `quota` equal to it: there is room for just these."""
    above, bound, whole, n = bound_of(threshold + 1), bound_of(threshold), raw.size // RUN * RUN, np.uintp(0)
    for start in range(0, raw.size, RUN):
        prefetch_range(raw, start + AHEAD, start + AHEAD + RUN)
        if n == np.uintp(indices.size):
            break
        word = mask_of_64(raw, start, whole, above)
        tied = mask_of_64(raw, start, whole, bound) & ~word if quota > 0 else np.uint64(0)
        while tied != np.uint64(0) and quota > 0:
            word |= tied & (~tied + np.uint64(1))
            tied &= tied - np.uint64(1)
            quota -= 1
        n = choose_of_64(raw, start, whole, word, first, indices, values, n)


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Candidates in one pass, and a look at these: a sample guesses between which two magnitudes the k-th largest lies.

    Where it guessed wrong, and where there is little to look through, all are looked through.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.float32) if values is None else values
    raw, cuts = raw_bits_of(x), pool.chunks(x.numel())
    values = torch.empty(k, dtype=torch.float32) if values is None else values
    few = raw.size >= SAMPLED and 2 * k <= raw.size  # for candidates take twice the memory of what they are
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
    return topk(x, k)[0]


def _kth_largest(words: np.ndarray[Any, Any], k: int) -> int:
    """The k-th largest of `words`, which are left in another order."""
    words.partition(words.size - k)
    return int(words[words.size - k])


def _magnitudes(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    magnitudes = np.bitwise_and(raw, np.uint32(0x7FFFFFFF), out=new_words(raw.size))
    return np.minimum(magnitudes, np.uint32(CANONICAL_NAN), out=magnitudes)


def _by_sample(raw: np.ndarray[Any, Any], k: int, cuts: list[pool.Chunk], values: Tensor) -> Tensor | None:
    """The k largest, out of the few above a magnitude that the k-th largest is hardly ever below; or None."""
    guess = guessed_bounds(raw, cuts, k)
    (least, most), rooms = guess[0, :2].tolist(), guess[:, 2:].T.tolist()
    if sum(rooms[0]) > 2 * k + raw.size // 8:  # many are nearly equal
        return None
    candidates = Candidates(raw, cuts, least, rooms[0])
    if not candidates.found:
        return None
    pieces, counts = candidates.pieces, candidates.counts
    if sum(counts) < k:  # as of a sparse tensor, whose k-th largest is 0
        return _those_from(raw, cuts, 0, values, counts, [j - i for i, j in cuts]) if least == 1 else None
    low = [new_words(room) for room in rooms[1]]
    both = zip(pieces, low, strict=True)
    tasks = [functools.partial(magnitudes_to, found, most, some) for (_, found), some in both]
    lower = pool.run(tasks, numel=sum(counts))
    larger = [count - n for count, n in zip(counts, lower, strict=True)]
    rank = k - sum(larger)
    if min(lower) < 0 or rank < 1:
        return None
    low = [some[:n] for some, n in zip(low, lower, strict=True)]
    threshold = _kth_largest(low[0] if len(low) == 1 else np.concatenate(low), rank)
    above, at_least = (
        [n + count_at_least(some, least) for n, some in zip(larger, low, strict=True)]
        for least in (threshold + 1, threshold)
    )
    shares, direct, tasks = _shares(k, above, at_least), _can_be_written(values), []
    for (places, found), (quota, share) in zip(pieces, shares, strict=True):
        n = share.stop - share.start
        target = raw_bits_of(values)[share] if direct else found[:n]
        tasks.append(functools.partial(_emit, places, found, threshold, quota, places[:n], target))
    pool.run(tasks, numel=2 * sum(counts))
    return candidates.closed_up([share for _, share in shares], None if direct else values)


def _those_from(
    raw: np.ndarray[Any, Any],
    cuts: list[pool.Chunk],
    threshold: int,
    values: Tensor,
    above: list[int] | None = None,
    at_least: list[int] | None = None,
) -> Tensor:
    """The largest, of which `threshold` is the least; how many are above it in each piece, and no less than it."""
    above = counts_at_least(raw, cuts, threshold + 1) if above is None else above
    at_least = counts_at_least(raw, cuts, threshold) if at_least is None else at_least
    indices = torch.empty(values.numel(), dtype=torch.int32)
    found = values if _can_be_written(values) else torch.empty(values.numel(), dtype=torch.float32)
    at, words, tasks = array_of(indices), raw_bits_of(found), []
    for (i, j), (quota, share) in zip(cuts, _shares(at.size, above, at_least), strict=True):
        tasks.append(functools.partial(_select, raw[i:j], i, threshold, quota, at[share], words[share]))
    pool.run(tasks)
    if found is not values:
        values.copy_(found)
    return indices


def at_least(x: Tensor, tau: Tensor, values: Tensor) -> Tensor:
    """One pass; where there are too many, the largest of all are the largest of those above tau."""
    raw, least, most = (
        raw_bits_of(x),
        int(min(raw_bits_of(tau.reshape(1))[0] & 0x7FFFFFFF, CANONICAL_NAN)),
        values.numel(),
    )
    if raw.size == 0:
        return torch.empty(0, dtype=torch.int32)
    cuts = pool.chunks(raw.size)
    rooms = guessed_bounds(raw, cuts, most, least)[:, 2].tolist()
    if sum(rooms) > 2 * most + raw.size // 8:  # too many, it seems: then the largest of all are those wanted
        indices, _ = topk(x, most, values)
        if counts_at_least(raw_bits_of(values), [(0, most)], least)[0] == most:
            return indices
    candidates = Candidates(raw, cuts, least, rooms) if 2 * sum(rooms) <= raw.size else None
    if candidates is not None and not candidates.found:
        candidates = None
    counts = counts_at_least(raw, cuts, least) if candidates is None else candidates.counts
    if sum(counts) > most:
        return topk(x, most, values)[0]
    kept = values[: sum(counts)]
    values[kept.numel() :] = 0
    if candidates is None:
        return _those_from(raw, cuts, least, kept, [0] * len(cuts), counts)
    return candidates.closed_up([share for _, share in _shares(kept.numel(), counts, counts)], kept)


def topk_encode_keeping(x: Tensor, values: Tensor, indices: Tensor) -> None:
    indices.copy_(topk(x, indices.numel(), values)[0])
    scatter_add_(x, indices, values, -1.0, distinct=True)
