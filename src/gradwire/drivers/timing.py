"""How long a step's communication takes by the alpha-beta model: every rank's program on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.core.collective import AllGather, AllToAll, Axis, Collective, SendRecv
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.link import Link
from gradwire.drivers.cost import answer, meta_specs, sent_bytes
from gradwire.drivers.plan import plan
from gradwire.reducers.base import Reduced, Reducer, Step, advance

Links = Mapping[Axis, Link]


def step_s(
    reducer: Reducer,
    model: nn.Module | Sequence[ParameterSpec],
    world_size: int,
    link: Link,
    links: Links | None = None,
    step: int = 0,
    grain_numel: int | None = None,
) -> float:
    """Seconds of communication in one step, grain after grain: nothing overlaps and coding takes no time.

    Args:
        reducer: what serves the model.
        model: whose gradients.
        world_size: ranks; all of their programs run, so time grows with it.
        link: of every rank to every other.
        links: of those axes that have another, such as a fast one inside nodes.
        step: which.
        grain_numel: as in `plan`.

    >>> from gradwire.spec import parse
    >>> ring, model = parse("none,exchange=ring"), nn.Linear(1000, 999)
    >>> round(step_s(ring, model, 4, Link(0.001, 1e-6), grain_numel=1 << 20), 3)
    6.006
    """
    planned = plan(meta_specs(model), reducer, grain_numel)
    return sum(reduction_s(unit.reducer, unit.grain, world_size, link, links, step) for unit in planned.units)


def reduction_s(
    reducer: Reducer, grain: Grain, world_size: int, link: Link, links: Links | None = None, step: int = 0
) -> float:
    """Seconds until the last rank has the mean of one grain, whose device is "meta"."""
    steps = [Step(step, rank, world_size) for rank in range(world_size)]
    x = torch.empty(grain.shape, dtype=grain.dtype, device="meta")
    programs = [reducer.reduce(grain, torch.empty_like(x), reducer.init(grain, s), s) for s in steps]
    clocks, inbox = [0.0] * world_size, list[Tensor | None]([None] * world_size)
    while True:
        turns = [advance(program, value) for program, value in zip(programs, inbox, strict=True)]
        requests = [turn for turn in turns if not isinstance(turn, Reduced)]
        if len(requests) < world_size:
            return max(clocks)
        axis = requests[0].axis
        serving = (links or {}).get(axis, link) if axis else link
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
