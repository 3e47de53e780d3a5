"""The kernels of aggregation rules in plain torch: what each does, on any device and in float32 or float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.kernels.runtime.torch_blocks import add_segments

_CHUNK = 1 << 15
"""Columns at a time, so that temporaries stay small: whole segments of the sums."""


def squared_distances(rows: Tensor) -> Tensor:
    n = rows.shape[0]
    out = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for start, stop in _chunks(rows):
        here = rows[:, start:stop]
        for i in range(n - 1):
            away = (here[i + 1 :] - here[i]).double()
            out[i, i + 1 :] = add_segments(out[i, i + 1 :], away * away)
    return out + out.T


def products(rows: Tensor) -> Tensor:
    n = rows.shape[0]
    out = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for start, stop in _chunks(rows):
        here = rows[:, start:stop].double()
        for i in range(n):
            out[i] = add_segments(out[i], here * here[i])
    return out


def trimmed_mean(rows: Tensor, trim: int, out: Tensor) -> None:
    n = rows.shape[0]
    for start, stop in _chunks(rows):
        ordered = _ordered(rows[:, start:stop])
        out[start:stop] = _in_turn(ordered[trim : n - trim]) / (n - 2 * trim)


def mean_around_median(rows: Tensor, keep: int, out: Tensor) -> None:
    n = rows.shape[0]
    for start, stop in _chunks(rows):
        v = _ordered(rows[:, start:stop])
        median = v[n // 2] if n % 2 else v[n // 2 - 1] * 0.5 + v[n // 2] * 0.5
        first = torch.zeros(stop - start, dtype=torch.int64, device=rows.device)
        for dropped in range(n - keep):
            last = first + (n - 1 - dropped)
            low, high = v.gather(0, first[None])[0], v.gather(0, last[None])[0]
            first += (median - low > high - median).long()
        place = torch.arange(n, device=rows.device)[:, None]
        kept = torch.where((place >= first) & (place < first + keep), v, torch.zeros_like(v))
        out[start:stop] = _in_turn(kept) / keep


def weighted_sum(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    for start, stop in _chunks(rows):
        terms = rows[:, start:stop].double() * weights[:, None]
        out[start:stop] = _in_turn(torch.where(weights[:, None] == 0, torch.zeros_like(terms), terms))


def _chunks(rows: Tensor) -> Iterator[tuple[int, int]]:
    numel = rows.shape[1]
    return ((start, min(start + _CHUNK, numel)) for start in range(0, numel, _CHUNK))


def _ordered(rows: Tensor) -> Tensor:
    """Each column in ascending order, what is no number as the greatest."""
    return torch.where(rows.isnan(), math.inf, rows).sort(dim=0).values


def _in_turn(rows: Tensor) -> Tensor:
    """The sum of the rows from the first to the last, from +0, so that it is the same wherever it is taken."""
    return functools.reduce(torch.add, rows.unbind(0), torch.zeros_like(rows[0]))
