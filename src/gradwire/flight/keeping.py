"""When a rank's record is written: as the run begins, when it dies, and when `gradwire stacks DIR --ask` asks.

A file is written at the beginning already, so a rank that leaves no other one is known to have been killed. Ranks are
asked by a file in the folder, which a thread of each looks for twice a second, and not by a signal: that works on every
host that shares the folder, needs no right to signal a process, and takes no signal away from a script (SLURM and
Lightning use SIGUSR1 and SIGUSR2).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from gradwire.core.errors import CommunicationError, FlightError, first_line
from gradwire.core.json_file import read_json
from gradwire.flight.earlier import set_aside
from gradwire.flight.record import DIED, ENDED, MOST_BYTES, RUNNING, FlightRecord
from gradwire.flight.recorder import Recorder, recorder
from gradwire.flight.termination import Termination
from gradwire.flight.threads import stacks

ASK = "ask"
"""The file that asks."""

TERMINATED = "was ended by SIGTERM"
"""Why a record was written, where a rank was told to end."""

TICK_S = 0.5
"""Between two looks for it."""

_MOST_TEXT = 8000
"""Characters of a traceback that are kept."""


class Keeper:
    """Writes the record of this rank into a folder.

    Args:
        recorder: of this process.
        folder: where records go; it is made if it is not there.
        run: drawn once a run, the same on all ranks.
        rank, world_size: in the default process group.
        comes_and_goes: see `FlightRecord`.

    Attributes:
        folder: where records go.
        problem: why the last record could not be written, "" if it could. A run goes on without records.
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: Path,
        run: str,
        rank: int,
        world_size: int,
        comes_and_goes: bool = False,
    ) -> None:
        self.folder, self.run, self.problem = folder, run, ""
        self._comes_and_goes = comes_and_goes
        self._recorder, self._rank, self._world_size = recorder, rank, world_size
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._state, self._answered = RUNNING, self._question()
        self._lock = threading.RLock()
        self._termination = Termination(lambda: self.died(TERMINATED))
        self._excepthook = sys.excepthook

    def start(self) -> None:
        """Write now, and from now on when the run dies, ends or is asked."""
        self._begin()
        sys.excepthook = self._unhandled
        atexit.register(self.ended)
        self._termination.watch()
        threading.Thread(target=self._watch, name="gradwire-records", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that it writes for: a forked one is no rank."""
        return self._pid == os.getpid()

    # What is written -----------------------------------------------------------------------------------------

    def seen(self, why: str, state: str = RUNNING, error: BaseException | None = None) -> FlightRecord:
        """Return the record as it is at this moment, for `write`."""
        return FlightRecord(
            run=self.run,
            rank=self._rank,
            world_size=self._world_size,
            host=self._host,
            pid=self._pid,
            state=state,
            why=why[:_MOST_TEXT],
            own=error is not None and not isinstance(error, CommunicationError),
            written_s=time.time(),
            lanes=[lane.state() for lane in self._recorder.lanes],
            threads=stacks(),
            events=self._recorder.events(),
            error="" if error is None else "".join(traceback.format_exception(error))[-_MOST_TEXT:],
            answers=self._answered,
            not_finite=self._recorder.not_finite,
            comes_and_goes=self._comes_and_goes,
        )

    def write(self, record: FlightRecord, is_last: bool = True) -> None:
        """Write a record, unless one that tells of a death is there: what follows from that is no news.

        Once the process has ended, no answer says any more that it goes on.

        Args:
            record: as `seen` returns it.
            is_last: whether a record that tells of a death is the last one.
        """
        if not self.is_here:
            return  # a forked process, such as one that loads data, is no rank
        with self._lock:
            if self._state == DIED or (self._state == ENDED and record.state == RUNNING):
                return
            if is_last:
                self._state = record.state
            try:
                record.write(self.folder)
                self.problem = ""
            except OSError as error:  # a full disk must not end the run
                self.problem = f"{self.folder}: {error.strerror or error}"

    def died(self, why: str, error: BaseException | None = None, seen: FlightRecord | None = None) -> None:
        """Write that the run dies, and of what. Where other ranks are to blame, all of them are asked what they do.

        Args:
            why: in a line.
            error: an exception, if it was one.
            seen: the record as it was when the trouble was noticed, if that is some time ago.
        """
        record = self.seen(why, DIED, error)
        if seen is not None:
            record = replace(record, lanes=seen.lanes, threads=seen.threads, written_s=seen.written_s)
        self.write(record)
        if isinstance(error, CommunicationError) and self.is_here:
            with contextlib.suppress(OSError):
                ask(self.folder, f"{self.run}/{self._rank}")

    def note_trouble(self) -> FlightRecord:
        """Write that communication has failed, before it is known of what; return the record, for `died`."""
        record = self.seen("communication has failed", DIED)
        self.write(record, is_last=False)
        return record

    def ended(self) -> None:
        """Write that this rank has ended well."""
        if self._state != DIED:
            self.write(self.seen("the process has ended", ENDED))

    def belongs(self, folder: Path, run: str, rank: int, world_size: int, comes_and_goes: bool = False) -> None:
        """Write into this folder from now on, as this rank. After a death, what becomes of another session is news."""
        self._comes_and_goes = comes_and_goes
        same = (folder, run, rank, world_size) == (self.folder, self.run, self._rank, self._world_size)
        if same and self._state != DIED:
            return
        self.folder, self.run, self._rank, self._world_size, self._state = folder, run, rank, world_size, RUNNING
        self._begin()

    def goes_on(self) -> None:
        """What was taken for a death was none: this rank was told to end, and has ended its work first."""
        if self._state == DIED:
            self._state = RUNNING
            self.write(self.seen("this worker has left its run"))

    def _begin(self) -> None:
        """Write the first record of a run. What an earlier run has left of this rank is kept."""
        try:
            set_aside(self.folder, self.run, self._rank, self._world_size)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror or error}"
            return
        self.write(self.seen("the run has begun"))

    def _unhandled(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            self.died(f"{kind.__name__}: {first_line(error)}", error)
        self._excepthook(kind, error, trace)

    # Who asks ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Answer who asks, and end the process where SIGTERM has come and its main thread cannot."""
        while True:
            ready, _, _ = select.select(self._termination.descriptors, [], [], TICK_S)
            if ready:
                self._termination.read()
            elif (token := self._question()) != self._answered:
                self._answered = token
                self.write(self.seen("asked by gradwire stacks"))

    def _question(self) -> str:
        """The token of the question that is asked in the folder; "" without one."""
        path = self.folder / ASK
        try:
            return str(read_json(path, FlightError, MOST_BYTES)["token"])[:64] if path.exists() else ""
        except (FlightError, OSError, KeyError, TypeError):  # not a question of ours
            return ""


def ask(folder: Path, token: str) -> None:
    """Ask every rank whose records are in a folder what it does."""
    (folder / f"{ASK}.new").write_text(json.dumps({"token": token}))
    (folder / f"{ASK}.new").replace(folder / ASK)


_keeper: Keeper | None = None


def keeper() -> Keeper | None:
    """What writes the record of this process, if it is told a folder."""
    return _keeper if _keeper is not None and _keeper.is_here else None


def keep(folder: Path, run: str, rank: int, world_size: int, comes_and_goes: bool = False) -> Keeper:
    """Have the record of this process written into a folder, see `Keeper`."""
    global _keeper
    found = keeper()
    if found is None:
        found = _keeper = Keeper(recorder(), folder, run, rank, world_size, comes_and_goes)
        found.start()
    else:
        found.belongs(folder, run, rank, world_size, comes_and_goes)
    return found
