"""A dry run of what a plan uses, before the first step: so kernels are compiled or loaded when that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, flat_grain, matrix_grain
from gradwire.drivers.lockstep import Lockstep
from gradwire.drivers.plan import Unit
from gradwire.reducers.base import Reducer

MOST_NUMEL = 1 << 22
"""Elements of all virtual ranks together: enough for kernels that only large tensors take."""

FEWEST_NUMEL = 1 << 12
MOST_RANKS = 8
"""Virtual ranks, where a method does not say how many there must be."""

STEPS = (0, 1, 1 << 20)
"""The first step, one with a state behind it, and one after all schedules."""


def dry_run(units: Iterable[Unit], world_size: int) -> None:
    """Run each distinct reducer of `units` on made-up gradients, on virtual ranks: all that is compiled is then ready.

    Nothing is sent and no state is touched. With compiled kernels on disk it takes a fraction of a second.

    >>> from gradwire.spec import parse
    >>> dry_run([Unit(flat_grain(10), parse("int4"))], world_size=2)
    """
    for grain, reducer in _distinct(units, world_size):
        try:
            _run(reducer, grain, _virtual_ranks(reducer, world_size))
        except CompositionError:  # one that wants exactly as many ranks as there are, as a mean with weights does
            _run(reducer, grain, world_size)


def _distinct(units: Iterable[Unit], world_size: int) -> Iterator[Unit]:
    """Each reducer once for each dtype and device, with the largest grain it has."""
    largest: dict[object, Unit] = {}
    for unit in units:
        kind = (unit.reducer, unit.grain.dtype, unit.grain.device, len(unit.grain.shape))
        if kind not in largest or largest[kind].grain.numel < unit.grain.numel:
            largest[kind] = unit
    for grain, reducer in largest.values():
        yield Unit(_smaller(grain, max(FEWEST_NUMEL, MOST_NUMEL // world_size)), reducer)


def _smaller(grain: Grain, most: int) -> Grain:
    """A grain of the same kind with no more than about so many elements."""
    device = str(grain.device)
    if len(grain.shape) == 1:
        return flat_grain(max(1, min(grain.numel, most)), "dry-run", grain.dtype, device)
    batch, rows, columns = grain.shape
    rows = max(1, min(rows, most // max(1, columns)))
    return matrix_grain(rows, columns, max(1, min(batch, 2)), "dry-run", grain.dtype, device)


def _virtual_ranks(reducer: Reducer, world_size: int) -> int:
    """As many ranks as there are, or fewer where that does not change what the reducer does."""
    return world_size if reducer.axes(world_size) else min(world_size, max(MOST_RANKS, reducer.fewest_ranks))


def _run(reducer: Reducer, grain: Grain, ranks: int) -> None:
    lockstep = Lockstep(reducer, grain, ranks)
    lockstep.weigh([1.0] * ranks)
    for lockstep.index in STEPS:
        lockstep.reduce([_gradient(grain, rank) for rank in range(ranks)])


def _gradient(grain: Grain, rank: int) -> Tensor:
    """Values of many sizes, without a random number from anywhere."""
    x = torch.arange(1, grain.numel + 1, dtype=torch.float32, device=grain.device)
    return (x * (1.0 + 0.1 * rank)).sin_().pow_(3).to(grain.dtype).view(grain.shape)
