"""Real training: a plan's units with their states, step after step.

`Engine` is told of gradients as they come (`deliver`) and has an `Interpreter` run the plan's waves, in planned order,
as far as gradients are here (`pump`). New states are kept aside until the step is known to be good (`settle`), which on
a GPU is found out at the next step and costs no waiting inside this one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.collective import ring_bytes
from gradwire.core.grain import Grain
from gradwire.core.state import CARRIED, Leaf, State, carried_leaf, walk
from gradwire.drivers.interpreter import Interpreter, Pending, Script, Traffic, Transport
from gradwire.drivers.plan import Plan, Unit
from gradwire.drivers.traced import Traced
from gradwire.reducers.base import Program, Reduced, Reducer, Step
from gradwire.reducers.guard import Guard, flagged_by_result

Sink = Callable[[int, Tensor], None]
"""Takes a unit's mean."""


@dataclass
class Stats(Traffic):
    """What an engine has done since it was made; times in seconds, sizes in bytes on this rank.

    Attributes:
        payload_bytes: handed to collectives, counted once each.
        wire_bytes: sent, as payloads and the algorithm of each collective predict.
        encode_s: CPU time in programs (encoding, decoding, summing).
        wait_s: waiting for collectives.
        steps: finished steps, and `bad_steps` those whose means were not finite and whose new states were forgotten.
        dense_bytes: the gradients' own size, per step times steps.
        dense_wire_bytes: what a ring all-reduce of the uncompressed gradients would have sent.
        exposed_s: between the last bucket's delivery and the end of the step: what the backward pass did not hide.
    """

    steps: int = 0
    bad_steps: int = 0
    dense_bytes: int = 0
    dense_wire_bytes: int = 0
    exposed_s: float = 0.0

    @classmethod
    def summed(cls, parts: Iterable[Stats]) -> Stats:
        """What several engines have done together.

        >>> Stats.summed([Stats(steps=2, wire_bytes=10), Stats(steps=1)]).steps
        3
        """
        found = [vars(stats) for stats in parts]
        return cls(**{name: sum(stats[name] for stats in found) for name in vars(cls())})

    @property
    def ratio(self) -> float:
        """Compression: bytes an uncompressed ring all-reduce sends, by bytes sent."""
        return self.dense_wire_bytes / self.wire_bytes if self.wire_bytes else 1.0


@dataclass(eq=False)
class Slot:
    """A unit with its buffer, its state and how much of its gradient is here."""

    unit: Unit
    state: State
    x: Tensor
    missing: int = 0

    @property
    def grain(self) -> Grain:
        """The grain of the slot's unit."""
        return self.unit.grain


class Engine:
    """Runs a plan, step after step. Not thread-safe: one thread drives it.

    Args:
        plan: waves of units.
        transport: issues collectives.
        seed: of all keys.

    Attributes:
        guards: whether a mean that is not finite is found in every step, whatever the method is.
        not_finite: the first parameter whose gradient was not finite on this rank, if any was; not looked for on a GPU,
            which would have to be waited for.
    """

    def __init__(self, plan: Plan, transport: Transport, seed: int = 0) -> None:
        self.guards = False
        self.not_finite: str | None = None
        self.plan = plan
        self.transport = transport
        self.seed = seed
        self.index = 0
        self.stats = Stats()
        self.dense_bytes = sum(unit.grain.numel * unit.grain.dtype.itemsize for unit in plan.units)
        self._slots: list[Slot] = [self._slot(unit) for unit in plan.units]
        self._waves = plan.unit_numbers
        self._interpreter = Interpreter[Reduced](transport, self.stats)
        self._script: Script[list[Reduced]] | None = None
        self._waits_for: Pending | None = None
        self._results: list[Reduced] = []
        self._fresh: list[State] | None = None
        self._sink: Sink | None = None
        self._flags: list[Tensor] = []

    def step(self) -> Step:
        """Where the step now under way stands."""
        return Step(self.index, self.transport.rank, self.transport.world_size, self.seed)

    def _slot(self, unit: Unit) -> Slot:
        return Slot(unit, unit.reducer.init(unit.grain, self.step()), self.buffer_for(unit))

    def buffer_for(self, unit: Unit) -> Tensor:
        """Memory for a unit's gradient."""
        return torch.empty(unit.grain.numel, dtype=_buffer_dtype(unit), device=unit.grain.device)

    def begin(self, sink: Sink | None = None) -> None:
        """Get ready for a step's gradients.

        Args:
            sink: is given each unit's mean, 1-d, as soon as it is known, and then the engine lets go of it: so means
                are written while others are still on their way, and never are there all at once.
        """
        self.settle()
        self._sink = sink
        self._script = self._interpreter.script(len(self._waves), self._programs, self._ended)
        self._waits_for = None
        self._results = []
        for slot in self._slots:
            slot.missing = slot.grain.numel

    def trace(self) -> Traced:
        """Keep a span of every collective, wait and piece of coding from now on, until it is called again."""
        inner = self.transport.inner if isinstance(self.transport, Traced) else self.transport
        self.transport = self._interpreter.transport = traced = Traced(inner)
        return traced

    def slow_down(self, coded: Callable[[float], float]) -> None:
        """Have coding take longer: `coded` is given the CPU seconds of each piece, and returns what it has made of it.

        For emulated hosts. It is called on the thread that codes, before anything is sent.
        """
        self._interpreter.coded = coded

    def deliver(self, unit: int, offset: int, gradient: Tensor) -> None:
        """Copy `gradient`, 1-d, to `offset` in the buffer of a unit."""
        slot = self._slots[unit]
        slot.x[offset : offset + gradient.numel()].copy_(gradient)
        slot.missing -= gradient.numel()

    def pump(self) -> None:
        """Do what the schedule and the gradients that are here allow."""
        if self._script is None:
            return
        if isinstance(self.transport, Traced):
            self.transport.begin()
            self._pump(self._script)
            self.transport.pause()
        else:
            self._pump(self._script)

    def _pump(self, script: Script[list[Reduced]]) -> None:
        try:
            while True:
                began = time.perf_counter()
                answer = None if self._waits_for is None else self._waits_for.wait()
                self.stats.wait_s += time.perf_counter() - began
                self._waits_for = script.send(answer)
                if self._waits_for is None:  # a wave whose gradients are still to come
                    return
        except StopIteration as end:
            self._script, self._waits_for, self._results = None, None, end.value  # what was waited for holds the group

    def script(self) -> Script[None]:
        """Return what `pump` does once all gradients are here, as a script: who drives it does the waiting."""
        assert self._script is not None, "the step has not begun"
        results, self._results = self._script, []
        self._results = yield from results
        self._script = None

    def finish(self) -> None:
        """End the step: all gradients are delivered. Counts it."""
        self.pump()
        assert self._script is None, "the step ended before all gradients were delivered"
        self._fresh = [result.state for result in self._results]
        self._flags = [result.bad.view(()) for result in self._results if result.bad is not None]
        self.index += 1
        self.stats.steps += 1
        self.stats.dense_bytes += self.dense_bytes
        self.stats.dense_wire_bytes += ring_bytes(self.dense_bytes, self.transport.world_size)

    def _programs(self, wave: int) -> list[Program] | None:
        """The programs of a wave, if all of its gradients are here."""
        slots = [self._slots[i] for i in self._waves[wave]]
        if any(slot.missing for slot in slots):
            return None
        return [self.program(i) for i in self._waves[wave]]

    def program(self, unit: int) -> Program:
        """The program of a unit whose gradient is in its buffer."""
        slot = self._slots[unit]
        if self.not_finite is None and slot.grain.device.type == "cpu" and not bool(kernels.all_finite(slot.x)):
            self.not_finite = _first_not_finite(slot)
        return _program(slot, self.step(), self.guards)

    def _ended(self, unit: int, result: Reduced) -> Reduced:
        """Give a value away, if somebody wants it at once."""
        if self._sink is None:
            return result
        self._sink(unit, result.value.reshape(-1))
        return result._replace(value=result.value.new_empty(0))

    def value(self, unit: int) -> Tensor:
        """What became of a unit's grain after `finish`, 1-d, where the step has no sink."""
        return self._results[unit].value.reshape(-1)

    def release(self) -> None:
        """Forget the results, once the means are written where they belong."""
        self._results = []

    def settle(self) -> None:
        """Keep the new states of the last step, or forget them where ranks found it bad."""
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return
        if self.last_was_bad():
            self.stats.bad_steps += 1
            return
        for slot, new in zip(self._slots, fresh, strict=True):
            slot.x = spare_buffer(slot.state, new, slot.x)
            slot.state = new

    def forget(self) -> None:
        """Forget the new states of a step whose means nobody has taken, and what is left of one that broke off."""
        self._fresh, self._script, self._waits_for, self._results = None, None, None, []

    def last_was_bad(self) -> bool:
        """Whether the last step's mean was not finite, as far as its programs told; on a GPU this waits for it."""
        return bool(self._flags) and bool(torch.stack(self._flags).any())

    def found_bad(self) -> bool:
        """Whether any step was bad, as far as is known without waiting: on a GPU the last one is not known yet."""
        known = self._fresh is not None and all(flag.device.type == "cpu" for flag in self._flags)
        return self.stats.bad_steps > 0 or (known and self.last_was_bad())

    def buffers(self) -> list[Tensor]:
        """The memory that gradients are copied to."""
        return [slot.x for slot in self._slots]

    def states(self) -> list[tuple[Grain, State]]:
        """Every unit's grain and state."""
        self.settle()
        return [(slot.grain, slot.state) for slot in self._slots]

    def fresh_states(self) -> list[State]:
        """What every unit's state will be once the step that has just ended is kept, in the order of `states()`."""
        return [slot.state for slot in self._slots] if self._fresh is None else self._fresh

    def initial_states(self) -> list[State]:
        """Every unit's state as it is before the first step, in the order of `states()`."""
        first = Step(0, self.transport.rank, self.transport.world_size, self.seed)
        return [unit.reducer.init(unit.grain, first) for unit in self.plan.units]

    def set_states(self, states: Sequence[State]) -> None:
        """Replace every unit's state, in the order of `states()`."""
        self.settle()
        for slot, state in zip(self._slots, states, strict=True):
            slot.state = state

    def serve_by(self, made_of: Callable[[Reducer], Reducer]) -> None:
        """Serve every unit by what `made_of` makes of its reducer; states of the two have the same form."""
        waves = [tuple(unit._replace(reducer=made_of(unit.reducer)) for unit in wave) for wave in self.plan.waves]
        self.plan = dataclasses.replace(self.plan, waves=tuple(waves))
        for slot, unit in zip(self._slots, self.plan.units, strict=True):
            slot.unit = unit

    def rescale(self, factor: float) -> None:
        """Multiply what is in the gradients' units: these are new ones from this step on."""
        self.settle()
        for slot in self._slots:
            for _, leaf in walk(slot.state):
                if leaf.owed or leaf.scaled:
                    leaf.tensor.mul_(factor)

    def take_back(self, names: set[str]) -> None:
        """Undo the last step for parameters whose mean was dropped: what they owed, they owe still."""
        old = [slot.state for slot in self._slots]
        self.settle()
        for slot, before in zip(self._slots, old, strict=True):
            if slot.state is before:
                continue
            if CARRIED in before:  # gone by now, and for these it arrived nowhere
                slot.state = State({**slot.state, CARRIED: carried_leaf(slot.grain)})
            for path, leaf in walk(slot.state):
                was = dict(walk(before)).get(path)
                if was is not None and leaf.owed:
                    _restore(slot.grain, leaf, was.tensor, names, self.transport.rank)


def _first_not_finite(slot: Slot) -> str:
    """The first parameter of a slot whose gradient has a value that is not finite."""
    for segment in slot.grain.segments:
        if not bool(slot.x[segment.offset : segment.offset + segment.numel].isfinite().all()):
            return segment.name
    return slot.grain.name


def _program(slot: Slot, step: Step, guards: bool) -> Program:
    """The program of a unit's gradient, and of what is carried over from another method."""
    grain, reducer = slot.unit
    state, carried = slot.state, slot.state.get(CARRIED)
    if isinstance(carried, Leaf):
        slot.x.add_(carried.tensor)
        state = State({name: node for name, node in state.items() if name != CARRIED})
    # A step that the optimizer skips must not be taken for the one in which what is carried arrived. Rules leave out
    # what is not finite on one rank, and go on doing so.
    if (guards or carried is not None) and reducer.averages and not isinstance(reducer, Guard):
        reducer = Guard(reducer)
    program = reducer.reduce(grain, slot.x.view(grain.shape), state, step)
    return program if reducer.averages or not guards else flagged_by_result(program)


def _buffer_dtype(unit: Unit) -> torch.dtype:
    """Residuals are float32 whatever the gradients are, so a reducer that keeps its input gets float32."""
    keeps = unit.reducer.keeps_input and unit.grain.dtype != torch.float64
    return torch.float32 if keeps else unit.grain.dtype


def spare_buffer(old: State, new: State, x: Tensor) -> Tensor:
    """The buffer for the next gradient: `x`, or where a state kept that, the tensor it took the place of."""
    before = dict(walk(old))
    for path, leaf in walk(new):
        if leaf.tensor.data_ptr() == x.data_ptr() and leaf.tensor.numel() == x.numel():
            was = before.get(path)
            fits = was is not None and was.tensor.numel() == x.numel() and was.tensor.dtype == x.dtype
            return was.tensor.view(-1) if fits and was is not None else torch.empty_like(x)
    return x


def _restore(grain: Grain, leaf: Leaf, old: Tensor, names: set[str], rank: int) -> None:
    """Copy the old values of the named parameters' elements over the new ones."""
    new, first = leaf.tensor, leaf.first(rank)
    for segment in grain.segments:
        if segment.name in names and leaf.kind in ("element", "owned"):
            begin = max(segment.offset - first, 0)
            end = min(segment.offset + segment.numel - first, new.numel())
            if begin < end:
                new.view(-1)[begin:end].copy_(old.view(-1)[begin:end])
