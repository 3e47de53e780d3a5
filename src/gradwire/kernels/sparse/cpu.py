# pyright: basic
"""Sparse tensors on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, raw_bits_of
from gradwire.kernels.runtime.tiles import RANDOM_ACCESS_WEIGHT


@compiled("void(float32[::1], int32[::1], float32[::1])")
def _gather(x, indices, out):
    for i in range(indices.size):
        out[i] = x[np.uint32(indices[i])]


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    source, at, o = array_of(x), array_of(indices), array_of(out)
    pool.run(
        [
            functools.partial(_gather, source, at[i:j], o[i:j])
            for i, j in pool.chunks(at.size, weight=RANDOM_ACCESS_WEIGHT)
        ]
    )


@compiled("void(float32[::1], int32[::1], float32[::1], float32)")
def _scatter_add(into, indices, values, alpha):
    for i in range(indices.size):
        into[np.uint32(indices[i])] += values[i] * alpha


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """One thread where indices may repeat: the order of addition must not depend on the number of threads."""
    o, at, v = array_of(into), array_of(indices), array_of(buffers.as_dtype(values, torch.float32))
    cuts = pool.chunks(at.size, weight=RANDOM_ACCESS_WEIGHT) if distinct else [(0, at.size)]
    pool.run([functools.partial(_scatter_add, o, at[i:j], v[i:j], np.float32(alpha)) for i, j in cuts])


@compiled("void(float32[::1], int32[::1], float32[::1])")
def _add_within(into, indices, values):
    """into[indices] += values, where there is such an element."""
    for i in range(indices.size):
        place = np.uint32(indices[i])
        if place < np.uint32(into.size):
            into[place] += values[i]


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """One thread for what is added: indices of a damaged payload may repeat."""
    _add_within(array_of(out.zero_()), array_of(indices), array_of(buffers.as_dtype(values, torch.float32)))


@compiled("uint32(uint32[::1])")
def _largest_index(raw):
    largest = np.uint32(0)
    for i in range(raw.size):
        largest = max(largest, raw[i])
    return largest


def indices_within(indices: Tensor, numel: int) -> bool:
    """Whether all lie in [0, numel). Negative ones look huge as unsigned."""
    return not indices.numel() or int(_largest_index(raw_bits_of(indices))) < numel
