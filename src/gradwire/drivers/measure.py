"""Times of routes on the group at hand, so that `Auto` can choose among them."""

from __future__ import annotations

import statistics
import time
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.collective import Agree, AllReduce, Collective
from gradwire.core.grain import flat_grain
from gradwire.core.state import State
from gradwire.drivers.coalesce import coalesce
from gradwire.drivers.process_group import GroupTransport, run_program
from gradwire.reducers.auto import Auto, Curve, Point
from gradwire.reducers.base import Reducer, Step


class Sample(NamedTuple):
    """Measure `nbytes` in `rounds`, all candidates in turn, each `burst` times in a row."""

    nbytes: int
    rounds: int
    burst: int


SAMPLES = (
    Sample(1 << 12, 9, 8),
    Sample(1 << 14, 9, 8),
    Sample(1 << 16, 7, 3),
    Sample(1 << 18, 5, 1),
    Sample(1 << 20, 3, 1),
)
"""Where routes change places on links of 20 Mbit/s to 1 Gbit/s. Small ones are many, since their times scatter."""


def measured(reducer: Reducer, transport: GroupTransport, device: torch.device) -> Reducer:
    """Return `reducer` with every `Auto` in it told how long its candidates take; without one, as it is.

    Every rank must call it at the same place, with an equal reducer. Takes about three seconds on four hosts at 100
    Mbit/s.
    """
    if isinstance(reducer, Auto):
        return replace(reducer, curves=curves(reducer, transport, device))
    if not is_dataclass(reducer):
        return reducer
    changed = {f.name: _measured(getattr(reducer, f.name), transport, device) for f in fields(reducer) if f.init}
    same = all(changed[name] is getattr(reducer, name) for name in changed)
    return reducer if same else replace(reducer, **changed)


def _measured(value: Any, transport: GroupTransport, device: torch.device) -> Any:
    """The same for what a reducer is made of: reducers, and rules that pair conditions with reducers."""
    if isinstance(value, Reducer):
        return measured(value, transport, device)
    if isinstance(value, tuple):
        made = tuple(_measured(each, transport, device) for each in value)
        return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
    return value


def curves(auto: Auto, transport: GroupTransport, device: torch.device) -> tuple[Curve, ...]:
    """Measure every candidate at every size; the same numbers on every rank: medians of the slowest rank's rounds."""
    table: list[list[float]] = []
    for sample in SAMPLES:
        x = torch.zeros(sample.nbytes // 4, device=device)
        rounds = range(sample.rounds + 1)  # the first one makes connections, and buffers warm
        times = [[seconds(c, x, transport, sample.burst) for c in auto.candidates] for _ in rounds]
        slowest = _ask(AllReduce(torch.tensor(times[1:], dtype=torch.float64, device=device), "max"), transport)
        table.append([statistics.median(column) for column in slowest.T.tolist()])
    sizes = [sample.nbytes for sample in SAMPLES]
    return tuple(Curve(tuple(map(Point, sizes, times))) for times in zip(*table, strict=True))


def seconds(reducer: Reducer, x: Tensor, transport: GroupTransport, burst: int = 1) -> float:
    """Time of one reduction of `x`, the mean of a `burst` that all ranks begin together."""
    grain, step = flat_grain(x.numel(), device=str(x.device)), Step(0, transport.rank, transport.world_size)
    _ask(Agree(torch.zeros((), dtype=torch.bool, device=x.device)), transport)
    start = time.perf_counter()
    for _ in range(burst):
        run_program(reducer.reduce(grain, x, State(), step), transport)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) / burst


def _ask(request: Collective, transport: GroupTransport) -> Tensor:
    (batch,) = coalesce([(0, request)])
    return batch.split(transport.issue(batch).wait())[0]
