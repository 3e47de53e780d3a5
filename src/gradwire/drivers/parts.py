"""Plans for gradients that come in parts, each of which ends before the next one begins.

A part is what sharded training reduces at a time: some parameters, laid out as one row a rank. Row r holds the elements
of each parameter that rank r owns, with zeros behind the end where they do not come out even. A grain is some columns
of all rows, so its shards are the rows, and each says which elements of which parameters it has:

    parameter w, 5 x 2, on 2 ranks       row 0: w[0:6]        row 1: w[6:10], two zeros

State is by name and element as everywhere, so it outlives the cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec, Segment
from gradwire.drivers.plan import Plan, Unit, Wave, grain_size, is_on_gpu
from gradwire.reducers.base import Reducer


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
        columns: what each part's units hold.
        widths: columns of each unit.
    """

    columns: tuple[tuple[Columns, ...], ...] = ()
    widths: tuple[int, ...] = ()

    @functools.cached_property
    def padding(self) -> dict[int, Tensor]:
        """Elements behind the ends of parameters that do not come out even, for units with such elements."""
        gaps = {i: _gaps(unit.grain) for i, unit in enumerate(self.units)}
        return {i: gap for i, gap in gaps.items() if gap.numel()}


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
    on_gpu = is_on_gpu(chunked.spec for part in parts for chunked in part)

    def limit(serving: Reducer) -> int:
        return grain_numel or grain_size(total, serving.payload_share, on_gpu)

    waves: list[Wave] = []
    ranges: list[range] = []
    columns: list[tuple[Columns, ...]] = []
    widths: list[int] = []
    for part in parts:
        here = reducer.of_model([chunked.spec for chunked in part])
        made = list(_units(part, here, len(rows), limit))
        columns.append(tuple(_columns(made, len(widths))))
        widths += [unit.width for unit in made]
        units = [Unit(_grain(unit, rows), unit.reducer) for unit in made]
        first = len(waves)
        waves += _waves(units, limit(reducer))
        ranges.append(range(first, len(waves)))
    return PartPlan(tuple(waves), tuple(ranges), tuple(columns), tuple(widths))


def _units(part: Sequence[Chunked], reducer: Reducer, rows: int, limit: Callable[[Reducer], int]) -> Iterator[_Open]:
    """Units of a part, those that are full first; a chunk that is larger than a unit is cut evenly."""
    unfinished: list[_Open] = []
    for chunked in part:
        serving = reducer.assign(chunked.spec)
        if serving.scope == "tensor":
            raise CompositionError(
                f"{chunked.spec.name!r} is sharded, and low rank wants whole matrices: use int4, fp8 or topk:0.01"
            )
        most = max(1, limit(serving) // rows)
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


def _gaps(grain: Grain) -> Tensor:
    """Elements of a grain that no parameter has."""
    ends = [0, *(segment.offset + segment.numel for segment in grain.segments)]
    starts = [*(segment.offset for segment in grain.segments), grain.numel]
    gaps = [torch.arange(end, max(end, start)) for end, start in zip(ends, starts, strict=True)]
    return torch.cat(gaps).to(grain.device)
