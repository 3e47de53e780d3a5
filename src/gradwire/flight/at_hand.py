"""Which ranks a run has, by the records that they have left: those of workers that come and go change all the time."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gradwire.flight.record import DIED, RUNNING, FlightRecord


def expected_ranks(records: Mapping[int, FlightRecord]) -> Sequence[int]:
    """The ranks that should have a record: all, or of workers that come and go those that average with another one."""
    first = next(iter(records.values()))
    if not first.comes_and_goes:
        return range(first.world_size)
    at_hand = [record for record in records.values() if record.state == RUNNING and process_of(record) != ""]
    return sorted({rank for record in at_hand for lane in record.lanes if not lane.ended for rank in lane.ranks})


def at_hand(records: Mapping[int, FlightRecord], expected: Sequence[int]) -> tuple[dict[int, FlightRecord], list[int]]:
    """Records of workers that come and go, as far as the run still has them, and those that it has lost and not missed.

    What a worker waited for in a list of workers that is no more, nobody waits for. Where nobody tells of the list at
    hand, all count.
    """
    gone = [
        rank
        for rank, record in records.items()
        if expected and rank not in expected and (record.state == DIED or process_of(record) == "")
    ]
    here = {rank: record for rank, record in records.items() if rank not in gone}
    return {rank: replace(r, lanes=[lane for lane in r.lanes if not lane.ended]) for rank, r in here.items()}, gone


def process_of(record: FlightRecord) -> str | None:
    """The state of a record's process by its letter, "" where it is gone; None where this host cannot know."""
    if record.host != socket.gethostname() or not os.path.isdir("/proc/self"):
        return None
    try:
        letter = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if letter in "ZX" else letter
