"""SketchedSGD: heavy hitters found in a sum of count sketches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import as_float32
from gradwire.codecs.topk import check_density, kept
from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True, eq=False)
class SentEntries:
    """scale * values at some indices."""

    indices: Tensor
    values: Tensor
    scale: float

    def subtract_from(self, x: Tensor) -> None:
        """x[indices] -= scale * values."""
        kernels.scatter_add_(x.view(-1), self.indices, self.values, alpha=-self.scale)


@dataclass(frozen=True)
class CountSketch(Reducer):
    """The largest entries of the *mean*, found without any rank knowing it (Ivkin et al. 2019, Algorithm 1).

    1. Every rank sketches x into rows * columns counters, which one all-reduce sums: sketches are linear.
    2. Each estimates every entry of the mean from the sum and takes the k of largest magnitude: the same on all.
    3. A second all-reduce carries the exact values of these k entries, which are the mean there; it is 0 elsewhere.

    Error feedback keeps what was not sent, which is exact. Bytes: rows * columns + k floats, columns = width * k,
    whatever the number of ranks, where top-k's all-gather grows with it; ranks all send the same entries. The hash is
    drawn anew each step, so that entries which collide once do not collide for ever.

    The error of one estimate is rarely beyond |x| sqrt(8 / columns), but with few rows some of d others err as far, and
    exact zeros that collide twice tie: of a hundred entries at that bound three rows find half, a spike of twice the
    bound nearly always. Where there is none the choice is near to random, larger
    entries never being less likely, so that k/d is a contraction in expectation over hashes, for ranks that agree. As
    for every choice made on the mean, no bound holds for a rank whose large entries others cancel.

    Where it deviates: the paper fetches exact values of P k candidates and keeps k of them; here all that is fetched is
    kept.

    Args:
        density: k = max(1, round(density * d)) entries are kept.
        rows: of the sketch, odd.
        width: columns for each of the k entries, 1 or more.

    Raises:
        CompositionError: density outside (0, 1], rows that are even, a width below 1.

    References:
        Ivkin, Rothchild, Ullah, Braverman, Stoica & Arora 2019, "Communication-efficient distributed SGD with
        sketching".

    >>> CountSketch(0.01).columns(100_000)
    4000
    """

    density: float = 0.01
    rows: int = 3
    width: float = 4.0

    keyed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.rows < 1 or self.rows % 2 == 0:
            raise CompositionError(f"{self.rows} rows: an estimate is their median, so take an odd number, e.g. 3 or 5")
        if not 1.0 <= self.width < math.inf:
            raise CompositionError(f"width {self.width} is below 1: fewer columns than entries to find")

    def columns(self, numel: int) -> int:
        """Columns of the sketch of a tensor."""
        return math.ceil(self.width * kept(self.density, numel))

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def contraction(self, grain: Grain) -> float | None:
        """k / d; see the class."""
        return kept(self.density, grain.numel) / grain.numel if grain.numel else 1.0

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Two all-reduces: of sketches, then of exact values."""
        flat = as_float32(x.reshape(-1))
        seed = step.key(grain, "hash").shared.stream_seed
        sketch = buffers.empty((self.rows, self.columns(flat.numel())), torch.float32, x.device)
        kernels.count_sketch(flat, seed, sketch)
        total = yield collective.AllReduce(sketch.div_(step.world_size), consumable=True)
        mean = step.empty(flat.numel(), flat, torch.float32)
        kernels.count_unsketch(total.contiguous(), seed, mean)
        indices = kernels.topk_indices(mean, kept(self.density, mean.numel()))
        part = kernels.gather(flat, indices).div_(step.world_size)
        values = yield collective.AllReduce(part)
        kernels.scatter_add_(mean.zero_(), indices, values)
        sent = SentEntries(indices, part, step.world_size)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, state)
