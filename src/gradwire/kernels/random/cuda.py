# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""Random indices from counters: `permuted_indices` and `stratified_indices`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.random.reference import permutation_domain, permutation_words, strata
from gradwire.kernels.triton.launch import ceil_div, launch, signed
from gradwire.kernels.triton.tiles import mix, word


@triton.jit
def _scaled(x, n):
    """mix(x) * n >> 32: uniform below n."""
    return tl.umulhi(mix(x), n)


@triton.jit
def _add_modulo(x, y, n):
    total = x + y
    return tl.where(total >= n, total - n, total)


@triton.jit
def _feistel(x, a, b, w0, w1, w2, w3, w4, w5):
    left = x // b
    right = x - left * b
    left = _add_modulo(left, _scaled(right ^ w0, a), a)
    right = _add_modulo(right, _scaled(left ^ w1, b), b)
    left = _add_modulo(left, _scaled(right ^ w2, a), a)
    right = _add_modulo(right, _scaled(left ^ w3, b), b)
    left = _add_modulo(left, _scaled(right ^ w4, a), a)
    right = _add_modulo(right, _scaled(left ^ w5, b), b)
    return left * b + right


@triton.jit(do_not_specialize=["k", "numel", "a", "b", "walks", "w0", "w1", "w2", "w3", "w4", "w5"])
def _permuted_indices(out, k, numel, a, b, walks, w0, w1, w2, w3, w4, w5, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    a, b, n = word(a), word(b), word(numel)
    w0, w1, w2, w3, w4, w5 = word(w0), word(w1), word(w2), word(w3), word(w4), word(w5)
    x = tl.where(at < k, at, 0).to(tl.uint32)
    x = _feistel(x, a, b, w0, w1, w2, w3, w4, w5)
    outside = tl.sum((x >= n).to(tl.int32))
    step = 0
    while (outside > 0) & (step < walks):
        x = tl.where(x < n, x, _feistel(x, a, b, w0, w1, w2, w3, w4, w5))
        outside = tl.sum((x >= n).to(tl.int32))
        step += 1
    tl.store(out + at, tl.where(x < n, x, x - n).to(tl.int32), mask=at < k)


def permuted_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    """See `gradwire.kernels.permuted_indices`. Walking goes on only in tiles where a point is still outside."""
    out = torch.empty(k, dtype=torch.int32, device=device)
    a, b, walks = permutation_domain(numel)
    words, tile = signed(permutation_words(seed)), 1024
    launch(_permuted_indices, ceil_div(k, tile), device, out, k, numel, a, b, walks, *words, TILE=tile, num_warps=4)
    return out


@triton.jit(do_not_specialize=["k", "numel", "size", "longer", "w0", "w1", "turn", "first"])
def _stratified_indices(out, k, numel, size, longer, w0, w1, turn, first, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    stratum = _add_modulo(tl.where(at < k, at, 0).to(tl.uint32), word(first), word(k))
    width = word(size) + (stratum < word(longer)).to(tl.uint32)
    within = _scaled(mix(stratum ^ word(w0)) ^ word(w1), width)
    place = stratum * word(size) + tl.minimum(stratum, word(longer)) + within
    tl.store(out + at, _add_modulo(place, word(turn), word(numel)).to(tl.int32), mask=at < k)


def stratified_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    out = torch.empty(k, dtype=torch.int32, device=device)
    if k:
        words, tile = signed(strata(seed, numel, k)), 1024
        launch(_stratified_indices, ceil_div(k, tile), device, out, k, numel, *words, TILE=tile, num_warps=4)
    return out
