"""Real training: a plan's units with their states, step after step.

`Engine` is told of gradients as they come (`deliver`) and has an `Interpreter` run the plan's waves, in planned order,
as far as gradients are here (`pump`). Where a plan has parts, each of them runs from beginning to end (`run_part`). New
states are kept aside until the step is known to be good (`settle`), which on a GPU is found out at the next step and
costs no waiting inside this one.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.core.collective import Collective, ring_bytes
from gradwire.core.grain import Grain
from gradwire.core.state import State, walk
from gradwire.drivers.any_flag import AnyFlag
from gradwire.drivers.host_memory import WAVES_AHEAD, HostMemory
from gradwire.drivers.interpreter import WINDOW, Interpreter, Pending, Script, Traffic, Transport, sent_bytes
from gradwire.drivers.plan import Plan, Unit
from gradwire.drivers.slot import Slot
from gradwire.drivers.traced import Traced
from gradwire.reducers.base import Reducer
from gradwire.reducers.sent import SentAll
from gradwire.reducers.step import Program, Reduced, Step

Fill = Callable[[int, Tensor], None]
"""Writes a unit's gradient to the buffer that it is given, 1-d."""

Sink = Callable[[int, Tensor], None]
"""Takes a unit's mean, 1-d; of a unit that is scattered, this rank's shard of it."""


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


class Engine:
    """Runs a plan, step after step. Not thread-safe: one thread drives it.

    A part of a plan that does not come in a step keeps its state, and one that comes twice is reduced twice.

    Args:
        plan: waves of units.
        transport: issues collectives.
        seed: of all keys.
        waves_in_flight: how many waves of programs travel at a time.
        host: where residuals lie between programs; None: on the device of their gradients.

    Attributes:
        host: as given.
        guards: whether a mean that is not finite is found in every step, whatever the method is.
        weight: what this rank counts for in the step at hand, for methods that ask (`weighs`).
        not_finite: the first parameter whose gradient was not finite on this rank, if any was; not looked for on a GPU,
            which would have to be waited for.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        seed: int = 0,
        waves_in_flight: int = WINDOW,
        host: HostMemory | None = None,
    ) -> None:
        self.guards = False
        self.weight: float | None = None
        self.not_finite: str | None = None
        self.plan = plan
        self.transport = transport
        self.seed = seed
        self.index = 0
        self.stats = Stats()
        self.dense_bytes = sum(unit.grain.numel * unit.grain.dtype.itemsize for unit in plan.units)
        self.host = host
        self._slots = [Slot(unit, self._initial(unit), host) for unit in plan.units]
        if not plan.parts:  # else memory for a whole model is what sharding saves: a buffer lasts as long as its part
            for slot in self._slots:
                slot.take_buffer()
        self._interpreter = Interpreter[Reduced](transport, self.stats, waves_in_flight)
        self._script: Script[list[Reduced]] | None = None
        self._units: Sequence[int] = ()  # of the script, in its order
        self._waits_for: Pending | None = None
        self._results: dict[int, Reduced] = {}
        self._fresh: list[State] | None = None
        self._flags, self._any_bad = dict[int, Tensor](), AnyFlag([])
        self._bad_mean: tuple[int, Grain] | None = None

    @property
    def weighs(self) -> bool:
        """Whether its method wants to be told in each step what this rank counts for."""
        return any(unit.reducer.weighs for unit in self.plan.units)

    def step(self) -> Step:
        """Where the step now under way stands."""
        rank, world_size = self.transport.rank, self.transport.world_size
        return Step(self.index, rank, world_size, self.seed, self.weight)

    # A step ------------------------------------------------------------------------------------------------------

    def weigh(self, weight: float | None) -> None:
        """Say what this rank counts for from the next step on; None: it has said nothing."""
        self.weight = weight

    def begin(self, sink: Sink | None = None) -> None:
        """Get ready for a step's gradients; what is left of one that broke off is forgotten.

        Args:
            sink: is given each unit's mean as soon as it is known, and then the engine lets go of it: so means are
                written while others are still on their way, and never are there all at once. Parts have their own.
        """
        self.settle()
        self.forget()
        if self.host is not None:  # the gradients' buffers hold what is being copied
            self.host.order()
        self._interpreter.begin_step()
        if not self.plan.parts:
            self._start(self.plan.unit_numbers, sink)

    def run_part(self, part: int, fill: Fill, sink: Sink) -> None:
        """Reduce a part of the plan from beginning to end.

        Args:
            part: which one.
            fill: is called for each of its units, shortly before its program begins.
            sink: as of `begin`.
        """
        waves = [self.plan.unit_numbers[wave] for wave in self.plan.parts[part]]
        for unit in itertools.chain(*waves):
            self._settle_again(unit)
        self._start(waves, sink, fill)
        self.pump()

    def _start(self, waves: Sequence[Sequence[int]], sink: Sink | None, fill: Fill | None = None) -> None:
        """Begin the script of some waves, whose gradients `fill` writes, or `deliver` brings."""
        units = self._units = list(itertools.chain(*waves))

        def programs(wave: int) -> list[Program] | None:
            for unit in waves[wave]:
                slot = self._slots[unit]
                if fill is not None:
                    slot.take_buffer()
                    fill(unit, slot.x)
                    slot.missing = 0
                elif slot.missing:
                    return None
            self._send_for(waves[wave + WAVES_AHEAD : wave + WAVES_AHEAD + 1])
            return [self._program(self._slots[unit]) for unit in waves[wave]]

        def ended(place: int, result: Reduced) -> Reduced:
            result = result._replace(state=self._kept(units[place], result.state))
            if sink is None:
                return result
            sink(units[place], result.value.reshape(-1))
            if self.plan.parts:
                self._slots[units[place]].let_go(result.state)
            # Their memory is for the next grain: nobody subtracts what was sent once the program has ended.
            return result._replace(value=result.value.new_empty(0), sent=SentAll())

        for unit in units:
            self._slots[unit].missing = self._slots[unit].grain.numel
        self._send_for(waves[:WAVES_AHEAD])
        self._script = self._interpreter.script(len(waves), programs, ended)

    def _send_for(self, waves: Sequence[Sequence[int]]) -> None:
        for unit in itertools.chain(*waves):
            self._slots[unit].send_for_residuals()

    def deliver(self, unit: int, offset: int, gradient: Tensor) -> None:
        """Copy `gradient`, 1-d, to `offset` in the buffer of a unit."""
        self._slots[unit].deliver(offset, gradient)

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
            self._end_script(end.value)

    def _end_script(self, results: Sequence[Reduced]) -> None:
        self._script, self._waits_for = None, None  # what was waited for holds the group
        self._results.update(zip(self._units, results, strict=True))

    def script(self) -> Script[None]:
        """Return what `pump` does once all gradients are here, as a script: who drives it does the waiting."""
        assert self._script is not None, "the step has not begun"
        self._end_script((yield from self._script))

    def finish(self) -> None:
        """End the step: all gradients are delivered. Counts it."""
        self.pump()
        assert self._script is None, "the step ended before all gradients were delivered"
        came = self._results
        self._fresh = [came[i].state if i in came else slot.state for i, slot in enumerate(self._slots)]
        self._flags = {unit: bad.view(()) for unit in sorted(came) if (bad := came[unit].bad) is not None}
        self._any_bad = AnyFlag(list(self._flags.values()))
        self.index += 1
        self.stats.steps += 1
        if not self.plan.parts:
            self.count_dense(self.dense_bytes, ring_bytes(self.dense_bytes, self.transport.world_size))

    def count_dense(self, nbytes: int, wire_bytes: int) -> None:
        """Note what would have been sent uncompressed: how large it is, and how many bytes of it a rank sends."""
        self.stats.dense_bytes += nbytes
        self.stats.dense_wire_bytes += wire_bytes

    def _program(self, slot: Slot) -> Program:
        """The program of a gradient that is in its buffer."""
        self.not_finite = self.not_finite or slot.first_not_finite()
        return slot.program(self.step(), self.guards)

    def result(self, unit: int) -> Reduced:
        """What a unit's program returned, after `finish`; with a sink neither the value nor what was sent."""
        return self._results[unit]

    def value(self, unit: int) -> Tensor:
        """What became of a unit's grain after `finish`, 1-d, where the step has no sink."""
        return self._results[unit].value.reshape(-1)

    def release(self) -> None:
        """Forget the results, once the means are written where they belong."""
        self._results = {}

    # What is kept ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Keep the new states of the last step, or forget them where ranks found it bad."""
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return
        if self.last_was_bad():
            self.stats.bad_steps += 1
            self._bad_mean = self.bad_mean()
            return
        for slot, new in zip(self._slots, fresh, strict=True):
            slot.settle(new)

    def _kept(self, unit: int, new: State) -> State:
        """A new state as it is kept. What no parameter has owes nothing, since a resumed run would not have it."""
        if (padding := self.plan.padding.get(unit)) is not None:
            for _, leaf in walk(new):
                if leaf.kind == "element":
                    leaf.tensor.view(-1)[padding] = 0
        return self._slots[unit].kept(new)

    def _settle_again(self, unit: int) -> None:
        """Keep what a unit that comes a second time in one step has left of the first, unless that was bad."""
        result = self._results.pop(unit, None)
        if result is not None and (result.bad is None or not bool(result.bad)):
            self._slots[unit].settle(result.state)

    def _settled(self) -> None:
        """Keep the last step's states, and wait for those that are being copied: the caller reads or writes them."""
        self.settle()
        if self.host is not None:
            self.host.wait()

    def forget(self) -> None:
        """Forget the new states of a step whose means nobody has taken, and what is left of one that broke off."""
        self._fresh, self._script, self._waits_for, self._results = None, None, None, {}
        for slot in self._slots:
            slot.forget_residuals()

    def last_was_bad(self) -> bool:
        """Whether the last step's mean was not finite, as far as its programs told; on a GPU this waits for it."""
        return self._any_bad.is_set()

    def found_bad(self) -> bool:
        """Whether any step was bad, as far as is known without waiting: on a GPU the last one is not known yet."""
        return self.stats.bad_steps > 0 or (self._fresh is not None and self._any_bad.is_known and self.last_was_bad())

    def bad_mean(self) -> tuple[int, Grain] | None:
        """The first bad step, and its first grain whose mean was not finite; None where programs told of none."""
        if self._bad_mean is None:
            bad = (self._slots[unit].grain for unit, flag in self._flags.items() if bool(flag))
            return next(((self.index - 1, grain) for grain in bad), None)
        return self._bad_mean

    def buffers(self) -> list[Tensor]:
        """The memory that gradients are copied to."""
        return [slot.x for slot in self._slots]

    def states(self) -> list[tuple[Grain, State]]:
        """Every unit's grain and state."""
        self._settled()
        return [(slot.grain, slot.state) for slot in self._slots]

    def fresh_states(self) -> list[State]:
        """What every unit's state will be once the step that has just ended is kept, in the order of `states()`."""
        if self.host is not None:
            self.host.wait()
        return [slot.state for slot in self._slots] if self._fresh is None else self._fresh

    def initial_states(self) -> list[State]:
        """Every unit's state as it is before the first step, in the order of `states()`."""
        return [self._initial(unit) for unit in self.plan.units]

    def _initial(self, unit: Unit) -> State:
        return unit.reducer.init(unit.grain, Step(0, self.transport.rank, self.transport.world_size, self.seed))

    def set_states(self, states: Sequence[State]) -> None:
        """Replace every unit's state, in the order of `states()`."""
        self._settled()
        for slot, state in zip(self._slots, states, strict=True):
            slot.state = slot.kept(state)

    def serve_by(self, made_of: Callable[[Reducer], Reducer]) -> None:
        """Serve every unit by what `made_of` makes of its reducer; states of the two have the same form."""
        waves = [tuple(unit._replace(reducer=made_of(unit.reducer)) for unit in wave) for wave in self.plan.waves]
        self.plan = dataclasses.replace(self.plan, waves=tuple(waves))
        for slot, unit in zip(self._slots, self.plan.units, strict=True):
            slot.unit = unit

    def rescale(self, factor: float) -> None:
        """Multiply what is in the gradients' units: these are new ones from this step on."""
        self._settled()
        for slot in self._slots:
            slot.rescale(factor)

    def take_back(self, names: set[str]) -> None:
        """Undo the last step for parameters whose mean was dropped: what they owed, they owe still."""
        old = [slot.state for slot in self._slots]
        self._settled()
        for slot, before in zip(self._slots, old, strict=True):
            slot.take_back(before, names, self.transport.rank)

    # For watching ------------------------------------------------------------------------------------------------

    def trace(self, clock: Callable[[], float] = time.perf_counter) -> Traced:
        """Keep a span of every collective, wait and piece of coding from now on, until `stop_tracing`."""
        inner = self.transport.inner if isinstance(self.transport, Traced) else self.transport
        self.transport = self._interpreter.transport = traced = Traced(inner, clock)

        def asked(place: int, request: Collective) -> None:
            traced.unit_bytes[self._units[place]] += sent_bytes(request, inner.rank, inner.world_size)

        self._interpreter.asked = asked
        return traced

    def stop_tracing(self) -> None:
        """Keep no spans any more."""
        if isinstance(self.transport, Traced):
            self.transport = self._interpreter.transport = self.transport.inner
            self._interpreter.asked = None

    def slow_down(self, coded: Callable[[float], float]) -> None:
        """Have coding take longer: `coded` is given the CPU seconds of each piece, and returns what it has made of it.

        For emulated hosts. It is called on the thread that codes, before anything is sent.
        """
        self._interpreter.coded = coded
