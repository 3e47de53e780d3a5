"""What is known of a run at one moment, from what its ranks have told: figures of each rank, and of all of them.

How long a rank waits for communication in a step is the sum of two things: bytes that travel, with the coding that the
training loop waits for, and ranks that come later. The rank that comes last waits for nobody, so the least wait of a
step over all ranks is what its communication took, and what another rank waits beyond that is for the rank that waits
least. This needs no common clock. (`session.report()` does the same with exposed times.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.profiling.history import JsonNumber, to_json_number
from gradwire.profiling.live import LiveRecord, LiveStep

LAST = 50
"""Steps that figures are means over: the last ones that all ranks have told of."""

SILENT_S = 10.0
"""After which a rank that should write every second is taken for dead or stopped."""

PARTS = ("data", "compute", "transfer", "wait")
"""What a step is spent on."""


@dataclass(frozen=True)
class RankView:
    """One rank, over the last steps that all ranks have told of.

    Attributes:
        rank, host: of the record.
        state: "running", "ended" or "failed".
        error: the exception that ended it, in a line.
        steps: that have ended.
        silent_s: since its file has changed.
        doing, doing_s: what the training loop did then, and since when.
        step_ms: of a step.
        parts_ms: of it, by `PARTS`; "transfer" is what the least waiting rank waited too.
        sent_bytes: in a step.
        ratio: what uncompressed gradients would have sent by that; None where nothing was sent.
        caused_ms: what the others waited for this rank in a step, in the mean over them.
        residual_norm: of all that the rank owes; None if it owes nothing.
        gradient_norm: where it is known.
    """

    rank: int
    host: str
    state: str
    error: str
    steps: int
    silent_s: float
    doing: str
    doing_s: float
    step_ms: float
    parts_ms: Mapping[str, float]
    sent_bytes: float
    ratio: float | None
    caused_ms: float
    residual_norm: float | None
    gradient_norm: float | None

    @property
    def is_silent(self) -> bool:
        """Whether the rank should write, and has not for long."""
        return self.state == "running" and self.silent_s >= SILENT_S


@dataclass(frozen=True)
class RunView:
    """A run, as far as its ranks have told.

    Attributes:
        methods: of the sessions.
        world_size: how many ranks there are.
        ranks: those that have told something, in order.
        scalars: the course of what scripts have told: steps, and the mean over ranks.
        step_ms: the course of the length of steps, the mean over ranks.
        residual: the course of residuals' norms, the largest one of the ranks.
        problems: files that cannot be read, a sentence each.
    """

    methods: Sequence[str]
    world_size: int
    ranks: Sequence[RankView]
    scalars: Mapping[str, Sequence[tuple[int, float]]]
    step_ms: Sequence[tuple[int, float]]
    residual: Sequence[tuple[int, float]]
    problems: Sequence[str] = field(default_factory=tuple)

    @property
    def steps(self) -> int:
        """Steps that all ranks have ended that have told something."""
        return min((rank.steps for rank in self.ranks), default=0)

    @property
    def missing(self) -> list[int]:
        """Ranks that have told nothing."""
        there = {rank.rank for rank in self.ranks}
        return [rank for rank in range(self.world_size) if rank not in there]

    @property
    def mean_step_ms(self) -> float:
        """A step of the slowest rank."""
        return max((rank.step_ms for rank in self.ranks), default=0.0)

    @property
    def is_over(self) -> bool:
        """Whether ranks have said that they ended, well or not, and all others are silent."""
        ended = [rank.state != "running" for rank in self.ranks]
        return any(ended) and all(over or rank.is_silent for over, rank in zip(ended, self.ranks, strict=True))

    @property
    def failed(self) -> RankView | None:
        """The rank to blame: one that failed of something of its own, else the first that failed."""
        failed = [rank for rank in self.ranks if rank.state == "failed"]
        own = (rank for rank in failed if not rank.error.startswith("CommunicationError"))
        return next(own, failed[0] if failed else None)

    def to_builtins(self) -> dict[str, Any]:
        """Return all figures as JSON can hold them: those that are not finite are the texts "nan", "inf" and "-inf"."""
        found: dict[str, Any] = _plain(
            {name: value for name, value in vars(self).items() if name != "ranks"}
            | {"ranks": [vars(rank) for rank in self.ranks]}
            | {"steps": self.steps, "step_of_slowest_ms": self.mean_step_ms, "missing": self.missing}
            | {"is_over": self.is_over}
        )
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return to_json_number(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def view_of(records: Sequence[LiveRecord], silent_s: Mapping[int, float], problems: Sequence[str] = ()) -> RunView:
    """Return what is known of a run.

    Args:
        records: of the ranks of one run, one at least, in order.
        silent_s: seconds since the file of each has changed.
        problems: with other files.
    """
    rows = _common(records)
    communication = [min(step.wait_s for step in steps) for steps in zip(*rows, strict=True)]
    caused = _caused_s(rows, communication)
    ranks = [
        _rank(record, silent_s.get(record.rank, 0.0), row, communication, caused_s)
        for record, row, caused_s in zip(records, rows, caused, strict=True)
    ]
    names = dict.fromkeys(name for record in records for name in record.scalars)
    return RunView(
        methods=list(records[0].methods),
        world_size=records[0].world_size,
        ranks=ranks,
        scalars={name: _mean_course([r.scalars[name] for r in records if name in r.scalars]) for name in names},
        step_ms=_mean_course([record.step_ms for record in records]),
        residual=_course([record.residual for record in records], max),
        problems=list(problems),
    )


def _common(records: Sequence[LiveRecord]) -> list[list[LiveStep]]:
    """Of each rank the last steps that all have told of: as many of each, at most `LAST`."""
    by_index = [{step.number: step for step in record.last} for record in records]
    indices = sorted(set.intersection(*map(set, by_index)))[-LAST:]
    return [[steps[index] for index in indices] for steps in by_index]


def _caused_s(rows: Sequence[Sequence[LiveStep]], communication: Sequence[float]) -> list[float]:
    """What the others waited for each rank in a step, the mean over steps and over them."""
    caused = [0.0] * len(rows)
    if len(rows) < 2 or not communication:
        return caused
    for steps, least_s in zip(zip(*rows, strict=True), communication, strict=True):
        last = min(range(len(steps)), key=lambda place: steps[place].wait_s)
        caused[last] += sum(step.wait_s - least_s for step in steps) / (len(steps) - 1)
    return [seconds / len(communication) for seconds in caused]


def _rank(
    record: LiveRecord, silent_s: float, row: Sequence[LiveStep], communication: Sequence[float], caused_s: float
) -> RankView:
    transfer_s = _mean(communication)
    parts_s = {
        "data": _mean([step.data_s for step in row]),
        "compute": _mean([step.compute_s for step in row]),
        "transfer": transfer_s,
        "wait": _mean([step.wait_s for step in row]) - transfer_s,
    }
    sent, dense = _mean([step.sent for step in row]), _mean([step.dense for step in row])
    return RankView(
        rank=record.rank,
        host=record.host,
        state=record.state,
        error=record.error,
        steps=record.steps,
        silent_s=silent_s,
        doing=record.doing,
        doing_s=record.doing_s,
        step_ms=1e3 * _mean([step.step_s for step in row]),
        parts_ms={part: 1e3 * seconds for part, seconds in parts_s.items()},
        sent_bytes=sent,
        ratio=dense / sent if sent > 0 else None,
        caused_ms=1e3 * caused_s,
        residual_norm=float(record.residual[-1][1]) if record.residual else None,
        gradient_norm=float(record.gradient) if record.gradient is not None else None,
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _mean_course(courses: Sequence[Sequence[tuple[int, JsonNumber]]]) -> list[tuple[int, float]]:
    return _course(courses, statistics.fmean)


def _course(courses: Sequence[Sequence[tuple[int, JsonNumber]]], combine: Any) -> list[tuple[int, float]]:
    """A figure of all ranks at each step that any has told of; NaN where one rank's is."""
    found: dict[int, list[float]] = {}
    for course in courses:
        for index, value in course:
            found.setdefault(index, []).append(float(value))
    return [
        (index, math.nan if any(map(math.isnan, values)) else combine(values))
        for index, values in sorted(found.items())
    ]
