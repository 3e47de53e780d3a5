# pyright: basic
"""Random numbers on CPUs, in numba."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.random.reference import (
    CENTRE,
    LOG_2,
    LOGARITHM,
    SQRT_HALF,
    TAIL,
    permutation_domain,
    permutation_words,
    strata,
    uniform_words,
)
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import RANDOM_ACCESS_WEIGHT


@inline
def mix(x):
    """The hash of `random.reference.uniform`."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inline
def uniform_at(counter, k0, k1):
    """Element `counter` of `random.reference.uniform`."""
    word = mix(np.uint32(mix(np.uint32(counter ^ k0)) ^ k1))
    # By way of int32: few processors turn unsigned vectors into floats.
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@inline
def _scale_word(word, n):
    return np.uint32((np.uint64(word) * np.uint64(n)) >> np.uint64(32))


@inline
def _add_modulo(x, y, n):
    total = np.uint32(x + y)
    return min(total, np.uint32(total - n))  # below n the difference wraps round and is the greater


@inline
def _feistel(x, a, b, w0, w1, w2, w3, w4, w5):
    # Exact: a quotient of 32-bit integers keeps clear of the next integer by more than float64 rounds.
    left = np.uint32(np.float64(x) / np.float64(b))
    right = np.uint32(x - np.uint32(left * b))
    left = _add_modulo(left, _scale_word(mix(np.uint32(right ^ w0)), a), a)
    right = _add_modulo(right, _scale_word(mix(np.uint32(left ^ w1)), b), b)
    left = _add_modulo(left, _scale_word(mix(np.uint32(right ^ w2)), a), a)
    right = _add_modulo(right, _scale_word(mix(np.uint32(left ^ w3)), b), b)
    left = _add_modulo(left, _scale_word(mix(np.uint32(right ^ w4)), a), a)
    right = _add_modulo(right, _scale_word(mix(np.uint32(left ^ w5)), b), b)
    return np.uint32(left * b + right)


@compiled("void(int32[::1], int64, int64, int64, int64, int64, uint32[::1])")
def _permuted_indices(out, first, numel, a, b, walks, words):
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


def permuted_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    out = buffers.empty((k,), torch.int32, device)
    o, words = array_of(out), np.array(permutation_words(seed), np.uint32)
    a, b, walks = permutation_domain(numel)
    cuts = pool.chunks(k, weight=RANDOM_ACCESS_WEIGHT)
    pool.run([functools.partial(_permuted_indices, o[i:j], i, numel, a, b, walks, words) for i, j in cuts])
    return out


@compiled("void(int32[::1], int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _stratified_indices(out, begin, numel, k, size, longer, w0, w1, turn, first):
    w0, w1, n, k = np.uint32(w0), np.uint32(w1), np.uint32(numel), np.uint32(k)
    size, longer, turn, at = np.uint32(size), np.uint32(longer), np.uint32(turn), np.uint32(begin)
    first = np.uint32(first)
    for i in range(out.size):
        stratum = _add_modulo(at, first, k)
        at = np.uint32(at + np.uint32(1))
        width = np.uint32(size + np.uint32(stratum < longer))
        within = _scale_word(mix(np.uint32(mix(np.uint32(stratum ^ w0)) ^ w1)), width)
        place = np.uint32(np.uint32(stratum * size) + np.uint32(min(stratum, longer) + within))
        out[i] = np.int32(_add_modulo(place, turn, n))


def stratified_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    out = buffers.empty((k,), torch.int32, device)
    if k:
        o, words = array_of(out), strata(seed, numel, k)
        cuts = pool.chunks(k, weight=RANDOM_ACCESS_WEIGHT)
        pool.run([functools.partial(_stratified_indices, o[i:j], i, numel, k, *words) for i, j in cuts])
    return out


@inline
def _polynomial(coefficients, x):
    total = coefficients[-1]
    for i in range(len(coefficients) - 2, -1, -1):
        total = total * x + coefficients[i]
    return total


@inline
def _log(x):
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = m + m, e - 1
    s = (m - 1.0) / (m + 1.0)
    return s * _polynomial(LOGARITHM, s * s) + float(e) * LOG_2


@compiled("void(float32[::1], int64, int64, int64)")
def _gaussian(out, first, k0, k1):
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for i in range(out.size):
        u = np.float64(uniform_at(counter, k0, k1)) + 2.0**-25
        counter = np.uint32(counter + np.uint32(1))
        q = u - 0.5
        if abs(q) <= 0.425:
            centre = 0.180625 - q * q
            out[i] = q * _polynomial(CENTRE[0], centre) / _polynomial(CENTRE[1], centre)
        else:
            tail = math.sqrt(-_log(u if q < 0 else 1.0 - u)) - 1.6
            far = _polynomial(TAIL[0], tail) / _polynomial(TAIL[1], tail)
            out[i] = -far if q < 0 else far


def gaussian(seed: int, numel: int) -> Tensor:
    out, words = torch.empty(numel, dtype=torch.float32), uniform_words(seed)
    o, chunks = array_of(out), pool.chunks(numel, 1, 8)
    pool.run([functools.partial(_gaussian, o[i:j], i, *words) for i, j in chunks])
    return out


@inline
def word_at(counter, k0, k1):
    """The 32 random bits of which `uniform_at` takes the upper 24."""
    return mix(np.uint32(mix(np.uint32(counter ^ k0)) ^ k1))
