"""Times of routes on the group at hand, so that `Auto` can choose."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.agreement import Agree
from gradwire.core.collective import AllReduce, Axis
from gradwire.core.grain import flat_grain
from gradwire.core.link import Curve, TimedSize
from gradwire.core.program import along
from gradwire.core.state import State
from gradwire.drivers.interpreter import Transport, ask, run_program
from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Program, Reducer, Step
from gradwire.reducers.hierarchical import Hierarchical


class TimedSample(NamedTuple):
    """Measure `nbytes` in `rounds`, all candidates in turn, each `burst` times in a row."""

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
    """Where to measure: on which transport, device and axis."""

    transport: Transport
    device: torch.device
    axis: Axis | None = None

    def step(self) -> Step:
        """Where a program of this rank runs."""
        if self.axis is None:
            return Step(0, self.transport.rank, self.transport.world_size)
        return Step(0, self.axis.index(self.transport.rank), self.axis.size)

    def run(self, program: Program) -> None:
        """Run a program to its end."""
        run_program(program if self.axis is None else along(program, self.axis), self.transport)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that reduce together, for all ranks."""
        ranks = range(self.transport.world_size)
        return tuple(dict.fromkeys((self.axis or Axis(len(ranks))).members(rank) for rank in ranks))

    def between(self, nodes: Hierarchical) -> Bench:
        """The same between the nodes of a hierarchy."""
        _, axis = nodes.axes(self.step().world_size)
        return replace(self, axis=axis.within(self.axis))


def curves(auto: Auto, bench: Bench) -> tuple[Curve, ...]:
    """Measure every candidate at every size; the same numbers on every rank: medians of the slowest rank's rounds.

    Every rank must call it at the same place, with equal arguments. It takes about seven seconds on four hosts at 200
    Mbit/s, and in proportion longer on a slower link.
    """
    table: list[list[float]] = []
    for sample in SAMPLES:
        x = torch.zeros(sample.nbytes // 4, dtype=torch.float32, device=bench.device)
        rounds = range(sample.rounds + 1)  # the first one makes connections, and buffers warm
        times = [[seconds(c, x, bench, sample.burst) for c in auto.candidates] for _ in rounds]
        mine = torch.tensor(times[1:], dtype=torch.float64, device=bench.device)
        slowest = ask(AllReduce(mine, "max"), bench.transport)
        table.append([statistics.median(column) for column in slowest.T.tolist()])
    sizes = [sample.nbytes for sample in SAMPLES]
    return tuple(Curve(tuple(map(TimedSize, sizes, times))) for times in zip(*table, strict=True))


def seconds(reducer: Reducer, x: Tensor, bench: Bench, burst: int = 1) -> float:
    """Time of one reduction of `x`, the mean of a `burst` that all ranks begin together."""
    grain = flat_grain(x.numel(), device=str(x.device))
    ask(Agree(torch.zeros((), dtype=torch.bool, device=x.device)), bench.transport)
    start = time.perf_counter()
    for _ in range(burst):
        bench.run(reducer.reduce(grain, x, State(), bench.step()))
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) / burst
