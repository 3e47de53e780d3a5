"""Grains and waves, planned once from names, shapes, dtypes, devices and policy alone.

A wave is what starts together, and the collectives of its programs are coalesced: one flat grain of at most
`GRAIN_NUMEL` elements, or matrices of up to `MATRIX_WAVE_GRAINS` times as many, those of equal shape batched. On a GPU
grains are larger, and a wave of matrices has room for two. A small model makes several waves, so that the first ones
travel during the backward pass: more where payloads are large. What matrices send is small, so there the number of
collectives counts and not their size: small vectors join the last wave of matrices, and their all-reduce travels with
the first factors.

Models of more than 134 million elements, on a GPU of more than 2 billion, have waves of several flat grains, so that a
step takes a few hundred collectives however large the model is. Grains stay as they are: they are what is coded at a
time, what keys count from and what state belongs to; only matrices of equal shape are batched in larger numbers. What
it costs is memory: each of the three waves in flight holds the payloads of all its grains twice, alone and joined. A
wave is 1/128 of the model. At 6.7 billion elements its payloads are 27 MB under `int4` and 211 MB uncompressed in
float32, and there are six times that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.grain import Grain, ParameterSpec, Segment
from gradwire.reducers.base import Reducer, as_reducer
from gradwire.reducers.requirements import require_whole

GRAIN_NUMEL = 1 << 20
"""Elements of a grain at most. Larger ones pay page faults for their temporaries, smaller ones fixed costs."""

GPU_GRAIN_NUMEL = 1 << 24
"""The same on a GPU. There the host is the bottleneck: with most methods it takes as long to hand over the work of a
small grain as that of a large one. docs/results.md has the steps of a model with grains of several sizes."""

SMALLEST_GRAIN_NUMEL = 1 << 16
WAVES = 4
"""Grains to cut a model into whose grains are not the largest: one is encoded while another's bytes move."""

FINE_WAVES = 8
"""The same where payloads are large: more of them travel during the backward pass. Each wave costs processor time."""

FINE_SHARE = 1 / 16
"""From which share of the gradient's bytes on a payload is large."""

MATRIX_WAVE_GRAINS = 8
"""A wave of matrices in grains: 32 MiB of float32 at most, near DDP's bucket of 25 MiB. Each wave costs two rounds."""

SMALLEST_MATRIX_WAVE_NUMEL = 1 << 18

FULL_WAVES = 128
"""About how many waves a step takes at most: each costs a round of collectives, and none has to be large to overlap."""


class Unit(NamedTuple):
    """A grain and the reducer that serves it."""

    grain: Grain
    reducer: Reducer


class GrainSlice(NamedTuple):
    """Where a part of a parameter lives: `numel` elements from `start` on, in a unit's grain from `offset` on.

    What a `Segment` says of a grain, said of a parameter.
    """

    unit: int
    start: int
    numel: int
    offset: int


def within(slices: Iterable[GrainSlice], begin: int, numel: int) -> list[GrainSlice]:
    """Where elements [begin, begin + numel) of a parameter live, counted from `begin`.

    >>> within([GrainSlice(0, 0, 10, 100), GrainSlice(1, 10, 10, 0)], begin=8, numel=5)
    [GrainSlice(unit=0, start=0, numel=2, offset=108), GrainSlice(unit=1, start=2, numel=3, offset=0)]
    """
    found: list[GrainSlice] = []
    for unit, start, size, offset in slices:
        low, high = max(begin, start), min(begin + numel, start + size)
        if low < high:
            found.append(GrainSlice(unit, low - begin, high - low, offset + low - start))
    return found


Wave = tuple[Unit, ...]


@dataclass(frozen=True)
class Plan:
    """All waves, in the order in which they run.

    Attributes:
        waves: units that travel together.
        parts: the waves of each part, where gradients come in parts; empty where they come as they are ready.
    """

    waves: tuple[Wave, ...]
    parts: tuple[range, ...] = ()

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every unit, wave by wave."""
        return tuple(unit for wave in self.waves for unit in wave)

    @property
    def slices(self) -> dict[str, list[GrainSlice]]:
        """Where each parameter lives, by name."""
        slices: dict[str, list[GrainSlice]] = {}
        for i, (grain, _) in enumerate(self.units):
            for name, start, numel, offset in grain.segments:
                slices.setdefault(name, []).append(GrainSlice(i, start, numel, offset))
        return slices

    @functools.cached_property
    def unit_numbers(self) -> tuple[range, ...]:
        """The numbers of each wave's units, counted over all waves."""
        ends = list(itertools.accumulate(len(wave) for wave in self.waves))
        return tuple(range(end - len(wave), end) for end, wave in zip(ends, self.waves, strict=True))

    @functools.cached_property
    def padding(self) -> dict[int, Tensor]:
        """Elements of units that no parameter has, for units with such elements."""
        return {}


class _Piece(NamedTuple):
    """Part of a parameter, with what decides which grain it may join."""

    parameter: ParameterSpec
    start: int
    numel: int
    reducer: Reducer
    together: Reducer

    @property
    def is_matrix(self) -> bool:
        return self.reducer.scope == "tensor"


@dataclass(eq=False)
class _Open:
    """A wave under construction: pieces that may share it."""

    key: tuple[Reducer, torch.dtype, torch.device]  # what its pieces travel with
    pieces: list[_Piece] = field(default_factory=list[_Piece])

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def is_matrix(self) -> bool:
        return self.pieces[0].is_matrix


def grain_size(numel: int, payload_share: float = 0.0, on_gpu: bool = False) -> int:
    """Elements of a grain for a model of `numel`: a quarter of it, between 65,536 and `GRAIN_NUMEL`.

    Where payloads are large (`Reducer.payload_share`) it is an eighth. On a GPU it is a quarter for all of them,
    between `GRAIN_NUMEL` and `GPU_GRAIN_NUMEL`.

    >>> grain_size(10_000), grain_size(2_000_000), grain_size(10**9)
    (65536, 500000, 1048576)
    >>> grain_size(2_000_000, payload_share=0.25)
    250000
    >>> [grain_size(numel, on_gpu=True) for numel in (10**6, 10**7, 10**9)]
    [1048576, 2500000, 16777216]
    """
    if on_gpu:
        return min(GPU_GRAIN_NUMEL, max(GRAIN_NUMEL, numel // WAVES))
    waves = FINE_WAVES if payload_share >= FINE_SHARE else WAVES
    return min(GRAIN_NUMEL, max(SMALLEST_GRAIN_NUMEL, numel // waves))


def is_on_gpu(parameters: Iterable[ParameterSpec]) -> bool:
    """Whether any of these parameters lies on a GPU."""
    return any(parameter.device.type == "cuda" for parameter in parameters)


def matrix_wave_size(numel: int, limit: int) -> int:
    """Elements of a wave of matrices for a model of `numel` whose grains have `limit` at most.

    A small model makes two waves, so that the first one's factors travel during the backward pass. A wave has room for
    five eighths of it, since matrices are not cut and what did not fit into two would cost two rounds more. There is
    room for 262,144 at least and for 8 grains of at most 2^20 elements, or more where waves of large models have more.
    Where grains are larger, as on a GPU, there is room for four.

    >>> matrix_wave_size(10_000, 65_536), matrix_wave_size(2_000_000, 500_000), matrix_wave_size(10**8, 1 << 20)
    (262144, 1250000, 8388608)
    >>> matrix_wave_size(10**9, 1 << 24)
    67108864
    """
    at_most = max(4 * limit, min(limit, GRAIN_NUMEL) * max(wave_grains(numel), MATRIX_WAVE_GRAINS))
    return min(at_most, max(SMALLEST_MATRIX_WAVE_NUMEL, numel * 5 // 8))


def wave_grains(numel: int) -> int:
    """Grains of a wave for a model of `numel` elements on a CPU: 1 up to 2^27, and 1/128 of the model beyond.

    It depends on the number of elements alone, so that ranks agree and nothing measured decides it.

    >>> wave_grains(100_000_000), wave_grains(7_000_000_000)
    (1, 53)
    """
    return max(1, -(-numel // (FULL_WAVES * GRAIN_NUMEL)))


def plan(parameters: Sequence[ParameterSpec], reducer: Reducer, grain_numel: int | None = None) -> Plan:
    """Plan grains for `parameters`, which stand in registration order; waves run in reverse, as gradients come.

    Parameters that one reducer serves share flat grains of at most `grain_numel` elements (default: `grain_size` of the
    model and the reducer); a larger parameter is cut evenly. A wave closes when it is full, and those still open at the
    end follow in the order they were opened.

    Raises:
        CompositionError: a reducer that leaves each rank with its shard of the mean only.

    >>> from gradwire.spec import parse
    >>> cpu = torch.device("cpu")
    >>> specs = [ParameterSpec("w", (3, 4), torch.float32, cpu), ParameterSpec("b", (3,), torch.float32, cpu)]
    >>> [unit.grain.name for unit in plan(specs, parse("none")).units]
    ['b..w']
    """
    reducer = as_reducer(reducer).of_model(parameters)
    total = sum(parameter.numel for parameter in parameters)
    on_gpu = is_on_gpu(parameters)

    def limit(serving: Reducer) -> int:
        return grain_numel or grain_size(total, serving.payload_share, on_gpu)

    closed: list[_Open] = []
    open_waves: list[_Open] = []
    for piece in _pieces(reversed(parameters), reducer, limit):
        wave = _wave_for(piece, open_waves)
        full = limit(piece.reducer)
        if piece.is_matrix:
            full = matrix_wave_size(total, full)
        if wave.pieces and wave.numel + piece.numel > full:
            closed.append(wave)
            open_waves.remove(wave)
            wave = _wave_for(piece, open_waves)
        wave.pieces.append(piece)
    larger = GPU_GRAIN_NUMEL // GRAIN_NUMEL if on_gpu else 1
    together = wave_grains(total // larger) * min((limit(wave.key[0]) for wave in closed), default=0)
    return Plan((*_together(closed, together), *_joined(open_waves)))


def _pieces(parameters: Iterable[ParameterSpec], reducer: Reducer, limit: Callable[[Reducer], int]) -> Iterable[_Piece]:
    for parameter in parameters:
        serving = require_whole(reducer.assign(parameter), "a step of a model")
        together = serving.travels_with
        if serving.scope == "tensor":
            yield _Piece(parameter, 0, parameter.numel, serving, together)
            continue
        parts = max(1, -(-parameter.numel // limit(serving)))
        size = max(1, -(-parameter.numel // parts))
        for start in range(0, max(1, parameter.numel), size):
            yield _Piece(parameter, start, min(size, parameter.numel - start), serving, together)


def _wave_for(piece: _Piece, open_waves: list[_Open]) -> _Open:
    key = (piece.together, piece.parameter.dtype, piece.parameter.device)
    for wave in open_waves:
        if wave.key == key:
            return wave
    open_waves.append(_Open(key))
    return open_waves[-1]


def _together(closed: Sequence[_Open], numel: int) -> Iterable[Wave]:
    """Units of closed waves; of flat ones that follow each other on a device, up to `numel` elements in one."""
    units: list[Unit] = []
    held, device = 0, None
    for wave in closed:
        if units and (wave.is_matrix or held + wave.numel > numel or wave.key[2] != device):
            yield tuple(units)
            units, held = [], 0
        if wave.is_matrix:
            yield _units(wave)
            continue
        units += _units(wave)
        held, device = held + wave.numel, wave.key[2]
    if units:
        yield tuple(units)


def _joined(waves: Sequence[_Open]) -> Iterable[Wave]:
    """Units of the waves, those of small flat ones in the last wave of matrices on their device."""
    hosts = {wave.key[2]: wave for wave in waves if wave.is_matrix}
    guests = [w for w in waves if not w.is_matrix and w.key[2] in hosts and w.numel <= SMALLEST_GRAIN_NUMEL]
    for wave in waves:
        if wave not in guests:
            joining = [guest for guest in guests if hosts[guest.key[2]] is wave]
            yield tuple(unit for part in (wave, *joining) for unit in _units(part))


def _units(wave: _Open) -> Wave:
    _, dtype, device = wave.key
    batches: dict[tuple[Reducer, tuple[int, int] | None], list[_Piece]] = {}
    for piece in wave.pieces:
        batches.setdefault((piece.reducer, piece.parameter.matrix_shape if wave.is_matrix else None), []).append(piece)
    return tuple(
        Unit(
            _grain(pieces, (len(pieces), *shape) if shape else (sum(p.numel for p in pieces),), dtype, device), reducer
        )
        for (reducer, shape), pieces in batches.items()
    )


def _grain(pieces: list[_Piece], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Grain:
    segments: list[Segment] = []
    offset = 0
    for piece in pieces:
        segments.append(Segment(piece.parameter.name, piece.start, piece.numel, offset))
        offset += piece.numel
    first, last = segments[0], segments[-1]
    start = f"{first.name}[{first.start}]" if first.start else first.name
    name = start if len(segments) == 1 else f"{start}..{last.name}"
    return Grain(name, tuple(segments), shape, dtype, device)
