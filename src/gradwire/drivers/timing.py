"""How long a step's communication takes by the alpha-beta model: every rank's program on tensors without data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.core.collective import Agree, AllGather, AllToAll, Axis, Collective, SendRecv, Total
from gradwire.core.grain import Grain
from gradwire.core.link import Link
from gradwire.drivers.coalesce import add_grains, coalesce, sums_to_send
from gradwire.drivers.cost import Parameters, answer, meta_specs, require_world, sent_bytes
from gradwire.drivers.plan import plan
from gradwire.reducers.base import Reduced, Reducer, Step, advance
from gradwire.spec import as_method

Links = Mapping[Axis, Link]


def step_s(
    reducer: Reducer | str,
    model: Parameters,
    world_size: int,
    link: Link,
    links: Links | None = None,
    step: int = 0,
    grain_numel: int | None = None,
) -> float:
    """Seconds of communication in one step, grain after grain: nothing overlaps and coding takes no time.

    What the grains of a step ask for together, `Total`s and `Agree`s, is one collective for all of them.

    Args:
        reducer: what serves the model, or a spec.
        model: whose gradients, as in `cost`.
        world_size: ranks; all of their programs run, so time grows with it.
        link: of every rank to every other.
        links: of those axes that have another, such as a fast one inside nodes.
        step: which.
        grain_numel: as in `plan`.

    >>> model = torch.nn.Linear(1000, 999)
    >>> round(step_s("none,exchange=ring", model, 4, Link(0.001, 1e-6), grain_numel=1 << 20), 3)
    6.006
    """
    reducer = as_method(reducer)
    require_world(reducer, world_size)
    planned = plan(meta_specs(model), reducer, grain_numel)
    shared = _Shared()
    units = [_unit_s(unit.reducer, unit.grain, world_size, link, links, step, shared) for unit in planned.units]
    return sum(units) + shared.seconds(world_size, link)


def reduction_s(
    reducer: Reducer, grain: Grain, world_size: int, link: Link, links: Links | None = None, step: int = 0
) -> float:
    """Seconds until the last rank has the mean of one grain, whose device is "meta", in a step of that grain alone."""
    shared = _Shared()
    return _unit_s(reducer, grain, world_size, link, links, step, shared) + shared.seconds(world_size, link)


@dataclass
class _Shared:
    """What the grains of a step ask for together: the first totals of all programs, the second ones, ..., and flags."""

    totals: defaultdict[int, list[Total]] = field(default_factory=lambda: defaultdict[int, list[Total]](list))
    flags: list[Agree] = field(default_factory=list[Agree])

    def seconds(self, world_size: int, link: Link) -> float:
        """One collective for each round of totals that runs over ranks, and one for the flags."""
        sums = [batch for totals in self.totals.values() for batch in coalesce(sums_to_send(add_grains(totals)))]
        return sum(
            link.seconds(sent_bytes(batch, world_size), _rounds(batch.requests[0], world_size))
            for batch in (*sums, *coalesce(list(enumerate(self.flags))))
        )


def _unit_s(
    reducer: Reducer, grain: Grain, world_size: int, link: Link, links: Links | None, step: int, shared: _Shared
) -> float:
    """Seconds of one grain's own collectives; what it shares with others is left to `shared`."""
    steps = [Step(step, rank, world_size) for rank in range(world_size)]
    x = torch.empty(grain.shape, dtype=grain.dtype, device="meta")
    programs = [reducer.reduce(grain, torch.empty_like(x), reducer.init(grain, s), s) for s in steps]
    clocks, inbox = [0.0] * world_size, list[Tensor | None]([None] * world_size)
    stage = 0
    while True:
        turns = [advance(program, value) for program, value in zip(programs, inbox, strict=True)]
        requests = [turn for turn in turns if not isinstance(turn, Reduced)]
        if len(requests) < world_size:
            return max(clocks)
        first = requests[0]
        if isinstance(first, Total):
            shared.totals[stage].append(first)
            stage += 1
        elif isinstance(first, Agree):
            shared.flags.append(first)
        else:
            serving = (links or {}).get(first.axis, link) if first.axis else link
            clocks = _after(requests, clocks, serving)
        inbox = [answer(request, world_size) for request in requests]


def _after(requests: list[Collective], clocks: list[float], link: Link) -> list[float]:
    """When each rank is done with what all of them ask for."""
    n = len(requests)
    axis = requests[0].axis or Axis(n)
    after = list(clocks)
    for members in {axis.members(rank) for rank in range(n)}:
        done = _together([requests[rank] for rank in members], [clocks[rank] for rank in members], link)
        for rank, clock in zip(members, done, strict=True):
            after[rank] = clock
    return after


def _together(requests: list[Collective], clocks: list[float], link: Link) -> list[float]:
    rounds = [request for request in requests if isinstance(request, SendRecv)]
    if rounds:
        return _delivered(rounds, clocks, link)
    n, first = len(requests), requests[0]
    return [max(clocks) + link.seconds(sent_bytes(first, n), _rounds(first, n))] * n


def _rounds(request: Collective, n: int) -> int:
    """Messages that follow each other: all at once, or around a ring, twice where it sums."""
    if isinstance(request, AllToAll):
        return min(1, n - 1)
    return n - 1 if isinstance(request, AllGather) else 2 * (n - 1)


def _delivered(requests: list[SendRecv], clocks: list[float], link: Link) -> list[float]:
    """Messages leave a rank one after the other, and enter one one after the other, as they come."""
    arrivals: list[list[tuple[float, float]]] = [[] for _ in requests]
    after = list(clocks)
    for rank, request in enumerate(requests):
        for to, tensor in request.sends:
            if tensor.numel():
                after[rank] += link.seconds(tensor.nbytes, 0)
                arrivals[to].append((after[rank] + link.alpha_s, link.seconds(tensor.nbytes, 0)))
    for rank, letters in enumerate(arrivals):
        entered = 0.0
        for arrival, length in sorted(letters):
            entered = max(entered + length, arrival)
        after[rank] = max(after[rank], entered)
    return after
