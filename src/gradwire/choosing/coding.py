"""How long a rank codes in a step on this machine: its programs on made-up gradients, without a network."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.messages import SendRecv
from gradwire.core.shapes import Shapes
from gradwire.drivers.cost import Parameters, form_of, meta_specs, require_world
from gradwire.drivers.interpreter import Answer, run_program, served
from gradwire.drivers.plan import Plan, Unit, plan
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import PAST_WARM_UPS, Step
from gradwire.spec import as_method

REPEATS = 3
"""Timed steps of each form, of which the shortest counts: whatever else a machine does makes a step longer."""

CACHES = 1 << 26
"""Bytes that are more than most processors' caches hold."""


def coding_device() -> torch.device:
    """Where gradients are coded if nobody says: on the GPU where PyTorch has one, else on the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def coding_s(
    method: Reducer | str,
    model: Parameters,
    world_size: int,
    *,
    grain_numel: int | None = None,
    repeats: int = REPEATS,
    device: torch.device | None = None,
) -> float:
    """Return the seconds that encoding, decoding and summing take one rank in a step, as measured on this machine.

        coding = sum over forms f of units: count(f) * min over repeats of (run of f - its collectives)

    A run of f begins with the copy of its gradient and ends with that of its mean, as a unit in training does.

    Grains are those that training has. Units that are equal but for names are timed once, so a model of billions of
    parameters takes about as long as one of millions. What counts is the time of the thread that codes, as it does in
    the figures of a run: a processor that other processes want meanwhile makes no difference. The other ranks are
    mirrors of this one: they answer at once, with what this rank sends, so that a rank decodes as many payloads as
    among `world_size` ranks. All cores are idle meanwhile; a backward pass that goes on beside it shares them. Before
    each run the processor's caches are filled with other data, as a training step fills them: coding takes up to 1.7
    times as long then (byte-GPT, AMD EPYC).

    Args:
        method: a reducer, or a spec.
        model: whose gradients, as in `gradwire.cost`.
        world_size: ranks.
        grain_numel: as in `gradwire.attach`.
        repeats: how often each form is timed.
        device: that codes; None takes that of `coding_device`.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or that needs more ranks; no model.

    >>> coding_s("int4", torch.nn.Linear(300, 300), world_size=2) > 0.0
    True
    """
    reducer = as_method(method)
    require_world(reducer, world_size)
    specs = [spec._replace(device=device or coding_device()) for spec in meta_specs(model)]
    return plan_coding_s(plan(specs, reducer, grain_numel), world_size, repeats)


def plan_coding_s(planned: Plan, world_size: int, repeats: int = REPEATS) -> float:
    """Return the same for grains that are planned already, those of a sharded model for instance.

    Args:
        planned: of parameters on the device that codes.
        world_size, repeats: as of `coding_s`.
    """
    return plans_coding_s([planned], world_size, repeats)[0]


def plans_coding_s(plans: Sequence[Plan], world_size: int, repeats: int = REPEATS) -> list[float]:
    """Return the same for each of several plans, whose units take turns.

    Args:
        plans: of parameters on one device, which codes.
        world_size, repeats: as of `coding_s`.
    """
    forms = [_Forms(planned, world_size) for planned in plans]
    timed = [unit for each in forms for unit in each.timed.values()]
    others = torch.zeros(CACHES // 4, device=timed[0].grain.device) if timed else torch.zeros(0)
    for index in range(PAST_WARM_UPS, PAST_WARM_UPS + 1 + repeats):
        for unit in timed:
            others.add_(1.0)
            unit.step(index)
    return [each.coding_s() for each in forms]


class _Forms:
    """The units of a plan, those that are equal but for names together."""

    def __init__(self, planned: Plan, world_size: int) -> None:
        self.timed, self._counts = dict[Hashable, TimedUnit](), Counter[Hashable]()
        reducers: list[Reducer] = []
        for unit in planned.units:
            form = form_of(unit, reducers)
            self._counts[form] += 1
            if form not in self.timed:
                self.timed[form] = TimedUnit(unit, world_size)

    def coding_s(self) -> float:
        """Seconds of all units of a step."""
        return sum(self._counts[form] * unit.least_s() for form, unit in self.timed.items())


class TimedUnit:
    """A unit that codes made-up gradients step by step, with what it keeps between steps."""

    def __init__(self, unit: Unit, world_size: int) -> None:
        grain, self._reducer = unit
        self.grain = grain
        self._clock = _clock(grain.device)
        given = torch.randn(grain.shape, generator=torch.Generator().manual_seed(0))
        self._given = given.to(grain.device, grain.dtype)
        self._buffer, self._mean = torch.empty_like(self._given), torch.empty_like(self._given.flatten())
        self._first = Step(PAST_WARM_UPS, 0, world_size, weight=1.0)
        self._state, self._taken_s = self._reducer.init(grain, self._first), list[float]()

    def step(self, index: int) -> None:
        """Code one step, and note how long that took."""
        mirrors = _TimedMirrors(self._first.world_size, self._clock)
        began = self._clock.mark()
        x = self._buffer.copy_(self._given)
        step = replace(self._first, index=index)
        reduced = run_program(self._reducer.reduce(self.grain, x, self._state, step), mirrors)
        got = reduced.value.flatten()  # all of the mean, or the shard of it that this rank keeps
        self._mean[: got.numel()].copy_(got)
        self._taken_s.append(self._clock.between(began, self._clock.mark()) - mirrors.spent_s())
        self._state = reduced.state

    def least_s(self) -> float:
        """Seconds of the shortest step, without the first, in which what it uses is compiled and buffers are made."""
        return min(self._taken_s[1:])


class MirrorTransport(Shapes):
    """One rank among others that send what it sends: what a rank does with real data, without any other process."""

    def issue(self, request: Collective) -> Answer:
        """Answer at once."""
        method = served(self, request)
        answer = method(request)
        assert isinstance(answer, Tensor)
        return Answer(answer)

    def all_reduce(self, request: AllReduce) -> Tensor:
        """The sum of as many equal tensors as there are ranks."""
        return request.tensor * self.ranks(request) if request.op == "sum" else request.tensor.clone()

    def all_gather(self, request: AllGather) -> Tensor:
        """The row of this rank, once for each."""
        return request.tensor.expand(self.ranks(request), -1).contiguous()

    def all_to_all(self, request: AllToAll) -> Tensor:
        """The row that this rank keeps, once for each."""
        place = request.axis.index(self.rank) if request.axis else self.rank
        return request.tensor[place].expand(self.ranks(request), -1).contiguous()

    def all_to_all_v(self, request: AllToAllV) -> Tensor:
        """The row that this rank keeps, once for each; it has the size of all rows that are received."""
        row = request.tensor.split(request.sends)[request.place]
        return torch.cat([_as_long(row, size) for size in request.receives])

    def send_recv(self, request: SendRecv) -> Tensor:
        """What this rank sends, as much of it as is expected."""
        sent = torch.cat([request.like.new_empty(0), *(message.tensor for message in request.sends)])
        return _as_long(sent, request.length)


class _TimedMirrors(MirrorTransport):
    """Mirrors whose answers, which are no coding, are timed."""

    def __init__(self, world_size: int, clock: _Clock) -> None:
        super().__init__(world_size)
        self._clock, self._answers = clock, list[tuple[Any, Any]]()

    def issue(self, request: Collective) -> Answer:
        """Answer at once."""
        began = self._clock.mark()
        answer = super().issue(request)
        self._answers.append((began, self._clock.mark()))
        return answer

    def spent_s(self) -> float:
        """Seconds in answers."""
        return sum(self._clock.between(*answer) for answer in self._answers)


class _Clock(Protocol):
    """Marks on what a rank does, and the seconds between two of them."""

    def mark(self) -> Any:
        """A mark behind all work that was given so far."""
        ...

    def between(self, one: Any, other: Any) -> float:
        """Seconds from one mark to a later one."""
        ...


def _clock(device: torch.device) -> _Clock:
    return _Stream(device) if device.type == "cuda" else _Thread()


class _Thread:
    """The time that this thread has a processor."""

    def mark(self) -> float:
        return time.thread_time()

    def between(self, one: float, other: float) -> float:
        return other - one


class _Stream:
    """The time of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def between(self, one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        other.synchronize()
        return one.elapsed_time(other) / 1e3


def _as_long(given: Tensor, numel: int) -> Tensor:
    """The first elements, and zeros where there are fewer."""
    found = given.new_zeros(numel)
    found[: given.numel()] = given[:numel]
    return found
