"""The flight recorder: the last thousand events of this rank, in memory, whatever happens to the run.

There is one a process. Each lane (the order of a process group's collectives) writes into it by a `LaneLog`: steps,
collectives that are issued and whose results are taken, calls at which ranks meet. An event costs about two
microseconds (`benchmarks/hangs.py --cost`), so it is always on. It becomes a file only where a folder is told.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.flight.record import Event, LaneState, NotFinite

EVENTS = 1000
"""How many events are kept."""

_LANES = 16
"""How many lanes are kept that have ended."""


class _Entry(NamedTuple):
    """An event as the ring keeps it: a reference to its lane, no text is made yet."""

    number: int
    time_s: float
    lane: LaneLog
    event: str
    what: str
    sequence: int
    nbytes: int
    step: int


class LaneLog:
    """What one lane tells the recorder, and where it stands now.

    A lane is used by two threads: that of the training loop, which begins steps, and the one where programs run. Each
    attribute is written by one of them, so nothing is locked.

    Args:
        recorder: of this process.
        name: of the lane, the same on all of its ranks.
        what: the call that made it, such as "gradwire.attach".
        ranks: its members, by their numbers in the default process group.

    Attributes:
        step: of the last step that began; -1 before the first one.
        issued: how many collectives were started, so also the number of the last one, counted from 1.
        taken: the number of the last one whose result was taken.
    """

    def __init__(self, recorder: Recorder, name: str, what: str, ranks: Sequence[int]) -> None:
        self._recorder = recorder
        self.name, self.what, self.ranks = name, what, list(ranks)
        self.step, self.issued, self.taken = -1, 0, 0
        self.ended = False
        self._in_step = False
        self._last, self._nbytes, self._since_s = "", 0, time.time()
        self._waits: tuple[int, str, int, float] | None = None
        self._meets = ""

    def step_began(self, step: int) -> None:
        """Note that a step begins."""
        self.step, self._in_step = step, True
        self._since_s = self._note("step began", "", self.issued, 0)

    def step_ended(self) -> None:
        """Note that all of the step's means are here."""
        self._in_step = False
        self._since_s = self._note("step ended", "", self.issued, 0)

    def issue(self, what: str, nbytes: int) -> int:
        """Note that a collective is started, and return its number in this lane, from 1."""
        self.issued = number = self.issued + 1
        self._last, self._nbytes = what, nbytes
        self._since_s = self._note("issued", what, number, nbytes)
        return number

    def wait(self, number: int, what: str, nbytes: int) -> None:
        """Note that the rank does nothing else until it has the result of a collective."""
        self._waits = number, what, nbytes, self._note("waits", what, number, nbytes)

    def take(self, number: int, what: str, nbytes: int) -> None:
        """Note that the result of a collective is here. On a GPU: that what follows is ordered behind it."""
        self.taken = number
        self._since_s = self._note("taken", what, number, nbytes)
        self._waits = None

    def lose(self, number: int, what: str, nbytes: int) -> None:
        """Note that a collective failed. What the rank waited for remains: it is what the record is read for."""
        self._note("failed", what, number, nbytes)

    def meet(self, call: str) -> None:
        """Note that the rank has come to a call at which all ranks of the lane meet, such as "gradwire.save"."""
        self._meets = call
        self._since_s = self._note("meets", call, self.issued, 0)

    def met(self) -> None:
        """Note that all have come."""
        self._since_s = self._note("met", self._meets, self.issued, 0)
        self._meets = ""

    def end(self) -> None:
        """Note that the lane has ended."""
        self._note("ended", self.what, self.issued, 0)
        self.ended, self._in_step = True, False
        self._recorder.forget_ended()

    def _note(self, event: str, what: str, sequence: int, nbytes: int) -> float:
        return self._recorder.note(self, event, what, sequence, nbytes)

    @property
    def waits(self) -> bool:
        """Whether the rank waits for a collective of this lane now."""
        return self._waits is not None

    def state(self) -> LaneState:
        """Where the lane stands now."""
        waits, since_s = self._waits, self._since_s
        number, what, nbytes = (self.issued, self._last, self._nbytes) if waits is None else waits[:3]
        return LaneState(
            name=self.name,
            what=self.what,
            ranks=list(self.ranks),
            step=self.step,
            in_step=self._in_step,
            issued=self.issued,
            taken=self.taken,
            waits=waits is not None,
            sequence=number,
            collective=what,
            nbytes=nbytes,
            meets=self._meets,
            since_s=since_s if waits is None else waits[3],
            ended=self.ended,
        )


class Recorder:
    """Keeps the last events of this process in a ring of fixed size.

    Args:
        size: how many events are kept.

    Attributes:
        lanes: those that are there, and the last ones that have ended.
        not_finite: the first tensor of the run that was not finite, once it is known.
        trouble: when communication failed, what this rank did then, and the stack of its main thread.

    >>> recorder = Recorder(3)
    >>> log = recorder.lane("a", "gradwire.Session", [0, 1])
    >>> log.step_began(0)
    >>> number = log.issue("AllReduce", 400)
    >>> log.wait(number, "AllReduce", 400)
    >>> log.take(number, "AllReduce", 400)
    >>> [(event.event, event.what, event.sequence, event.step) for event in recorder.events()]
    [('issued', 'AllReduce', 1, 0), ('waits', 'AllReduce', 1, 0), ('taken', 'AllReduce', 1, 0)]
    """

    def __init__(self, size: int = EVENTS) -> None:
        self.pid = os.getpid()
        self.lanes: list[LaneLog] = []
        self.not_finite: NotFinite | None = None
        self.trouble: tuple[float, str, str] | None = None
        self._ring: list[_Entry | None] = [None] * size
        self._size = size
        self._numbers = itertools.count()

    def lane(self, name: str, what: str, ranks: Sequence[int]) -> LaneLog:
        """Return the log of a new lane."""
        log = LaneLog(self, name, what, ranks)
        self.lanes.append(log)
        return log

    def forget_ended(self) -> None:
        """Forget lanes that ended long ago: a process may make any number of them."""
        ended = [lane for lane in self.lanes if lane.ended]
        for lane in ended[:-_LANES]:
            self.lanes.remove(lane)

    def note(self, lane: LaneLog, event: str, what: str, sequence: int, nbytes: int) -> float:
        """Keep an event in the place of the oldest one, and return its time. Any thread may call it."""
        number, now_s = next(self._numbers), time.time()
        self._ring[number % self._size] = _Entry(number, now_s, lane, event, what, sequence, nbytes, lane.step)
        return now_s

    def events(self) -> list[Event]:
        """Return the events that are kept, in their order."""
        kept = sorted((entry for entry in list(self._ring) if entry is not None), key=lambda entry: entry.number)
        return [
            Event(e.number, e.time_s, e.lane.name, e.event, e.what, e.sequence, e.nbytes, e.step)  # as they are told
            for e in kept
        ]


_recorder: Recorder | None = None


def recorder() -> Recorder:
    """Return the recorder of this process; one that was forked has one of its own."""
    global _recorder
    if _recorder is None or _recorder.pid != os.getpid():
        _recorder = Recorder()
    return _recorder
