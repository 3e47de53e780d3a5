"""Kernels of aggregation rules: what n rows, one a rank, have in common, column by column or as vectors.

As in `gradwire.kernels` there are two speeds, `reference_robust` in torch and `cpu_robust` in numba, which takes
float32 on the CPU. Both give the same bits, on every processor: sums over a row have the order of
`reference_matrices.add_segments`.

`rows` is contiguous, of shape (n, numel); `out` has `numel` elements of the rows' dtype and is written in full.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gradwire.kernels import choice, reference_robust

__all__ = ["mean_around_median", "products", "squared_distances", "trimmed_mean", "warm_up", "weighted_sum"]


@functools.cache
def _cpu_kernels() -> ModuleType | None:
    if choice.reference_only():
        return None
    try:
        from gradwire.kernels import cpu_robust
    except ImportError:
        return None
    return cpu_robust


def _kernels(rows: Tensor) -> ModuleType:
    fast = rows.device.type == "cpu" and rows.dtype == torch.float32
    return (_cpu_kernels() if fast else None) or reference_robust


def warm_up() -> None:
    """Call every kernel once, so that compiling is done before the first training step."""
    rows, out = torch.zeros(3, 8, dtype=torch.float32), torch.empty(8, dtype=torch.float32)
    squared_distances(rows)
    products(rows)
    trimmed_mean(rows, 1, out)
    mean_around_median(rows, 1, out)
    weighted_sum(rows, torch.ones(3, dtype=torch.float64), out)


def squared_distances(rows: Tensor) -> Tensor:
    """Return D of shape (n, n) in float64: D[i, j] = |rows[i] - rows[j]|^2, from differences, so nothing cancels.

    >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    return _kernels(rows).squared_distances(rows)


def products(rows: Tensor) -> Tensor:
    """Return G of shape (n, n) in float64: G[i, j] = rows[i] . rows[j].

    >>> products(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    return _kernels(rows).products(rows)


def trimmed_mean(rows: Tensor, trim: int, out: Tensor) -> None:
    """Write the mean of each column without its `trim` least and its `trim` greatest; NaN counts as the greatest.

    With trim = (n - 1) // 2 it is the median.

    >>> out = torch.empty(1)
    >>> trimmed_mean(torch.tensor([[1.0], [9.0], [3.0], [2.0]]), 1, out)
    >>> out
    tensor([2.5000])
    """
    _kernels(rows).trimmed_mean(rows, trim, out)


def mean_around_median(rows: Tensor, keep: int, out: Tensor) -> None:
    """Write the mean of the `keep` values of each column that are nearest to its median; of equals, the greater stays.

    >>> out = torch.empty(1)
    >>> mean_around_median(torch.tensor([[1.0], [9.0], [3.0]]), 2, out)
    >>> out
    tensor([2.])
    """
    _kernels(rows).mean_around_median(rows, keep, out)


def weighted_sum(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write sum_i weights[i] * rows[i], summed in float64 in order; a row of weight 0 may hold anything, NaN too.

    >>> out = torch.empty(2)
    >>> weighted_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.5], dtype=torch.float64), out)
    >>> out
    tensor([2., 3.])
    """
    _kernels(rows).weighted_sum(rows, weights, out)
