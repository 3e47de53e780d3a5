"""Kernels of aggregation rules: what n rows, one a rank, have in common, column by column or as vectors.

As in `gradwire.kernels` there are two speeds, `reference` in torch and `cpu` in numba, which takes
float32 on the CPU. Both give the same bits, on every processor: sums over a row have the order of
`runtime.torch_blocks.add_segments`.

`rows` is contiguous, of shape (n, numel); `out` has `numel` elements of the rows' dtype and is written in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.robust import reference

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "mean_around_median",
    "products",
    "squared_distances",
    "trimmed_mean",
    "weighted_sum",
]

_mean_around_median = Kernel(reference.mean_around_median, "cpu")
_products = Kernel(reference.products, "cpu", "meta")
_squared_distances = Kernel(reference.squared_distances, "cpu", "meta")
_trimmed_mean = Kernel(reference.trimmed_mean, "cpu")
_weighted_sum = Kernel(reference.weighted_sum, "cpu")


def _picked(kernel: Kernel[P, R], rows: Tensor) -> Callable[P, R]:
    made_for = rows.dtype == torch.float32 or rows.is_meta
    return kernel.on(rows.device, rows.numel()) if made_for else kernel.reference


def squared_distances(rows: Tensor) -> Tensor:
    """Return D of shape (n, n) in float64: D[i, j] = |rows[i] - rows[j]|^2, from differences, so nothing cancels.

    >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    return _picked(_squared_distances, rows)(rows)


def products(rows: Tensor) -> Tensor:
    """Return G of shape (n, n) in float64: G[i, j] = rows[i] . rows[j].

    >>> products(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    return _picked(_products, rows)(rows)


def trimmed_mean(rows: Tensor, trim: int, out: Tensor) -> None:
    """Write the mean of each column without its `trim` least and its `trim` greatest; NaN counts as the greatest.

    With trim = (n - 1) // 2 it is the median.

    >>> out = torch.empty(1)
    >>> trimmed_mean(torch.tensor([[1.0], [9.0], [3.0], [2.0]]), 1, out)
    >>> out
    tensor([2.5000])
    """
    _picked(_trimmed_mean, rows)(rows, trim, out)


def mean_around_median(rows: Tensor, keep: int, out: Tensor) -> None:
    """Write the mean of the `keep` values of each column that are nearest to its median; of equals, the greater stays.

    >>> out = torch.empty(1)
    >>> mean_around_median(torch.tensor([[1.0], [9.0], [3.0]]), 2, out)
    >>> out
    tensor([2.])
    """
    _picked(_mean_around_median, rows)(rows, keep, out)


def weighted_sum(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write sum_i weights[i] * rows[i], summed in float64 in order; a row of weight 0 may hold anything, NaN too.

    >>> out = torch.empty(2)
    >>> weighted_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.5], dtype=torch.float64), out)
    >>> out
    tensor([2., 3.])
    """
    _picked(_weighted_sum, rows)(rows, weights, out)
