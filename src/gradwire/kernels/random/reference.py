"""Random numbers in plain torch; `gradwire.kernels.random` documents them."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.kernels.rounding import square_root

MASK32 = 0xFFFFFFFF
PERMUTATION_ROUNDS = 6


def key_words(seed: int, count: int) -> list[int]:
    """Return `count` 32-bit words from splitmix64 seeded with `seed`, the low half of each output first."""
    words: list[int] = []
    for j in range(1, -(-count // 2) + 1):
        z = (seed + j * 0x9E3779B97F4A7C15) % (1 << 64)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
        z ^= z >> 31
        words += [z & MASK32, z >> 32]
    return words[:count]


def uniform_words(seed: int) -> list[int]:
    """The two words that key `uniform`."""
    return key_words(seed, 2)


def permutation_words(seed: int) -> list[int]:
    """The words that key the rounds of `permuted_indices`, none of them shared with `uniform`."""
    return key_words(seed, 2 + PERMUTATION_ROUNDS)[2:]


T = TypeVar("T", Tensor, int)


def mix(x: T) -> T:
    """lowbias32 of values in [0, 2^32): of an int64 tensor, or a number."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    # 0x846CA68B - 2^32: the same product modulo 2^32, without overflow of int64.
    x = (x * -0x7B935975) & MASK32
    return x ^ (x >> 16)


def uniform(seed: int, numel: int, device: torch.device, start: int = 0) -> Tensor:
    """Draw (numel,) float32 uniform in [0, 1): element i depends on `seed` and start + i alone.

    Counter-based, and the same on every device; kernels that draw do so in their own loops. With c = start + i, below
    2^32:

        z_j = splitmix64's j-th output from seed `seed`;  k0, k1 = low and high half of z_1
        mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16   (mod 2^32)
        u = (mix(mix(c ^ k0) ^ k1) >> 8) * 2^-24

    References:
        `mix` is lowbias32 of Wellons, "Prospecting for hash functions" (2018); splitmix64 is of Steele, Lea &
        Flood 2014, "Fast splittable pseudorandom number generators".

    >>> cpu = torch.device("cpu")
    >>> bool((uniform(7, 5, cpu)[2:] == uniform(7, 3, cpu, start=2)).all())
    True
    """
    k0, k1 = uniform_words(seed)
    counter = torch.arange(start, start + numel, device=device, dtype=torch.int64)
    return (mix(mix(counter ^ k0) ^ k1) >> 8).to(torch.float32) * 2.0**-24


def permutation_domain(numel: int) -> tuple[int, int, int]:
    """Return (a, b, walks) for permutations of range(numel).

    The grid a * b >= numel is as near as can be: at most a - 1 points are too many, a fraction 1/sqrt(numel).
    After `walks` steps of cycle walking a point is still outside with chance 2^-64, and never where the
    excess is as small.
    """
    a = math.isqrt(max(numel, 1) - 1) + 1
    b = max(1, -(-numel // a))
    excess = a * b - numel
    walks = -(-128 // max(1, numel.bit_length() - 1))
    return a, b, min(excess, walks)


def permuted_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    """The first k values of a Feistel permutation."""
    a, b, walks = permutation_domain(numel)
    words = permutation_words(seed)
    x = _feistel(torch.arange(k, device=device, dtype=torch.int64), a, b, words)
    for _ in range(walks):
        x = torch.where(x < numel, x, _feistel(x, a, b, words))
    return torch.where(x < numel, x, x - numel).to(torch.int32)


def _feistel(x: Tensor, a: int, b: int, words: list[int]) -> Tensor:
    left, right = x // b, x % b
    for round_, word in enumerate(words):
        if round_ % 2 == 0:
            left = (left + ((mix(right ^ word) * a) >> 32)) % a
        else:
            right = (right + ((mix(left ^ word) * b) >> 32)) % b
    return left * b + right


def strata(seed: int, numel: int, k: int) -> tuple[int, int, int, int, int, int]:
    """Return what `stratified_indices` of k > 0 are made of: (size, longer, w0, w1, turn, first).

    There are `longer` strata of size + 1 and then some of `size`; `turn` is by how much the circle is turned; `first`
    is the first stratum whose index comes to lie behind the end, that is at the beginning.
    """
    w0, w1, *halves = key_words(seed, 2 + PERMUTATION_ROUNDS + 4)[2 + PERMUTATION_ROUNDS :]
    turn = ((halves[1] << 32 | halves[0]) * numel) >> 64
    size, longer = divmod(numel, k)
    end = numel - turn
    first = end // (size + 1) if end < longer * (size + 1) else longer + (end - longer * (size + 1)) // size
    if first < k:
        width = size + (first < longer)
        within = mix(mix(first ^ w0) ^ w1) * width >> 32
        first += int(first * size + min(first, longer) + within < end)
    return size, longer, w0, w1, turn, first


def stratified_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    """One of each stratum, in increasing order."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    size, longer, w0, w1, turn, first = strata(seed, numel, k)
    stratum = torch.arange(first, first + k, device=device, dtype=torch.int64) % k
    within = mix(mix(stratum ^ w0) ^ w1) * (size + (stratum < longer)) >> 32
    return ((stratum * size + stratum.clamp(max=longer) + within + turn) % numel).to(torch.int32)


CENTRE = (3.3871327179, 50.434271938, 159.29113202, 59.109374720), (1.0, 17.895169469, 78.757757664, 67.187563600)
TAIL = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103), (1.0, 0.73700164250, 0.12021132975)
"""Numerators and denominators of Wichura 1988, PPND7, lowest power first."""

LOGARITHM = tuple(2.0 / (2 * i + 1) for i in range(9))
LOG_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476


def gaussian(seed: int, numel: int) -> Tensor:
    u = uniform(seed, numel, torch.device("cpu")).double() + 2.0**-25
    q = u - 0.5
    centre = 0.180625 - q * q
    near = q * _polynomial(CENTRE[0], centre) / _polynomial(CENTRE[1], centre)
    tail = square_root(-_log(torch.where(q < 0, u, 1.0 - u))) - 1.6
    far = _polynomial(TAIL[0], tail) / _polynomial(TAIL[1], tail)
    return torch.where(q.abs() <= 0.425, near, torch.where(q < 0, -far, far)).float()


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's rule: a multiplication, then an addition, each rounded."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _log(x: Tensor) -> Tensor:
    """The natural logarithm of positive numbers: log m + e log 2 of x = m 2^e, log m = 2 atanh((m - 1) / (m + 1))."""
    m, e = torch.frexp(x)
    small = m < SQRT_HALF
    m, e = torch.where(small, m + m, m), torch.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    return s * _polynomial(LOGARITHM, s * s) + e.double() * LOG_2
