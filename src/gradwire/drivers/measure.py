"""Times of routes on the group at hand, so that `Auto` can choose."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, layout_of
from gradwire.core.agreement import Agree
from gradwire.core.axis import Axis, SubGroups
from gradwire.core.collective import AllReduce
from gradwire.core.grain import flat_grain
from gradwire.core.link import Curve, TimedSize
from gradwire.core.program import along, apart
from gradwire.core.state import State
from gradwire.drivers.interpreter import Transport, ask, run_program
from gradwire.drivers.plan import GPU_GRAIN_NUMEL, GRAIN_NUMEL
from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Reducer
from gradwire.reducers.hierarchical import Hierarchical
from gradwire.reducers.step import Step


class TimedSample(NamedTuple):
    """Measure payloads of about `nbytes` in `rounds`, all candidates in turn, each `burst` times in a row."""

    nbytes: int
    rounds: int
    burst: int


SAMPLES = (
    TimedSample(1 << 12, 18, 4),
    TimedSample(1 << 14, 18, 4),
    TimedSample(1 << 16, 18, 3),
    TimedSample(1 << 18, 5, 1),
    TimedSample(1 << 20, 3, 1),
)
"""Where routes change places on links of 20 Mbit/s to 1 Gbit/s. Small ones are many, since their times scatter, and in
short bursts, since what slows a host down lasts: candidates are to share it."""


@dataclass(frozen=True, eq=False)
class Bench:
    """Where to measure: on which transport, device and axis.

    Attributes:
        axis: the ranks that reduce together; None is all.
        ranks: how many these are. A rank that is by itself, where others are not, takes no part.
    """

    transport: Transport
    device: torch.device
    axis: SubGroups | None = None
    ranks: int | None = None

    def step(self) -> Step:
        """Where a program of this rank runs."""
        rank, world_size = self.transport.rank, self.transport.world_size
        return Step(0, self.axis.index(rank) if self.axis else rank, self.ranks or world_size)

    def run(self, reducer: Reducer, x: Tensor) -> None:
        """Reduce a tensor, and forget the result."""
        is_apart = self.axis is not None and self.axis.size_of(self.transport.rank) < self.step().world_size
        x = x.to("meta") if is_apart else x
        program = reducer.reduce(flat_grain(x.numel(), device=str(x.device)), x, State(), self.step())
        if self.axis is not None and is_apart:
            program = apart(program, self.axis, self.step().world_size, self.device)
        elif self.axis is not None:
            program = along(program, self.axis)
        run_program(program, self.transport)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that reduce together, for all ranks."""
        ranks = range(self.transport.world_size)
        return tuple(dict.fromkeys((self.axis or Axis(len(ranks))).members(rank) for rank in ranks))

    def between(self, nodes: Hierarchical) -> Bench:
        """The same between the nodes of a hierarchy."""
        cut = nodes.nodes(self.step().world_size)
        return replace(self, axis=cut.between.within(self.axis), ranks=cut.count)


def curves(auto: Auto, bench: Bench) -> tuple[Curve, ...]:
    """Measure every candidate at every size; the same numbers on every rank: medians of the slowest rank's rounds.

    The sizes of the curves are bytes of payloads. No sample is larger than a grain.

    Every rank must call it at the same place, with equal arguments. It takes about seven seconds on four hosts at 200
    Mbit/s, and in proportion longer on a slower link.
    """
    table: list[list[float]] = []
    sizes = _sizes(auto.codec, GPU_GRAIN_NUMEL if bench.device.type == "cuda" else GRAIN_NUMEL)
    for numel, sample in sizes.values():
        x = torch.zeros(numel, dtype=torch.float32, device=bench.device)
        rounds = range(sample.rounds + 1)  # the first one makes connections, and buffers warm
        times = [[seconds(c, x, bench, sample.burst) for c in auto.candidates] for _ in rounds]
        mine = torch.tensor(times[1:], dtype=torch.float64, device=bench.device)
        slowest = ask(AllReduce(mine, "max"), bench.transport)
        table.append([statistics.median(column) for column in slowest.T.tolist()])
    return tuple(Curve(tuple(map(TimedSize, sizes, times))) for times in zip(*table, strict=True))


def _sizes(codec: Codec, most: int) -> dict[int, tuple[int, TimedSample]]:
    """Bytes of the payload of each sample, and the elements of its gradient, which has `most` of them at most."""
    found: dict[int, tuple[int, TimedSample]] = {}
    an_element = layout_of(codec, most, torch.float32).nbytes / most
    for sample in SAMPLES:
        numel = min(most, round(sample.nbytes / an_element))
        found.setdefault(layout_of(codec, numel, torch.float32).nbytes, (numel, sample))
    return found


def seconds(reducer: Reducer, x: Tensor, bench: Bench, burst: int = 1) -> float:
    """Time of one reduction of `x`, the mean of a `burst` that all ranks begin together."""
    ask(Agree(torch.zeros((), dtype=torch.bool, device=x.device)), bench.transport)
    start = time.perf_counter()
    for _ in range(burst):
        bench.run(reducer, x)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) / burst
