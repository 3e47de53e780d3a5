"""What a rank keeps of its steps, and the file that holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import checked
from gradwire.core.errors import GradwireError
from gradwire.core.figures import listed
from gradwire.core.json_file import printable_data, read_json
from gradwire.core.rank_files import rank_file, rank_files
from gradwire.drivers.traced import Span
from gradwire.profiling.unfinished import read_parts, unfinished_parts
from gradwire.topology import MeasuredPair

_MOST_BYTES = 1 << 30
"""Of a record that is read: 200 steps of a thousand collectives each have a tenth of it."""


class ProfileError(GradwireError, ValueError):
    """Records of a profile that cannot be read, or do not belong together."""


@dataclass(frozen=True)
class ClockReading:
    """How far a rank's clock was from rank 0's, at one moment.

    Attributes:
        at_s: by the rank's own clock.
        offset_s: rank 0's clock less this one.
        round_trip_s: of the exchange that told; the error is half of it at most.
    """

    at_s: float
    offset_s: float
    round_trip_s: float


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank, by its own clock.

    Attributes:
        index: counted from 0.
        began_s, ended_s: of the training loop.
        loop: spans of the training loop, one after the other: "data", "forward", "loss", "backward", "gradients"
            (clipping, unscaling), "optimizer".
        waits: when the training loop waited for communication, within them.
        communication: for each session, the spans of its communication, in the order in which they ended.
    """

    index: int
    began_s: float
    ended_s: float
    loop: list[Span]
    waits: list[Span]
    communication: list[list[Span]]

    @property
    def length_s(self) -> float:
        """Seconds of the step."""
        return self.ended_s - self.began_s


@dataclass(frozen=True)
class TensorRecord:
    """What a tensor had of one rank's communication.

    Attributes:
        name: of the parameter.
        method: that serves it.
        dense_bytes: of its gradient.
        wire_bytes: that this rank sent in a step, as payloads and the algorithm of each collective predict: the mean
            over all steps of the block.
        residual_norm: of what this rank owes of it in the end; None where it owes nothing, or the run broke off.
    """

    name: str
    method: str
    dense_bytes: int
    wire_bytes: float
    residual_norm: float | None


@dataclass(frozen=True)
class RankRecord:
    """The last steps of one rank, and how its clock went.

    Attributes:
        run: alike on all ranks of a run, and of no other one.
        methods: of each session.
        clock: readings at the beginning and at the end; none of a rank that trains alone, one of a run that broke off.
        links: between pairs of ranks, alike in all records, where they were measured.
        tensors: those of all sessions.
        unfinished: whether the process ended before the block did, as by SIGKILL: then these are the steps that it had
            written until then.
    """

    run: str
    rank: int
    world_size: int
    host: str
    methods: list[str]
    clock: list[ClockReading]
    steps: list[StepRecord]
    links: list[MeasuredPair] = field(default_factory=list[MeasuredPair])
    tensors: list[TensorRecord] = field(default_factory=list[TensorRecord])
    unfinished: bool = False

    def on_common_clock(self, at_s: float) -> float:
        """Return a moment of this rank by rank 0's clock: offset and drift follow the readings on a straight line.

        >>> readings = [ClockReading(0.0, 5.0, 0.0), ClockReading(100.0, 5.1, 0.0)]
        >>> record = RankRecord("run", 1, 2, "host", [], readings, [])
        >>> round(record.on_common_clock(50.0), 6)
        55.05
        """
        if not self.clock:
            return at_s
        first, last = self.clock[0], self.clock[-1]
        passed = last.at_s - first.at_s
        drift = (last.offset_s - first.offset_s) / passed if passed > 0 else 0.0
        return at_s + first.offset_s + drift * (at_s - first.at_s)

    def steps_on_common_clock(self) -> dict[int, StepRecord]:
        """The steps by their numbers, with all times on the common clock."""
        return {step.index: self._moved(step) for step in self.steps}

    def _moved(self, step: StepRecord) -> StepRecord:
        def moved(spans: Sequence[Span]) -> list[Span]:
            return [
                span._replace(began_s=self.on_common_clock(span.began_s), ended_s=self.on_common_clock(span.ended_s))
                for span in spans
            ]

        began_s, ended_s = self.on_common_clock(step.began_s), self.on_common_clock(step.ended_s)
        communication = [moved(spans) for spans in step.communication]
        return StepRecord(step.index, began_s, ended_s, moved(step.loop), moved(step.waits), communication)

    def to_json(self) -> str:
        """The record as a file has it."""
        return json.dumps(asdict(self), default=msgspec.to_builtins)

    def write(self, folder: Path) -> Path:
        """Write `rankN.json` into a folder, whole or not at all, and return where it is."""
        path = rank_file(folder, self.rank)
        write_atomically(path, self.to_json())
        return path


def record_of(data: Any, where: str) -> RankRecord:
    """Return the record that plain data hold, free of what would move a terminal's cursor.

    Raises:
        ProfileError: they hold none.
    """
    return checked(printable_data(data), RankRecord, where, ProfileError)


def read_records(folder: Path) -> list[RankRecord]:
    """Return the records of all ranks of a folder, in the order of ranks.

    Raises:
        ProfileError: no records, one that cannot be read, records of several runs, or no step that all ranks have.
    """
    data = list(_data(folder, "; remove it, or copy it anew from the host that wrote it"))
    if not data:
        raise ProfileError(
            f"{folder} holds no profile: give the folder that gradwire.profile wrote rank0.json into, or traces of "
            "torch.profiler"
        )
    records = together([record_of(each, where) for each, where in data])
    if empty := [record.rank for record in records if not record.steps]:
        raise ProfileError(
            f"rank{'s' * (len(empty) > 1)} {listed(empty)} kept no step, as the run ended in the first one, or nothing "
            f"called profile.step(): remove what {folder} has of {'them' if len(empty) > 1 else 'it'} to see the others"
        )
    if not set[int].intersection(*({step.index for step in record.steps} for record in records)):
        raise ProfileError(f"no step is in the records of all ranks of {folder}: give profile() a larger keep=")
    return records


def _data(folder: Path, remedy: str) -> Iterator[tuple[Any, str]]:
    """The data of each rank's record, and where they are; of a rank that was killed those of its newest run."""
    whole, parts = rank_files(folder), unfinished_parts(folder)
    for rank in sorted({*whole, *parts}):
        path = whole.get(rank)
        if rank not in parts or (path is not None and _changed(path) >= max(map(_changed, parts[rank]))):
            assert path is not None
            yield read_json(path, ProfileError, _MOST_BYTES, remedy), str(path)
        else:
            yield read_parts(parts[rank], ProfileError, _MOST_BYTES, remedy), str(parts[rank][-1])


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


def together(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return records in the order of ranks, if they belong together.

    Raises:
        ProfileError: records of several runs, or two of one rank.
    """
    records = sorted(records, key=lambda record: record.rank)
    runs = {(record.run, record.world_size) for record in records}
    if len(runs) > 1:
        raise ProfileError(
            f"these records are of {len(runs)} runs, ranks {listed([record.rank for record in records])}: keep each "
            "run in a folder of its own"
        )
    ranks = [record.rank for record in records]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise ProfileError(f"there are two records of rank {listed(twice)}: keep the one whose file has its name")
    return records
