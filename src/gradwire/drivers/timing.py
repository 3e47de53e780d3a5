"""How long a step's communication takes by the alpha-beta model: every rank's program on tensors without data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from gradwire.core.axis import Axis, SubGroups
from gradwire.core.collective import AllGather, AllToAll, AllToAllV, Collective
from gradwire.core.link import Link
from gradwire.core.messages import SendRecv
from gradwire.core.program import Program, once
from gradwire.drivers.cost import MetaTransport, Parameters, form_of, requests_of, require_world, specs_of
from gradwire.drivers.interpreter import Interpreter, Script
from gradwire.drivers.lockstep import Meeting, VirtualTransport, together
from gradwire.drivers.plan import Plan, Wave, plan
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import Step
from gradwire.spec import as_method

Links = Mapping[SubGroups, Link]

_Letters = Sequence[tuple[int, int]]
"""Ranks, and how many bytes go to each."""


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
        world_size: ranks. Each is simulated, so the time that this takes grows with their number. It hardly grows with
            the model: what units ask for that are equal but for names is found out once.
        link: of every rank to every other.
        links: of those axes that have another, such as a fast one inside nodes.
        step: which.
        grain_numel: as in `plan`.

    >>> import torch
    >>> model = torch.nn.Linear(1000, 999)
    >>> round(step_s("none,exchange=ring", model, 4, Link(0.001, 1e-6), grain_numel=1 << 20), 3)
    6.006
    """
    reducer = as_method(reducer)
    require_world(reducer, world_size)
    planned = plan(specs_of(model), reducer, grain_numel)
    return _seconds([(unit,) for unit in planned.units], SimulatedMeeting(world_size, link, links or {}), step)


def waves_s(planned: Plan, world_size: int, link: Link, links: Links | None = None, step: int = 0) -> float:
    """Seconds of communication in one step of a plan, wave after wave: what the units of a wave send travels as one.

    Training keeps several waves in flight, which hides latency; here each waits for the one before it.

    Args:
        planned: of the parameters, which have no data.
        world_size, link, links, step: as of `step_s`.

    >>> from torch.nn import Linear, Sequential
    >>> model = Sequential(Linear(60, 50), Linear(50, 40))
    >>> planned = plan(specs_of(model), as_method("powersgd:2"))
    >>> round(waves_s(planned, 2, Link(1.0, 0.0))), round(step_s("powersgd:2", model, 2, Link(1.0, 0.0)))
    (4, 10)
    """
    return _seconds(planned.waves, SimulatedMeeting(world_size, link, links or {}), step)


def _seconds(waves: Sequence[Wave], clocks: SimulatedMeeting, index: int) -> float:
    """Seconds of a step whose waves follow one another."""
    reducers: list[Reducer] = []
    forms = [[form_of(unit, reducers) for unit in wave] for wave in waves]
    distinct = dict(zip(itertools.chain(*forms), itertools.chain(*waves), strict=True))

    def script(rank: int) -> Script[list[None]]:
        step = Step(index, rank, clocks.world_size)
        asked = {form: requests_of(unit, step) for form, unit in distinct.items()}
        interpreter = Interpreter[None](VirtualTransport(clocks, rank), window=1)
        return interpreter.script(len(waves), lambda wave: [_asking_again(asked[form]) for form in forms[wave]])

    together([script(rank) for rank in range(clocks.world_size)])
    return max(clocks.now)


def _asking_again(requests: Sequence[Collective]) -> Program[None]:
    """A program that asks for what another one has asked for, and computes nothing."""
    for request in requests:
        yield from once(request)


class SimulatedMeeting(Meeting):
    """A meeting that takes time, of ranks whose tensors have no data: `now` is each rank's clock, in seconds."""

    def __init__(self, world_size: int, link: Link, links: Links) -> None:
        super().__init__(world_size)
        self.now = [0.0] * world_size
        self._link, self._links = link, links
        self._shapes = MetaTransport(world_size)

    def perform(self, requests: Sequence[Collective]) -> list[Tensor]:
        """Let the time pass that it takes."""
        axis = requests[0].axis
        self.now = _after(requests, self.now, self._links.get(axis, self._link) if axis else self._link)
        return [self._shapes.answer(request) for request in requests]


def _after(requests: Sequence[Collective], clocks: list[float], link: Link) -> list[float]:
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
    letters = [_letters(request) for request in requests if isinstance(request, SendRecv | AllToAllV)]
    if letters:
        return _delivered(letters, clocks, link)
    n, first = len(requests), requests[0]
    return [max(clocks) + link.seconds(first.wire_bytes(n), rounds_of(first, n))] * n


def rounds_of(request: Collective, n: int) -> int:
    """Messages of a collective of n ranks that follow each other: all at once, or around a ring, twice where it sums.

    >>> import torch
    >>> rounds_of(AllGather(torch.zeros(1)), 4)
    3
    """
    if isinstance(request, AllToAll):
        return min(1, n - 1)
    return n - 1 if isinstance(request, AllGather) else 2 * (n - 1)


def _letters(request: SendRecv | AllToAllV) -> _Letters:
    """To whom a rank sends how many bytes, in order; rows go to the next rank first, so that not all meet at one."""
    if isinstance(request, SendRecv):
        return [(to, tensor.nbytes) for to, tensor in request.sends]
    n = len(request.sends)
    others = [(request.place + i) % n for i in range(1, n)]
    return [(to, request.sends[to]) for to in others]


def _delivered(letters: Sequence[_Letters], clocks: list[float], link: Link) -> list[float]:
    """Messages leave a rank one after the other, and enter one one after the other, as they come."""
    arrivals: list[list[tuple[float, float]]] = [[] for _ in letters]
    after = list(clocks)
    for rank, of_rank in enumerate(letters):
        for to, nbytes in of_rank:
            if nbytes:
                after[rank] += link.seconds(nbytes, 0)
                arrivals[to].append((after[rank] + link.alpha_s, link.seconds(nbytes, 0)))
    for rank, arriving in enumerate(arrivals):
        entered = 0.0
        for arrival, length in sorted(arriving):
            entered = max(entered + length, arrival)
        after[rank] = max(after[rank], entered)
    return after
