# pyright: basic
"""The low-rank and sketching kernels for CPUs, in numba. See `cpu` for the rules they keep."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu import _array, _kernel, _max_magnitude, _uniform_at
from gradwire.kernels.reference import uniform_words

# Factors ----------------------------------------------------------------------------------------------------


@_kernel("void(float32[::1], uint32[::1], int64, int64, int64)")
def _unit_rows(Q, raw, columns, k0, k1):
    k0, k1 = np.uint32(k0), np.uint32(k1)
    for start in range(0, Q.size, columns):
        largest = _max_magnitude(raw, start, start + columns)
        exponent = min(max(254 - np.int64(largest >> np.uint32(23)), 1), 254) - 127
        scale = np.float32(math.ldexp(1.0, exponent))
        for i in range(start, start + columns):
            if largest == 0:
                Q[i] = _uniform_at(np.uint32(i), k0, k1) * np.float32(2.0) - np.float32(1.0)
            else:
                Q[i] = Q[i] * scale


def unit_rows_(Q: Tensor, bits: int) -> None:
    """See `gradwire.kernels.lowrank.unit_rows_`."""
    q = _array(Q.view(-1))
    if q.size:
        _unit_rows(q, q.view(np.uint32), Q.shape[1], *uniform_words(bits))
