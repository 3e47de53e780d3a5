"""A trace of all ranks for Perfetto and `chrome://tracing`, on one clock.

A rank is a process there. One track has its training loop, one its coding and its waits, and as many as are needed its
collectives: those that are under way at once overlap without one lying within the other, which no single track can show
(Chrome's Trace Event Format: complete events of a thread must nest). An arrow leads from the rank that came last to a
collective to the ranks that waited for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradwire.core.atomic_file import write_atomically
from gradwire.drivers.traced import Span
from gradwire.profiling.account import WaitedWire, wires_of
from gradwire.profiling.records import RankRecord, StepRecord

LOOP, CODING, WIRE = 1, 2, 3
"""Tracks of a rank; collectives have those from `WIRE` on."""

Event = dict[str, Any]


def write_chrome_trace(path: Path | str, records: Sequence[RankRecord]) -> None:
    """Write a trace of all ranks, see `chrome_trace`."""
    write_atomically(Path(path), chrome_trace(records))


def chrome_trace(records: Sequence[RankRecord]) -> str:
    """Return the trace of all ranks, as JSON in Chrome's Trace Event Format; times are microseconds."""
    moved = {record.rank: list(record.steps_on_common_clock().values()) for record in records}
    origin_s = min((step.began_s for steps in moved.values() for step in steps), default=0.0)
    events = [event for record in records for event in _names(record, _tracks(moved[record.rank]))]
    for rank, steps in moved.items():
        for step in steps:
            events += _events(rank, step, origin_s)
    events += _arrows(moved, origin_s)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _tracks(steps: Iterable[StepRecord]) -> int:
    """How many tracks the collectives of a rank need."""
    return max((1 + place for step in steps for _, place in _placed(step)), default=0)


def _names(record: RankRecord, tracks: int) -> Iterator[Event]:
    yield _meta("process_name", record.rank, 0, name=f"rank {record.rank} on {record.host}")
    yield _meta("process_sort_index", record.rank, 0, sort_index=record.rank)
    named = {LOOP: "training loop", CODING: "coding and waiting"}
    named |= {WIRE + place: f"collectives {place + 1}" for place in range(tracks)}
    for track, name in named.items():
        yield _meta("thread_name", record.rank, track, name=name)
        yield _meta("thread_sort_index", record.rank, track, sort_index=track)


def _meta(what: str, rank: int, track: int, **arguments: Any) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": arguments}


def _events(rank: int, step: StepRecord, origin_s: float) -> Iterator[Event]:
    whole = Span("train", f"step {step.index}", step.began_s, step.ended_s)
    for span in (whole, *step.loop, *step.waits):
        yield _complete(rank, LOOP, span, origin_s)
    for spans in step.communication:
        for span in spans:
            if span.kind != "wire":
                yield _complete(rank, CODING, span, origin_s)
    for span, place in _placed(step):
        yield _complete(rank, WIRE + place, span, origin_s)


def _complete(rank: int, track: int, span: Span, origin_s: float) -> Event:
    name = span.what if span.kind in ("train", "wire") else f"{span.kind} {span.what}"
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": _microseconds(span.began_s, origin_s),
        "dur": max(0.0, _microseconds(span.ended_s, span.began_s)),
        "args": {"bytes": span.nbytes} if span.nbytes else {},
    }


def _microseconds(at_s: float, origin_s: float) -> float:
    return round(1e6 * (at_s - origin_s), 3)


def _placed(step: StepRecord) -> Iterator[tuple[Span, int]]:
    """Each collective with the first track that is free when it begins."""
    free_s = list[float]()
    wires = [span for spans in step.communication for span in spans if span.kind == "wire"]
    for span in sorted(wires, key=lambda span: span.began_s):
        place = next((place for place, until_s in enumerate(free_s) if until_s <= span.began_s), len(free_s))
        free_s[place : place + 1] = [span.ended_s]
        yield span, place


def _arrows(moved: dict[int, list[StepRecord]], origin_s: float) -> Iterator[Event]:
    """From the start of a collective on the rank that came last to the waits of the others."""
    number = 0
    for index in sorted({step.index for steps in moved.values() for step in steps}):
        steps = {rank: step for rank, steps in moved.items() for step in steps if step.index == index}
        tracks = {rank: dict(_placed(step)) for rank, step in steps.items()}
        for wires in _collectives(steps):
            last = max(wires, key=lambda rank: wires[rank].wire.began_s)
            come_s = wires[last].wire.began_s
            for rank in _waiting(wires, last):
                number += 1
                yield _arrow("s", number, last, WIRE + tracks[last][wires[last].wire], come_s, origin_s)
                yield _arrow("f", number, rank, CODING, come_s, origin_s)


def _collectives(steps: dict[int, StepRecord]) -> Iterator[dict[int, WaitedWire]]:
    """Of each collective of a step, what each rank has of it."""
    for session in range(max((len(step.communication) for step in steps.values()), default=0)):
        of_ranks = [wires_of(step.communication[session]) for step in steps.values()]
        for wires in zip(*of_ranks, strict=False):
            yield dict(zip(steps, wires, strict=True))


def _waiting(wires: dict[int, WaitedWire], last: int) -> Iterator[int]:
    """The ranks that already waited for a collective when the last one of them came."""
    come_s = wires[last].wire.began_s
    for rank, of in wires.items():
        takes_part = not of.wire.peers or last in of.wire.peers
        if rank != last and takes_part and of.wait.began_s < come_s < of.wait.ended_s:
            yield rank


def _arrow(phase: str, number: int, rank: int, track: int, at_s: float, origin_s: float) -> Event:
    event: Event = {
        "name": "waited for",
        "cat": "wait",
        "ph": phase,
        "id": number,
        "pid": rank,
        "tid": track,
        "ts": _microseconds(at_s, origin_s),
    }
    return event | ({"bp": "e"} if phase == "f" else {})
