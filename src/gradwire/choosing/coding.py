"""How long a rank codes in a step on this machine: its programs on made-up gradients, without a network."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import SpecError
from gradwire.core.messages import SendRecv
from gradwire.core.shapes import Shapes
from gradwire.drivers.contention import Computing
from gradwire.drivers.cost import Parameters, form_of, require_world, specs_on
from gradwire.drivers.interpreter import Answer, run_program, served
from gradwire.drivers.plan import Plan, Unit, plan
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import PAST_WARM_UPS, Step
from gradwire.spec import as_method

REPEATS = 3
"""Timed steps of each form, of which the shortest counts: whatever else a machine does makes a step longer."""

CACHES = 1 << 26
"""Bytes that are more than most processors' caches hold."""


def coding_device(model: Parameters) -> torch.device:
    """Where gradients of a model are coded: where it lies, or if it has no data on the GPU where there is one."""
    parameters: Any = model.parameters() if isinstance(model, nn.Module) else model
    first = next(iter(parameters), None)
    device = getattr(first[1] if type(first) is tuple else first, "device", torch.device("meta"))
    if device.type != "meta":
        return device
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
    among `world_size` ranks. Where PyTorch has one thread, another one computes meanwhile, as the backward pass does.
    Before each run the caches are filled with other data, as a training step fills them: coding takes up to 2.6 times
    as long then (byte-GPT, Intel Xeon).

    Args:
        method: a reducer, or a spec.
        model: whose gradients, as in `gradwire.cost`.
        world_size: ranks.
        grain_numel: as in `gradwire.attach`.
        repeats: how often each form is timed.
        device: that codes; None takes the model's own, and for a model without data the GPU where PyTorch has one.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or that needs more ranks; no model; parameters on a
            GPU where there is none.

    >>> coding_s("int4", torch.nn.Linear(300, 300), world_size=2) > 0.0
    True
    """
    reducer = as_method(method)
    require_world(reducer, world_size)
    given: Any = list(model) if isinstance(model, Iterator) else model  # which is gone through twice
    device = device or coding_device(given)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(
            "coding is measured on this machine, where PyTorch finds no GPU: take device cpu, or leave coding out"
        )
    return plan_coding_s(plan(specs_on(device, given), reducer, grain_numel), world_size, repeats)


def plan_coding_s(planned: Plan, world_size: int, repeats: int = REPEATS) -> float:
    """Return the same for grains that are planned already, those of a sharded model for instance.

    Args:
        planned: of parameters on the device that codes.
        world_size, repeats: as of `coding_s`.
    """
    reducers: list[Reducer] = []
    units: dict[Hashable, Unit] = {}
    counts: Counter[Hashable] = Counter()
    for unit in planned.units:
        form = form_of(unit, reducers)
        counts[form] += 1
        units.setdefault(form, unit)
    on_processor = any(unit.grain.device.type == "cpu" for unit in units.values())
    with Computing() if on_processor else contextlib.nullcontext():
        return sum(counts[form] * _unit_s(unit, world_size, repeats) for form, unit in units.items())


def _unit_s(unit: Unit, world_size: int, repeats: int) -> float:
    """The shortest of some steps of a unit, after one in which what it uses is compiled and its buffers are made."""
    grain, reducer = unit
    clock = clock_of(grain.device)
    given = torch.randn(grain.shape, generator=torch.Generator().manual_seed(0)).to(grain.device, grain.dtype)
    buffer, mean = torch.empty_like(given), torch.empty_like(given.flatten())
    first = Step(PAST_WARM_UPS, 0, world_size, weight=1.0)
    state = reducer.init(grain, first)
    taken, others = list[float](), torch.zeros(CACHES // 4, device=grain.device)
    for index in range(PAST_WARM_UPS, PAST_WARM_UPS + 1 + repeats):
        mirrors = MirrorTransport(world_size, clock)
        others.add_(1.0)
        began = clock.mark()
        x = buffer.copy_(given)
        reduced = run_program(reducer.reduce(grain, x, state, replace(first, index=index)), mirrors)
        got = reduced.value.flatten()  # all of the mean, or the shard of it that this rank keeps
        mean[: got.numel()].copy_(got)
        taken.append(clock.between(began, clock.mark()) - mirrors.spent_s())
        state = reduced.state
    return min(taken[1:])


class MirrorTransport(Shapes):
    """One rank among others that send what it sends: what a rank does with real data, without any other process.

    Args:
        world_size: ranks.
        clock: times the answers, which are no coding.
    """

    def __init__(self, world_size: int, clock: _Clock) -> None:
        super().__init__(world_size, rank=0)
        self._clock, self._answers = clock, list[tuple[Any, Any]]()

    def issue(self, request: Collective) -> Answer:
        """Answer at once."""
        began = self._clock.mark()
        method = served(self, request)
        answer = method(request)
        assert isinstance(answer, Tensor)
        self._answers.append((began, self._clock.mark()))
        return Answer(answer)

    def spent_s(self) -> float:
        """Seconds that all answers have taken."""
        return sum(self._clock.between(*answer) for answer in self._answers)

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


class _Clock(Protocol):
    """Marks on what a rank does, and the seconds between two of them."""

    def mark(self) -> Any:
        """A mark behind all work that was given so far."""
        ...

    def between(self, one: Any, other: Any) -> float:
        """Seconds from one mark to a later one."""
        ...


def clock_of(device: torch.device) -> _Clock:
    """What times coding on a device."""
    return StreamClock(device) if device.type == "cuda" else ThreadClock()


class ThreadClock:
    """The time that this thread has a processor."""

    def mark(self) -> float:
        """What has passed so far."""
        return time.thread_time()

    def between(self, one: float, other: float) -> float:
        """Seconds from one mark to a later one."""
        return other - one


class StreamClock:
    """The time of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was handed over."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def between(self, one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        """Seconds from one event to a later one, which is waited for."""
        other.synchronize()
        return one.elapsed_time(other) / 1e3


def _as_long(given: Tensor, numel: int) -> Tensor:
    """The first elements, and zeros where there are fewer."""
    found = given.new_zeros(numel)
    found[: given.numel()] = given[:numel]
    return found
