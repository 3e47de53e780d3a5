"""The records of all ranks read together: which rank differs from the others first, and in what."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradwire.core.errors import FlightError
from gradwire.core.figures import ranks_named
from gradwire.core.rank_files import rank_files
from gradwire.flight.at_hand import at_hand, expected_ranks, process_of
from gradwire.flight.doing import doing, foremost, seconds
from gradwire.flight.earlier import earlier_runs
from gradwire.flight.keeping import TERMINATED, ask
from gradwire.flight.record import DIED, ENDED, RUNNING, VARIABLE, FlightRecord, LaneState, NotFinite, read_record
from gradwire.flight.threads import text_of

PATIENCE_S = 5.0
"""How long `stacks_of` waits for answers: ranks look for a question twice a second."""

_PAUSE_S = 0.05
_NO_RECORD = "no record"


@dataclass(frozen=True)
class RankLine:
    """What one rank did last.

    Attributes:
        rank: its number.
        state: "running", "died" or "ended"; "no record" without one.
        doing: what it did, and since when.
        why: its record was written.
        stack: of all its threads, the main thread first; "" where it could not be had.
        main_stack: of the main thread alone.
    """

    rank: int
    state: str
    doing: str
    why: str = ""
    stack: str = ""
    main_stack: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Which rank differs from the others first.

    Attributes:
        kind: "failed", "killed", "no record", "unanswered", "different collectives", "behind", "terminated" or "alike".
        ranks: who differs; empty where all are alike.
        sentence: in what.
        lines: what each rank did.
        notes: what else is to be known: records that cannot be read, a tensor that is not finite.
    """

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    lines: list[RankLine]
    notes: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        parts = [self.sentence, *self.notes]
        parts += [f"rank {line.rank} ({line.state}): {line.doing}" for line in self.lines]
        parts += [
            f"rank {line.rank}, {line.main_stack}" for line in self.lines if line.rank in self.ranks and line.stack
        ]
        return "\n".join(parts)


def stacks_of(folder: Path | str, ask_first: bool = False, patience_s: float = PATIENCE_S) -> Diagnosis:
    """Read the records of all ranks, and name the first rank that differs.

    Args:
        folder: what `GRADWIRE_RECORDS`, or `records=` of `gradwire.attach`, has named.
        ask_first: have every rank that is alive write what it does now, and wait for that.
        patience_s: how long to wait at most.

    Raises:
        FlightError: there are no records, or they do not belong together.

    Example:
        print(gradwire.flight.stacks_of("records", ask_first=True))
    """
    folder = Path(folder)
    records, damaged = read_all(folder)
    if not ask_first:
        return _with_earlier(judge(records, damaged), folder)
    token, end = uuid.uuid4().hex, time.monotonic() + patience_s
    try:
        ask(folder, token)
    except OSError as error:
        raise FlightError(f"{folder} cannot be written into, so no rank can be asked: {error.strerror}") from error
    while time.monotonic() < end:
        records, damaged = read_all(folder)
        if all(record.answers == token or record.state != RUNNING for record in records.values()):
            break
        time.sleep(_PAUSE_S)
    return _with_earlier(judge(records, damaged, token), folder)


def read_all(folder: Path) -> tuple[dict[int, FlightRecord], dict[int, str]]:
    """Return the records of a folder by their ranks, and of each that cannot be read a sentence that says why.

    Of several runs those of the newest one count: a rank that has not come back leaves what it wrote in the one before.

    Raises:
        FlightError: there are none, or those of one run say that it has different numbers of ranks.
    """
    paths = rank_files(folder)
    if not paths:
        raise FlightError(
            f"there are no records in {folder}: set {VARIABLE}={folder} for all ranks, or give records= to "
            "gradwire.attach, and look again while the run is under way or once it has died"
        )
    records: dict[int, FlightRecord] = {}
    damaged: dict[int, str] = {}
    for rank, path in paths.items():
        try:
            records[rank] = read_record(path)
        except FlightError as error:
            damaged[rank] = str(error)
    if not records:
        raise FlightError(next(iter(damaged.values())))
    newest = max(records.values(), key=lambda record: record.written_s)
    records = {rank: record for rank, record in records.items() if record.run == newest.run}
    for other in records.values():
        if other.world_size != newest.world_size and not newest.comes_and_goes:
            ranks = [f"rank{r.rank}.json is of run {r.run[:8]} with {r.world_size} ranks" for r in (newest, other)]
            raise FlightError(f"{ranks[0]}, and {ranks[1]}: remove the file that does not belong there")
    return records, damaged


def _with_earlier(found: Diagnosis, folder: Path) -> Diagnosis:
    """The same, with notes of earlier runs whose records are there too."""
    own = {line.rank for line in found.lines if line.state != _NO_RECORD}
    notes = [
        f"rank{rank}.json is of an earlier run, and is left out"
        for rank in rank_files(folder)
        if rank not in own and not any(f"rank{rank}.json" in note for note in found.notes)
    ]
    if earlier := earlier_runs(folder):
        runs = "an earlier run" if len(earlier) == 1 else f"{len(earlier)} earlier runs"
        notes.append(f"there are records of {runs} too: gradwire stacks {earlier[0]} reads the newest of them")
    return replace(found, notes=[*found.notes, *notes])


# Who differs ---------------------------------------------------------------------------------------------------------


def judge(records: Mapping[int, FlightRecord], damaged: Mapping[int, str] | None = None, token: str = "") -> Diagnosis:
    """Name the first rank that differs from the others.

    The first of these that is found counts:

        failed                    a rank died of an exception of its own
        killed, no record         a rank wrote nothing when the others died, or never did
        unanswered                a rank did not answer, though its process is there
        different collectives     under one number ranks have different collectives
        behind                    a rank waits nowhere, while others wait for a collective that it has not started
        different collectives     ranks wait for each other at different places
        terminated                some ranks were told to end by SIGTERM, and others lost them
        no record                 a record cannot be read

    Args:
        records: by rank, all of one run.
        damaged: what is wrong with records that cannot be read, by rank.
        token: of the question that ranks that run should have answered; "" if they were not asked.
    """
    damaged = damaged or {}
    expected = expected_ranks(records)
    lines = [_line(rank, records.get(rank), rank in damaged) for rank in sorted({*expected, *records, *damaged})]
    notes = [*damaged.values(), *_not_finite(records)]
    if next(iter(records.values())).comes_and_goes:
        records, gone = at_hand(records, expected)
        if gone:
            notes.append(f"the others have gone on without {ranks_named(gone)}")
    kind, ranks, sentence = (
        _failed(records)
        or _absent(records, damaged, token, expected)
        or _differing(records)
        or _behind(records)
        or _apart(records)
        or _terminated(records)
        or (("no record", sorted(damaged), _UNREADABLE) if damaged else ("alike", (), _alike(records)))
    )
    return Diagnosis(kind, tuple(ranks), sentence, lines, notes)


_UNREADABLE = "the ranks whose records can be read do not differ, and the others may"

_Found = tuple[str, Sequence[int], str]


def _line(rank: int, record: FlightRecord | None, is_damaged: bool) -> RankLine:
    if record is None:
        return RankLine(rank, _NO_RECORD, f"has left {'a record that cannot be read' if is_damaged else 'no record'}")
    said = doing(record.lanes, record.threads, record.written_s)
    if record.state == ENDED:
        said = f"has ended; {said}"
    return RankLine(
        rank, record.state, said, record.why, text_of(record.threads), text_of(record.threads, only_main=True)
    )


def _failed(records: Mapping[int, FlightRecord]) -> _Found | None:
    failed = sorted((r for r in records.values() if r.state == DIED and r.own), key=lambda record: record.written_s)
    if not failed:
        return None
    first = failed[0]
    lane = foremost(first.lanes)
    where = f" in step {lane.step}" if lane is not None and lane.step >= 0 else ""
    return "failed", [first.rank], f"rank {first.rank} failed{where}: {first.why}"


def _absent(
    records: Mapping[int, FlightRecord], damaged: Mapping[int, str], token: str, expected: Sequence[int]
) -> _Found | None:
    """Ranks that have written nothing of what happened."""
    missing = [rank for rank in expected if rank not in records and rank not in damaged]
    if missing:
        return "no record", missing, f"{ranks_named(missing)} left no record: it never made a session, or {_KILLED}"
    running = [record for record in records.values() if record.state == RUNNING]
    gone = [record.rank for record in running if process_of(record) == ""]
    if gone:
        return "killed", gone, f"{ranks_named(gone)} left no record of the end, and the process is gone: {_KILLED}"
    dead = any(record.state == DIED for record in records.values())
    tokens = {token} if token else {f"{record.run}/{record.rank}" for record in records.values()}
    silent = [record for record in running if (dead or token) and record.answers not in tokens]
    if not silent:
        return None
    ranks, first = [record.rank for record in silent], silent[0]
    how = {
        None: f"look at host {first.host}: process {first.pid} was killed, or the host is gone or sees another folder",
        "T": f"the process {first.pid} is stopped: kill -CONT {first.pid} lets it go on",
    }.get(process_of(first), f"the process {first.pid} is there, but inside of C code that keeps Python's lock")
    return "unanswered", ranks, f"{ranks_named(ranks)} did not say what it does when it was asked; {how}"


_KILLED = (
    "it was killed (SIGKILL, as the kernel does where memory runs out, or a batch system at its limits), or its host "
    "is gone; look at its output and at the host's log"
)


def _lanes(records: Mapping[int, FlightRecord]) -> Iterator[dict[int, LaneState]]:
    """The lanes that several ranks have, in the order in which they were made: what each rank says of it."""
    names = dict.fromkeys(lane.name for record in records.values() for lane in record.lanes)
    for name in names:
        found = {r: lane for r, record in records.items() for lane in record.lanes if lane.name == name}
        if len(found) > 1:
            yield found


def _apart(records: Mapping[int, FlightRecord]) -> _Found | None:
    """Ranks that wait for each other at different places: in two lanes, or some in a call at which ranks meet.

    Those at the place where fewest are differ; where no place has fewer than the others, all of them do.
    """
    waiting = {r: lane for r, record in records.items() if (lane := foremost(record.lanes)) and _is_waiting(lane)}
    places: dict[str, list[int]] = {}
    for rank, lane in sorted(waiting.items()):
        if any(_wait_for_each_other(rank, lane, other, its) for other, its in waiting.items()):
            places.setdefault(lane.meets or lane.name, []).append(rank)
    if not places:
        return None
    fewest, *others = sorted(places.values(), key=len)
    ranks = fewest if all(len(fewest) < len(other) for other in others) else sorted(waiting)
    said = "; ".join(f"{ranks_named(those)}: {waiting[those[0]].called}" for those in places.values())
    return "different collectives", ranks, f"ranks wait for each other at different places. {said}"


def _wait_for_each_other(rank: int, lane: LaneState, other: int, its: LaneState) -> bool:
    return (its.meets or its.name) != (lane.meets or lane.name) and rank in its.ranks and other in lane.ranks


def _terminated(records: Mapping[int, FlightRecord]) -> _Found | None:
    told = [record.rank for record in records.values() if record.state == DIED and record.why == TERMINATED]
    others = [record for record in records.values() if record.state == DIED and record.rank not in told]
    if not told or not others:
        return None
    sentence = f"{ranks_named(told)} {TERMINATED}, as a batch system or a launcher does, and the others lost it"
    return "terminated", told, sentence


def _is_waiting(lane: LaneState) -> bool:
    return bool(lane.meets) or lane.waits


def _differing(records: Mapping[int, FlightRecord]) -> _Found | None:
    """Ranks that have other collectives than others under one number."""
    return next((found for lane in _lanes(records) if (found := _mismatch(records, lane)) is not None), None)


def _mismatch(records: Mapping[int, FlightRecord], lane: Mapping[int, LaneState]) -> _Found | None:
    """The first number at which ranks have started different kinds of collectives, as far as their events go."""
    name = next(iter(lane.values())).name
    kinds: dict[int, dict[int, str]] = {}
    for rank in lane:
        for event in records[rank].events:
            if event.lane == name and event.event == "issued":
                kinds.setdefault(event.sequence, {})[rank] = _kind(event.what, event.nbytes)
    for sequence, by_rank in sorted(kinds.items()):
        if len(set(by_rank.values())) > 1:
            counted = sorted(set(by_rank.values()), key=lambda kind: sum(k == kind for k in by_rank.values()))
            odd = [rank for rank, kind in by_rank.items() if kind == counted[0]]
            said = "; ".join(f"rank {rank} has {kind}" for rank, kind in sorted(by_rank.items()))
            what = f"collective {sequence} of {lane[odd[0]].what} is not the same on all ranks"
            return "different collectives", odd, f"{what}: {said}"
    return None


def _kind(what: str, nbytes: int) -> str:
    """What must be the same on all ranks: of sums the bytes too; of others each rank may send as many as it likes."""
    return f"{what} of {nbytes:,} bytes" if what == "AllReduce" else what


def _behind(records: Mapping[int, FlightRecord]) -> _Found | None:
    """Ranks that wait nowhere, while others wait for a collective that they have not started, or in a call."""
    busy = [rank for rank, record in records.items() if not any(map(_is_waiting, record.lanes))]
    for lane in _lanes(records):
        furthest = max(state.issued for state in lane.values())
        met = any(state.meets for state in lane.values())
        waited = any(state.waits for state in lane.values())
        late = [r for r, s in lane.items() if r in busy and (met or (waited and s.issued < furthest))]
        if late:
            late.sort(key=lambda rank: (lane[rank].step, lane[rank].issued))
            others = sorted(rank for rank in lane if rank not in late)
            return "behind", late, _behind_sentence(records[late[0]], lane, late[0], others)
    return None


def _behind_sentence(record: FlightRecord, lane: Mapping[int, LaneState], rank: int, others: Sequence[int]) -> str:
    said = doing(record.lanes, record.threads, record.written_s)
    end = f"; its process has ended, and before that it {said}" if record.state == ENDED else f"; it {said}"
    call = next((state.meets for state in lane.values() if state.meets), "")
    if call:
        return f"rank {rank} has not come to {call}, where {ranks_named(others)} wait for it{end}"
    furthest = max(state.issued for state in lane.values())
    counts = (
        f"it has started {lane[rank].issued} collectives of {lane[rank].what}, and {ranks_named(others)} {furthest}"
    )
    return f"rank {rank} is behind: {counts}{end}"


def _alike(records: Mapping[int, FlightRecord]) -> str:
    ranks = ranks_named(sorted(records))
    if {record.state for record in records.values()} == {ENDED}:
        return f"no rank differs: {ranks} ended well"
    waits = {
        rank: record.written_s - lane.since_s
        for rank, record in records.items()
        if (lane := foremost(record.lanes)) and lane.waits
    }
    if len(waits) < len(records):
        return f"no rank differs: {ranks} have started the same collectives"
    longest = max(waits, key=lambda rank: waits[rank])
    lane = foremost(records[longest].lanes)
    assert lane is not None
    what = f"{lane.collective} {lane.sequence} of {lane.what}"
    return (
        f"no rank differs: all wait for {what}, rank {longest} for {seconds(waits[longest])}; where that goes on, the "
        "link is down or slow"
    )


def _not_finite(records: Mapping[int, FlightRecord]) -> Iterator[str]:
    """The first tensor that was not finite, by the earliest step."""
    found: list[NotFinite] = [record.not_finite for record in records.values() if record.not_finite is not None]
    if found:
        yield min(found, key=lambda one: one.step).said
