"""The rounds of a run as a worker sees them: it reads and writes their logs in the store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.messages import (
    NO_COPY,
    Came,
    Closed,
    Has,
    Head,
    LogLine,
    Void,
    line_of,
    parsed,
    written,
)
from gradwire.sync.elastic.protocol import Lost, Needs, RoundLog, following, holders, may_close, read
from gradwire.sync.elastic.store import reaching

_NOW = "now"
_KEPT = 3
"""Logs of so many rounds stay in the store: whoever reads the newest head may be that far behind."""

_ABSENT = "absent"
"""No log is this: comparing with it returns what there is, and leaves alone what is not."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Behind(CommunicationError):  # noqa: N818 - what is behind is the worker
    """The run has gone on without this worker, which was asleep or cut off: it comes to the newest round."""


class Rounds:
    """One worker's way through the rounds of a run.

    Args:
        store: a client of the run's keys.
        heartbeat: who is alive.
        lost: what becomes of windows with losses.
        needs: how many workers the run wants.
        deadline_s: how long to wait for workers that are alive but do not come.
        join_s: how long a newcomer waits for the end of the run's window.

    Attributes:
        head: of the round that this worker is at, or comes to next.
    """

    def __init__(
        self, store: Store, heartbeat: Heartbeat, lost: Lost, needs: Needs, deadline_s: float, join_s: float
    ) -> None:
        self._store, self._heartbeat, self._needs = store, heartbeat, needs
        self._lost: Lost = lost
        self._deadline_s, self._join_s = deadline_s, join_s
        with reaching():
            store.compare_set(_NOW, "", written(Head()))  # unless one is there
        self.head = self._newest()

    @property
    def name(self) -> str:
        """Of this round, for keys: no other round of the run has it."""
        return f"round/{self.head.round}"

    def _newest(self) -> Head:
        with reaching():
            return parsed(self._store.get(_NOW), Head)

    def now(self) -> RoundLog:
        """What the log says."""
        with reaching():  # not `get`, which waits for a log that was deleted
            log = self._store.compare_set(self.name, _ABSENT, _ABSENT)
        return read(self.head, b"" if log == _ABSENT.encode() else log, self._lost)

    def append(self, said: LogLine) -> None:
        """Append a line to the log."""
        with reaching():
            self._store.append(self.name, line_of(said))  # pyright: ignore[reportAttributeAccessIssue] - the stubs leave it out

    # Steps of a round ---------------------------------------------------------------------------------------------

    def come(self, came: Came) -> RoundLog:
        """Come to the newest round, and wait until its list is closed; return the round, with this worker in it.

        Raises:
            CommunicationError: too few workers have come, or nobody who has the run's model; the store is out of reach.
        """
        while True:
            began = time.monotonic()
            self.head = self._newest()
            self._heartbeat.beat()
            self.append(came)
            closed = self._until(_is_closed, lambda now, began=began: self._close(now, came, began))
            if came.worker in closed.members:
                return closed
            self.go_on(self.outcome())  # this worker came too late for it

    def _close(self, now: RoundLog, came: Came, began: float) -> None:
        """Close the list, if it may be; refuse to wait for ever."""
        waited, holds = time.monotonic() - began, came.copy == self.head.copy
        if holds and may_close(now.head, now.came, self._needs, self._heartbeat.alive, waited > self._deadline_s):
            self.append(Closed(came.worker))
            return
        is_late = waited > (self._deadline_s if holds else self._join_s)
        is_over = not holds and not self._holder_may_come(now)
        if (is_late or is_over) and self._newest().round == self.head.round:  # else it was asleep, and others went on
            raise CommunicationError(_over(came) if is_over else self._too_few(now, waited))

    def _holder_may_come(self, now: RoundLog) -> bool:
        """Whether somebody is there who has the newest copy, or may have it."""
        has_come = holders(self.head, now.came)
        # One that was too late for a round that came to nothing has it as well.
        others = [*has_come, *({*self.head.expected, *self.head.lost} - now.came.keys())]
        return any(map(self._heartbeat.alive, others))

    def _too_few(self, now: RoundLog, waited_s: float) -> str:
        names = [came.name for came in now.came.values()]
        founding = self.head.copy == NO_COPY
        wanted = f"begin_with={self._needs.begin_with}" if founding else f"least={self._needs.least}"
        if not holders(self.head, now.came):
            return f"no worker that has the run's model has come within {waited_s:.0f} s: look at their outputs"
        return (
            f"{wanted} asks for more workers than have come within {waited_s:.0f} s ({', '.join(sorted(names))}): "
            "start more, or ask for less"
        )

    def has(self, digest: str, owed: float) -> None:
        """Say that this trainer holds the mean."""
        self.append(Has(self._heartbeat.number, digest, min(sys.float_info.max, owed)))  # JSON has no infinity

    def give_up(self, why: str) -> None:
        """Make the round void, unless it is committed already."""
        self.append(Void(self._heartbeat.number, why[:500].encode(errors="replace").decode()))

    def outcome(self) -> RoundLog:
        """Wait until the round is committed or void."""
        return self._until(lambda now: now.state != "open", self.watch)

    def handed(self) -> int:
        """Wait until the source says how many bytes it hands over.

        Raises:
            CommunicationError: it was lost before.
        """
        found = self._until(lambda now: now.handed is not None, self._require_source)
        assert found.handed is not None
        return found.handed

    def _require_source(self, now: RoundLog) -> None:
        if now.state == "void" or now.decision is None or not self._heartbeat.alive(now.decision.source):
            raise CommunicationError("the worker that hands over the global copy was lost")

    def watch(self, now: RoundLog) -> None:
        """Make the round void where one of its trainers is lost. Whoever waits for its end may do so."""
        if now.decision is None or now.state != "open":
            return
        dead = [worker for worker in now.decision.trainers if not self._heartbeat.alive(worker)]
        if dead:
            self.give_up(f"{now.came[dead[0]].name} gave no sign of life")

    def go_on(self, ended: RoundLog) -> None:
        """Go on to the next round, after one that is committed or void."""
        before, self.head = self.head, following(ended)
        with reaching():
            # Only from this round to the next: a worker that was asleep must not turn it back.
            self._store.compare_set(_NOW, written(before), written(self.head))
            self._store.delete_key(f"round/{before.round - _KEPT}")

    def _until(self, done: Callable[[RoundLog], bool], meanwhile: Callable[[RoundLog], None]) -> RoundLog:
        """Read the log again and again. A wait inside the store would not see who is lost.

        Raises:
            Behind: others are two rounds further, or have deleted the log.
        """
        pause = _SHORTEST_PAUSE_S
        while not done(now := self.now()):
            self._heartbeat.require_sound()
            if pause == _LONGEST_PAUSE_S and self._newest().round > self.head.round + 1:
                raise Behind(f"the run is past round {self.head.round}, which this worker was at")
            meanwhile(now)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if self._newest().round > self.head.round + _KEPT:
            # The log may have been deleted, and begun anew by stragglers.
            with reaching():
                self._store.delete_key(self.name)
            raise Behind(f"the run is long past round {self.head.round}, which this worker was at")
        return now


def _is_closed(now: RoundLog) -> bool:
    return now.decision is not None


def _over(came: Came) -> str:
    """What a worker is told where nobody has the newest copy any more."""
    own = f"; this worker's own state_dict() is of window {came.windows}, since which the run has gone on without it"
    return (
        "nobody who has the model of this run is there any more: it has ended, or was lost with its last worker. "
        f"Begin another run (run=), with resume= where a state was saved{own if came.copy != NO_COPY else ''}"
    )
