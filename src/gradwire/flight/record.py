"""What a rank's flight recorder leaves in a file: JSON alone, whose types are checked when it is read.

rank0.json     {"format": "gradwire flight record 1", "run": ..., "rank": 0, ..., "events": [...], "threads": [...]}
rank1.json     ...
earlier        what earlier runs have left, see `gradwire.flight.earlier`
ask            {"token": ...}, where `gradwire stacks DIR --ask` asks all ranks what they do
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import checked
from gradwire.core.errors import FlightError
from gradwire.core.json_file import printable_data, read_json
from gradwire.core.rank_files import rank_file

FORMAT = "gradwire flight record 1"

VARIABLE = "GRADWIRE_RECORDS"
"""Of the environment: the folder that records are written into."""

RUNNING, DIED, ENDED = "running", "died", "ended"
"""States of a rank when it wrote its record."""

MOST_BYTES = 1 << 24
"""Of a record that is read: a thousand events and the stacks of many threads have a tenth of it."""


@dataclass(frozen=True)
class Event:
    """One event of a rank.

    Attributes:
        number: of the event in its process, from 0.
        time_s: by the clock of the rank's host, in seconds since 1970.
        lane: the order of collectives that it belongs to, by its name.
        event: "step began", "step ended", "issued", "waits", "taken", "failed", "meets", "met" or "ended".
        what: the collective, or the call at which ranks meet.
        sequence: the number of the collective in its lane, from 1: of ranks in step, the same number is the same one.
        nbytes: that this rank hands over.
        step: of the session; -1 before the first.
    """

    number: int
    time_s: float
    lane: str
    event: str
    what: str
    sequence: int
    nbytes: int
    step: int


@dataclass(frozen=True)
class LaneState:
    """Where a lane of a rank stood.

    Attributes:
        name: of the lane, the same on all of its ranks and used for no other.
        what: the call that made it.
        ranks: its members.
        step: of the last step that began; -1 before the first.
        in_step: whether that step has not ended.
        issued: how many collectives the rank has started here.
        taken: the number of the last one whose result was taken.
        waits: whether the rank waits for one.
        sequence: the number of the collective that is waited for, else of the last one that was started.
        collective: its kind.
        nbytes: that this rank hands over to it.
        meets: the call at which the rank waits for others, if it does.
        since_s: when that began, or the last thing that happened here, by the clock of the rank's host.
        ended: whether the lane was closed.
    """

    name: str
    what: str
    ranks: list[int]
    step: int
    in_step: bool
    issued: int
    taken: int
    waits: bool
    sequence: int
    collective: str
    nbytes: int
    meets: str
    since_s: float
    ended: bool

    @property
    def called(self) -> str:
        """What the rank does there, without the time.

        >>> LaneState("a", "gradwire.attach", [0, 1], 7, True, 3, 2, True, 3, "AllReduce", 400, "", 0.0, False).called
        'waits for AllReduce 3 of 400 bytes in step 7 of gradwire.attach'
        """
        place = f"in step {self.step} of {self.what}" if self.step >= 0 else f"before the first step of {self.what}"
        if self.meets:
            return f"waits for the other ranks in {self.meets}"
        if self.waits:
            return f"waits for {self.collective} {self.sequence} of {self.nbytes:,} bytes {place}"
        if self.ended:
            return f"has closed {self.what}" + (f" after step {self.step}" if self.step >= 0 else "")
        if self.in_step:
            last = f", and has started {self.collective} {self.sequence} last" if self.sequence else ""
            return f"is {place}, waits for no collective{last}"
        return f"is after step {self.step} of {self.what}" if self.step >= 0 else f"is {place}"


@dataclass(frozen=True)
class ThreadStack:
    """What a thread was doing.

    Attributes:
        name: of the thread.
        frames: "path:line in function: source", the innermost one last.
    """

    name: str
    frames: list[str]


@dataclass(frozen=True)
class NotFinite:
    """The first tensor of a run that was not finite.

    Attributes:
        step: in which it was found.
        rank: whose gradient it was; None for a mean, which is that of all ranks.
        tensor: its name.
        where: "before the exchange", a gradient of that rank; or "after the exchange", though no gradient was before.
    """

    step: int
    rank: int | None
    tensor: str
    where: str

    @property
    def said(self) -> str:
        """It, in a sentence.

        >>> NotFinite(7, 1, "head.weight", "before the exchange").said
        "rank 1's gradient of 'head.weight' was not finite in step 7, before the exchange"
        """
        whose = "the mean" if self.rank is None else f"rank {self.rank}'s gradient"
        return f"{whose} of {self.tensor!r} was not finite in step {self.step}, {self.where}"


@dataclass(frozen=True)
class FlightRecord:
    """What one rank has left.

    Attributes:
        run: drawn once a run, the same on all ranks.
        rank, world_size: in the default process group.
        host, pid: where the rank runs, or ran.
        state: "running", "died" or "ended".
        why: it was written, in a line.
        own: whether the rank died of something of its own, and not of what other ranks did.
        error: the traceback, where the rank died of an exception.
        written_s: by the clock of the host, in seconds since 1970.
        answers: the token of the question that it answers; "" without one.
        lanes: where each stood.
        threads: what each did, the main thread first.
        events: the last ones.
        not_finite: the first tensor that was not, if that is known.
        comes_and_goes: whether it is a worker of `gradwire.sync.Elastic`. `rank` is then its number, which no other one
            of the run has had, and `world_size` only says that there were so many at least.
    """

    run: str
    rank: int
    world_size: int
    host: str
    pid: int
    state: str
    why: str
    own: bool
    written_s: float
    lanes: list[LaneState] = field(default_factory=list[LaneState])
    threads: list[ThreadStack] = field(default_factory=list[ThreadStack])
    events: list[Event] = field(default_factory=list[Event])
    error: str = ""
    answers: str = ""
    not_finite: NotFinite | None = None
    comes_and_goes: bool = False

    def write(self, folder: Path) -> None:
        """Write it as a whole: a reader sees this one, or what was there before."""
        write_atomically(rank_file(folder, self.rank), json.dumps({"format": FORMAT, **msgspec.to_builtins(self)}))


def read_record(path: Path) -> FlightRecord:
    """Read the record of a rank. Nothing in it is executed, and texts come without what would move a cursor.

    Raises:
        FlightError: it is damaged, cut off, or no record of gradwire's.
    """
    remedy = "; remove it, or copy it anew from the host that wrote it"
    data = read_json(path, FlightError, MOST_BYTES, remedy)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FlightError(f"{path} is not a record of this version of gradwire ({FORMAT!r}){remedy}")
    found = checked(printable_data(data), FlightRecord, path.name, FlightError, remedy=remedy)
    if path.name != f"rank{found.rank}.json" or not 0 <= found.rank < found.world_size:
        raise FlightError(f"{path} says that it is of rank {found.rank} of {found.world_size}: give it its own name")
    return found
