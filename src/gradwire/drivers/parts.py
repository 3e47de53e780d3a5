"""Plans and an engine for gradients that come in parts, each of which ends before the next one begins.

A part is what sharded training reduces at a time: some parameters, laid out as one row a rank. Row r holds the elements
of each parameter that rank r owns, with zeros behind the end where they do not come out even. A grain is some columns
of all rows, so its shards are the rows, and each says which elements of which parameters it has:

    parameter w, 5 x 2, on 2 ranks       row 0: w[0:6]        row 1: w[6:10], two zeros

State is by name and element as everywhere, so it outlives the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec, Segment
from gradwire.core.state import State, walk
from gradwire.drivers.engine import Engine, Slot, spare_buffer
from gradwire.drivers.interpreter import Transport, run
from gradwire.drivers.plan import Plan, Unit, Wave, grain_size
from gradwire.reducers.base import Program, Reduced, Reducer

Fill = Callable[[int, Tensor], None]
"""Writes a unit's gradient to the buffer that it is given, 1-d."""

Sink = Callable[[int, Tensor], None]
"""Takes this rank's shard of a unit's mean, 1-d."""


class Chunked(NamedTuple):
    """A parameter that is cut evenly: rank r owns elements [r * chunk, (r + 1) * chunk), as far as there are any."""

    spec: ParameterSpec
    chunk: int


class Columns(NamedTuple):
    """Columns [start, start + numel) of a parameter's rows, which are columns from `offset` on of a unit's."""

    name: str
    start: int
    numel: int
    unit: int
    offset: int


@dataclass(frozen=True)
class PartPlan(Plan):
    """Waves, of which each part has some.

    Attributes:
        parts: the waves of each part.
        columns: what each part's units hold.
        widths: columns of each unit.
    """

    parts: tuple[range, ...] = ()
    columns: tuple[tuple[Columns, ...], ...] = ()
    widths: tuple[int, ...] = ()


@dataclass(eq=False)
class _Open:
    """A unit under construction."""

    reducer: Reducer
    columns: list[tuple[Chunked, int, int]] = field(default_factory=list[tuple[Chunked, int, int]])

    @property
    def width(self) -> int:
        return sum(numel for _, _, numel in self.columns)


def plan_parts(
    parts: Sequence[Sequence[Chunked]],
    reducer: Reducer,
    rows: range,
    grain_numel: int | None = None,
) -> PartPlan:
    """Plan grains for parts, each for itself.

    Args:
        parts: the parameters of each, in the order in which they stand in a row.
        reducer: one that `scatters` where all rows are reduced, one for each rank, and a whole one for a single row.
        rows: which of a parameter's chunks are there.
        grain_numel: elements that are encoded together at most, all rows together (default: as `plan`).

    Raises:
        CompositionError: a reducer that wants whole matrices.

    >>> from gradwire.spec import parse
    >>> w = Chunked(ParameterSpec("w", (5, 2), torch.float32, torch.device("cpu")), chunk=6)
    >>> (unit,) = plan_parts([[w]], parse("none").scattered(), range(2)).units
    >>> unit.grain.numel, [(s.start, s.numel, s.offset) for s in unit.grain.segments]
    (12, [(0, 6, 0), (6, 4, 6)])
    """
    total = len(rows) * sum(chunked.chunk for part in parts for chunked in part)
    waves: list[Wave] = []
    ranges: list[range] = []
    columns: list[tuple[Columns, ...]] = []
    widths: list[int] = []
    for part in parts:
        made = list(_units(part, reducer, total, len(rows), grain_numel))
        columns.append(tuple(_columns(made, len(widths))))
        widths += [unit.width for unit in made]
        units = [Unit(_grain(unit, rows), unit.reducer) for unit in made]
        limit = grain_numel or grain_size(total, reducer.payload_share)
        first = len(waves)
        waves += _waves(units, limit)
        ranges.append(range(first, len(waves)))
    return PartPlan(tuple(waves), tuple(ranges), tuple(columns), tuple(widths))


def _units(
    part: Sequence[Chunked], reducer: Reducer, total: int, rows: int, grain_numel: int | None
) -> Iterator[_Open]:
    """Units of a part, those that are full first; a chunk that is larger than a unit is cut evenly."""
    unfinished: list[_Open] = []
    for chunked in part:
        serving = reducer.assign(chunked.spec)
        if serving.scope == "tensor":
            raise CompositionError(
                f"{chunked.spec.name!r} is sharded, and low rank wants whole matrices: use int4, fp8 or topk:0.01"
            )
        most = max(1, (grain_numel or grain_size(total, serving.payload_share)) // rows)
        size = -(-chunked.chunk // max(1, -(-chunked.chunk // most)))
        for start in range(0, chunked.chunk, size):
            numel = min(size, chunked.chunk - start)
            unit = next((unit for unit in unfinished if unit.reducer == serving), None)
            if unit is not None and unit.width + numel > most:
                unfinished.remove(unit)
                yield unit
                unit = None
            if unit is None:
                unit = _Open(serving)
                unfinished.append(unit)
            unit.columns.append((chunked, start, numel))
    yield from unfinished


def _columns(units: Iterable[_Open], first: int) -> Iterator[Columns]:
    for index, unit in enumerate(units, first):
        at = 0
        for chunked, start, numel in unit.columns:
            yield Columns(chunked.spec.name, start, numel, index, at)
            at += numel


def _grain(unit: _Open, rows: range) -> Grain:
    """The rows of a unit, end to end."""
    segments: list[Segment] = []
    for number, row in enumerate(rows):
        at = number * unit.width
        for (spec, chunk), start, numel in unit.columns:
            begin = row * chunk + start
            if here := max(0, min(numel, spec.numel - begin)):
                segments.append(Segment(spec.name, begin, here, at))
            at += numel
    (first, start, _), (last, _, _) = unit.columns[0], unit.columns[-1]
    name = f"{first.spec.name}[{start}]..{last.spec.name}"
    shape = (unit.width * len(rows),)
    return Grain(name, tuple(segments), shape, first.spec.dtype, first.spec.device)


def _waves(units: Iterable[Unit], limit: int) -> Iterator[Wave]:
    """Units that follow each other travel together, up to a grain's elements."""
    wave: list[Unit] = []
    for unit in units:
        if wave and sum(u.grain.numel for u in wave) + unit.grain.numel > limit:
            yield tuple(wave)
            wave = []
        wave.append(unit)
    if wave:
        yield tuple(wave)


class InParts(Engine):
    """An engine whose gradients come in parts: `begin`, `run` for each that comes, `finish`.

    A part that does not come in a step keeps its state, and one that comes twice is reduced twice. New states are kept
    once the step is over, as in any engine.
    """

    def __init__(self, plan: PartPlan, transport: Transport, seed: int = 0) -> None:
        super().__init__(plan, transport, seed)
        self.parts = plan
        self._done: dict[int, Reduced] = {}
        self._padding = {i: where for i, unit in enumerate(plan.units) if (where := _gaps(unit.grain)) is not None}

    def begin(self, sink: Sink | None = None) -> None:
        """Get ready for a step. What is left of one that broke off is forgotten."""
        self.settle()
        self._done = {}

    def run(self, part: int, fill: Fill, sink: Sink) -> None:
        """Reduce a part from beginning to end.

        Args:
            part: which one.
            fill: is called for each of its units, shortly before its program begins.
            sink: is given this rank's shard of each unit's mean.
        """
        waves = [self._waves[wave] for wave in self.parts.parts[part]]
        units = [unit for wave in waves for unit in wave]
        self._commit(units)

        def programs(wave: int) -> list[Program]:
            for unit in waves[wave]:
                slot = self._slots[unit]
                slot.x = slot.x if slot.x.numel() else super(InParts, self).buffer_for(slot.unit)
                fill(unit, slot.x)
            return [self.program(unit) for unit in waves[wave]]

        def ended(number: int, result: Reduced) -> Reduced:
            sink(units[number], result.value.reshape(-1))
            self._let_go(self._slots[units[number]], result.state)
            return result._replace(value=result.value.new_empty(0))

        results = run(self._interpreter.script(len(waves), programs, ended), self._count_wait)
        self._done.update(zip(units, results, strict=True))

    def buffer_for(self, unit: Unit) -> Tensor:
        """Nothing: memory for a whole model is what sharding saves, so buffers last while their part is reduced."""
        return torch.empty(0, device=unit.grain.device)

    def _let_go(self, slot: Slot, new: State) -> None:
        """Forget a buffer, unless the new state is in it: then it changes places with the old one."""
        if all(leaf.tensor.data_ptr() != slot.x.data_ptr() for _, leaf in walk(new)):
            slot.x = self.buffer_for(slot.unit)

    def _count_wait(self, seconds: float) -> None:
        self.stats.wait_s += seconds

    def finish(self) -> None:
        """End the step, and count it."""
        self._fresh = [self._done[i].state if i in self._done else s.state for i, s in enumerate(self._slots)]
        self._flags = [result.bad.view(()) for result in self._done.values() if result.bad is not None]
        self._done = {}
        self.index += 1
        self.stats.steps += 1

    def count_dense(self, nbytes: int, wire_bytes: int) -> None:
        """Note what would have been sent uncompressed: how large it is, and how many bytes of it a rank sends."""
        self.stats.dense_bytes += nbytes
        self.stats.dense_wire_bytes += wire_bytes

    def forget(self) -> None:
        """Forget the new states of a step, and what is left of one that broke off."""
        super().forget()
        self._done = {}

    def settle(self) -> None:
        """Keep the new states of the last step, or forget them where ranks found it bad."""
        super().settle()
        for unit in self._padding:
            self._clear_padding(unit)

    def _commit(self, units: Iterable[int]) -> None:
        """Keep the new states of units that come a second time within one step, unless they were bad."""
        for unit in units:
            if (done := self._done.pop(unit, None)) is None or (done.bad is not None and bool(done.bad)):
                continue
            slot = self._slots[unit]
            slot.x, slot.state = spare_buffer(slot.state, done.state, slot.x), done.state
            if unit in self._padding:
                self._clear_padding(unit)

    def _clear_padding(self, unit: int) -> None:
        """Nothing is owed of what is not there: it is not saved, so a resumed run would not have it."""
        for _, leaf in walk(self._slots[unit].state):
            if leaf.kind == "element":
                leaf.tensor.view(-1)[self._padding[unit]] = 0


def _gaps(grain: Grain) -> Tensor | None:
    """Elements of a grain that no parameter has."""
    ends = [0, *(segment.offset + segment.numel for segment in grain.segments)]
    starts = [*(segment.offset for segment in grain.segments), grain.numel]
    gaps = [torch.arange(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
    return torch.cat(gaps).to(grain.device) if gaps else None
