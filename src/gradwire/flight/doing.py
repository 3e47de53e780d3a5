"""What a rank does, in one sentence: made where the rank is, or from the record that it left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gradwire.flight.record import LaneState, ThreadStack
from gradwire.flight.recorder import recorder
from gradwire.flight.threads import place_of, stacks, text_of


def foremost(lanes: Sequence[LaneState]) -> LaneState | None:
    """The lane that tells most of what a rank does: where it waits, then where a step is under way, then the latest."""
    open_ones = [lane for lane in lanes if not lane.ended] or list(lanes)
    return max(
        open_ones, key=lambda lane: (bool(lane.meets), lane.waits, lane.in_step, lane.step, lane.since_s), default=None
    )


def doing(lanes: Sequence[LaneState], threads: Sequence[ThreadStack], now_s: float) -> str:
    """What a rank does, and since when.

    Args:
        lanes: where each stands.
        threads: what each does.
        now_s: when that was, by the clock that the lanes were told by.

    >>> lane = LaneState("a", "gradwire.attach", [0, 1], 7, False, 3, 3, False, 3, "AllReduce", 400, "", 10.0, False)
    >>> doing([lane], [ThreadStack("MainThread", ["train.py:37 in load: next(rows)"])], 41.0)
    'is after step 7 of gradwire.attach for 31 s; its main thread is in load (train.py:37)'
    """
    lane = foremost(lanes)
    said = "has made no session" if lane is None else f"{lane.called} for {seconds(now_s - lane.since_s)}"
    place = place_of(threads)
    return f"{said}; its main thread is {place}" if place else said


def seconds(value: float) -> str:
    """A duration as it is told, in one unit.

    >>> seconds(0.42), seconds(31.4), seconds(-3.0)
    ('0.4 s', '31 s', '0.0 s')
    """
    return f"{max(value, 0.0):.1f} s" if value < 9.95 else f"{value:.0f} s"


def doing_in_trouble(within_s: float) -> tuple[str, str]:
    """What this rank did when communication failed, and the stack of its main thread then.

    Where several lanes fail one after the other, the first failure counts: its error may have left that place since.

    Args:
        within_s: how long ago an earlier failure may be, to be the same trouble.
    """
    found, now_s = recorder(), time.time()
    if found.trouble is None or now_s - found.trouble[0] > within_s:
        threads = stacks()
        said = doing([lane.state() for lane in found.lanes], threads, now_s)
        found.trouble = now_s, said, text_of(threads, only_main=True)
    return found.trouble[1:]
