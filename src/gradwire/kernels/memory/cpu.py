# pyright: basic
"""Memories on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.random.cpu import mix
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled
from gradwire.kernels.runtime.vectors import float_of


@compiled("void(float32[::1], uint16[::1], float32)")
def _add_bf16(x, r, alpha):
    for i in range(x.size):
        x[i] += float_of(np.uint32(np.uint32(r[i]) << np.uint32(16))) * alpha


def add_bf16_(x: Tensor, r: Tensor, alpha: float) -> None:
    a, h = array_of(x), array_of(r.view(torch.int16)).view(np.uint16)
    pool.run([functools.partial(_add_bf16, a[i:j], h[i:j], np.float32(alpha)) for i, j in pool.chunks(x.numel())])


@compiled("void(float32[::1], float32[::1], float32)")
def _add_scaled(into, x, alpha):
    for i in range(into.size):
        into[i] += x[i] * alpha


def add_scaled_(into: Tensor, x: Tensor, alpha: float) -> None:
    a, b = array_of(into.view(-1)), array_of(x.view(-1))
    tasks = [functools.partial(_add_scaled, a[i:j], b[i:j], np.float32(alpha)) for i, j in pool.chunks(into.numel())]
    pool.run(tasks)


@compiled("void(uint32[::1], uint16[::1], int64, int64, int64)")
def _round_bf16(raw, out, first, k0, k1):
    k0, k1, first = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for i in range(raw.size):
        word = np.uint32(raw[i])
        noise = mix(np.uint32(mix(np.uint32(np.uint32(first + np.uint32(i)) ^ k0)) ^ k1)) >> np.uint32(16)
        up = np.uint32(np.uint32(word + noise) >> np.uint32(16))
        cut = np.uint32(word >> np.uint32(16))
        quiet = np.uint32(0x40) if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint32(0)
        finite = (up & np.uint32(0x7F80)) != np.uint32(0x7F80) and (cut & np.uint32(0x7F80)) != np.uint32(0x7F80)
        out[i] = np.uint16(up if finite else cut | quiet)


def round_bf16(x: Tensor, seed: int, out: Tensor) -> None:
    raw, h, words = array_of(x).view(np.uint32), array_of(out.view(torch.int16)).view(np.uint16), uniform_words(seed)
    pool.run([functools.partial(_round_bf16, raw[i:j], h[i:j], i, *words) for i, j in pool.chunks(x.numel())])
