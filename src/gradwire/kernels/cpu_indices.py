# pyright: basic
"""Index coding in numba: one pass to write, one to read. `gradwire.kernels.indices` documents the format.

Words gather in registers and are stored when they are full; reading jumps from one set bit to the next. Every index
that is read is checked before it is used, so that a damaged payload ends the loop and nothing else.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import pool
from gradwire.kernels.cpu import _array, _Found, _kernel, _raw, _to_values, _trailing_zeros, _widest, topk
from gradwire.kernels.reference import CANONICAL_NAN
from gradwire.kernels.reference_indices import candidates


@_kernel("boolean(int32[::1], int64, boolean, uint64[::1])")
def _write(indices, bits, gaps, out):
    """Write the stream and zeros behind it; false where indices do not increase, or there is no room."""
    n, start = indices.size, indices.size * bits
    if start >> 6 >= out.size:
        return n == 0
    for w in range(out.size):
        out[w] = np.uint64(0)
    mask, b = np.uint64((1 << bits) - 1), np.uint64(bits)
    lows, filled, at = np.uint64(0), np.uint64(0), 0
    ones, ones_at = np.uint64(0), start >> 6
    previous, position = -1, -1
    for i in range(n):
        index = np.int64(indices[i])
        value = index - previous - 1 if gaps else index - i
        if index <= previous:
            return False
        previous = index
        low = np.uint64(value) & mask
        lows |= low << filled
        filled += b
        if filled >= np.uint64(64):
            out[at] = lows
            at += 1
            filled -= np.uint64(64)
            lows = low >> (b - filled)
        high = value >> bits
        position = position + 1 + high if gaps else high + i
        here = (start + position) >> 6
        if here != ones_at:
            if here >= out.size:
                return False
            out[ones_at] = ones
            ones, ones_at = np.uint64(0), here
        ones |= np.uint64(1) << np.uint64((start + position) & 63)
    out[ones_at] = ones
    if filled > np.uint64(0):
        out[at] |= lows  # whose word the ones may share
    return True


@_kernel("boolean(uint64[::1], int64, boolean, int64, int32[::1])")
def _read(words, bits, gaps, numel, out):
    """Read as many indices as `out` has; false where they are not there, do not increase or point outside."""
    n, start, last = out.size, out.size * bits, np.uint64(words.size - 1)
    mask = np.uint64((1 << bits) - 1)
    i, previous, before = 0, -1, -1
    if n == 0:
        return True
    for w in range(start >> 6, words.size):
        word, base = words[np.uintp(w)], np.int64(w * 64 - start)
        if base < 0:
            word &= ~np.uint64(0) << np.uint64(-base)
        while word != np.uint64(0):
            position = base + np.int64(_trailing_zeros(word))  # pyright: ignore[reportCallIssue]
            word &= word - np.uint64(1)
            value = np.int64(position - before - 1 if gaps else position - i) << bits
            at = np.uint64(i) * np.uint64(bits)
            shift, at = at & np.uint64(63), at >> np.uint64(6)
            low = words[at] >> shift
            low |= words[min(at + np.uint64(1), last)] << np.uint64(1) << (np.uint64(63) - shift)
            value |= np.int64(low & mask)
            index = value + (previous + 1 if gaps else i)
            if index <= previous or index >= numel:
                return False
            out[np.uintp(i)] = np.int32(index)
            previous, before = index, position
            i += 1
            if i == n:
                return True
    return False


@_kernel("int64[::1](int32[::1], int64[::1])")
def _high_sums(indices, tried):
    """The sum of gap >> b for each b tried."""
    _widest()
    sums = np.zeros(tried.size, np.int64)
    for t in range(tried.size):
        shift, total = np.int32(tried[t]), np.int64(indices[0] >> np.int32(tried[t])) if indices.size else 0
        for i in range(1, indices.size):
            total += np.int64((indices[i] - indices[i - 1] - np.int32(1)) >> shift)
        sums[t] = total
    return sums


def at_least(x: Tensor, tau: Tensor, values: Tensor) -> Tensor:
    """One pass; where there are too many, the largest of all are the largest of those above tau."""
    raw, least, most = _raw(x), int(min(_raw(tau.reshape(1))[0] & 0x7FFFFFFF, CANONICAL_NAN)), values.numel()
    # Each of several pieces may need room for all, and has it where few are wanted.
    apart = most <= raw.size // 8
    cuts = pool.chunks(raw.size) if apart else [(0, raw.size)]
    found = _Found(cuts, [min(most, j - i) for i, j in cuts], None if apart else values)
    if found.collect(raw, least) and sum(found.counts) <= most:
        for _, keys in found.pieces():
            _to_values(keys)
        indices, kept = found.closed_up(found.counts)
    else:
        indices, kept = topk(x, most)
    if kept.data_ptr() != values.data_ptr():
        values[: kept.numel()] = kept
    values[kept.numel() :] = 0
    return indices


def _words(packed: Tensor) -> np.ndarray:
    return _array(packed).view(np.uint64)


def encode(indices: Tensor, bits: int, out: Tensor) -> bool:
    """Elias-Fano."""
    return _write(_array(indices), bits, False, _words(out))


def decode(packed: Tensor, numel: int, count: int, bits: int) -> tuple[Tensor, bool]:
    """Elias-Fano; returns indices and whether they are sound."""
    indices = torch.empty(count, dtype=torch.int32)
    return indices, _read(_words(packed), bits, False, numel, _array(indices))


def encode_rice(indices: Tensor, numel: int, bits: int, out: Tensor) -> bool:
    """Rice, with the low bits that make this payload shortest."""
    whole, words = _array(indices), _words(out)
    some = int(np.searchsorted(whole, np.int32(numel)))  # a wider number would widen a copy of them all
    tried = np.array(candidates(bits), np.int64)
    used = (some * tried + some + _high_sums(whole[:some], tried) + 63) // 64
    best = int(used.argmin())
    if not 0 <= used[best] < words.size:
        return False
    words[0] = int(tried[best]) | int(used[best]) << 6 | some << 32
    return _write(whole[:some], int(tried[best]), True, words[1:])


def decode_rice(packed: Tensor, numel: int, count: int, bits: int) -> tuple[Tensor, bool]:
    """Rice; returns indices, those not there as `numel`, and whether they are sound."""
    indices = torch.empty(count, dtype=torch.int32)
    words, out = _words(packed), _array(indices)
    header = int(words[0])
    chosen, used, some = header & 63, header >> 6 & 0x3FFFFFF, header >> 32
    if chosen > 31 or used >= words.size or some > count:
        return indices.fill_(numel), False
    out[some:] = numel
    return indices, _read(words[1:], chosen, True, numel, out[:some])
