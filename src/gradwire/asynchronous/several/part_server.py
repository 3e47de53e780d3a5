"""A part's server and the workers that wait at it, without any I/O: each question gets one answer, at once or later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous import snapshots
from gradwire.asynchronous.clocks import Phase
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.several.cut import server_of
from gradwire.asynchronous.several.journal import Journal, JournalRow
from gradwire.asynchronous.several.messages import Ask, Asked, Said, ServerAnswer
from gradwire.core.errors import PushError, StateError

Reply = Callable[[ServerAnswer], None]
"""Takes an answer to the worker that asked; called once."""


class Status(NamedTuple):
    """How far a server is.

    Attributes:
        version: updates made.
        life: how often it was restarted.
    """

    version: int
    life: int


class PartServer:
    """Answers workers for a part's server, keeps its journal, and writes its snapshots.

    Call its methods one after the other, and have replies sent in the order in which they are called.

    Args:
        job: with a folder, this part's snapshots and journal lie in `part-P-of-S` of it, and the server goes on from
            the newest one.
        part: p, from 0.
        servers: S.
        was_restarted: whether there must be a snapshot.
        clock: seconds, for `patience_s`.

    Attributes:
        server: the core.
        journal: of what it applied.
        is_done: whether all questions are answered by STOP.

    Raises:
        StateError: a snapshot of another model or of other settings, or none where there must be one.
        OSError: as the file system says.
    """

    def __init__(
        self,
        job: Job,
        part: int,
        servers: int,
        *,
        was_restarted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.server, self.is_done = job, server_of(job, part, servers), False
        self.folder = None if job.folder is None else part_folder(job.folder, part, servers)
        self.journal = Journal(None if self.folder is None else self.folder / "journal")
        self._waiting: dict[int, Reply] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._clock, self._began_s = clock, clock()
        self._restore(was_restarted)

    def _restore(self, was_restarted: bool) -> None:
        if self.folder is not None and snapshots.restore(self.server, self.folder):
            return
        if was_restarted:
            raise StateError(
                f"server was restarted and finds no snapshot in {self.folder}: give the job a folder that all machines "
                "share"
            )
        self._save()

    def ask(self, ask: Ask, reply: Reply) -> None:
        """Answer a question, or keep it until there is an answer.

        Raises:
            OSError: a snapshot that cannot be written.
        """
        if self.is_done:
            return reply(ServerAnswer(Said.STOP))
        if not self._is_newest(ask):
            return reply(ServerAnswer(Said.GONE))
        try:
            return self._ask(ask, reply)
        except PushError as error:
            return reply(ServerAnswer(Said.REFUSED, text=str(error)))

    def _is_newest(self, ask: Ask) -> bool:
        """Whether this is no late message: of a process that is this worker no more, or older than its last one."""
        process, serial = self._last.get(ask.worker, (ask.process, -1))
        if ask.kind is not Asked.HELLO and (ask.process != process or ask.serial <= serial):
            return False
        self._last[ask.worker] = (ask.process, ask.serial)
        return True

    def _ask(self, ask: Ask, reply: Reply) -> None:
        if ask.kind is Asked.LIFE:
            reply(ServerAnswer(Said.HERE, life=self.server.life))
        elif ask.kind is Asked.HELLO:
            clock = self.server.expect(ask.worker)
            self._dismiss(ask.worker)
            reply(ServerAnswer(Said.HERE, clock=clock, life=self.server.life))
        elif ask.kind is Asked.JOIN:
            self._join(ask, reply)
        elif ask.push is None:
            raise PushError(f"worker {ask.worker} sent a push without its payload: it is left out")
        else:
            self._receive(ask.worker, ask.push, reply)

    def _join(self, ask: Ask, reply: Reply) -> None:
        if self._is_dead(ask.worker):
            return reply(ServerAnswer(Said.GONE))
        grants = self.server.join(ask.worker, ask.clock)
        self._wait(ask.worker, reply)
        return self._hand(grants)

    def _receive(self, worker: int, push: Push, reply: Reply) -> None:
        if worker != push.grant.worker:
            raise PushError(f"worker {worker} sent a push of worker {push.grant.worker}: it is left out")
        version = self.server.version
        receipt = self.server.receive(push)
        self.journal.add(
            JournalRow(time.time(), self.server.life, worker, push.grant.number, version, receipt.staleness, push.loss)
        )
        if self.server.version % self.job.snapshot_every == 0 or self.server.version == self.job.pushes:
            self._save()  # the last one is saved at once, so that a server that was done is so when it comes back
        self._wait(worker, reply)
        self._hand(receipt.grants)

    def _save(self) -> None:
        if self.folder is not None:
            snapshots.save(self.server, self.folder)

    def _wait(self, worker: int, reply: Reply) -> None:
        self._dismiss(worker)
        self._waiting[worker] = reply

    def _dismiss(self, worker: int) -> None:
        """Answer an older question of a worker that asked again."""
        older = self._waiting.pop(worker, None)
        if older is not None:
            older(ServerAnswer(Said.GONE))

    def _hand(self, grants: Sequence[Grant]) -> None:
        values = self.server.values.clone() if grants else self.server.values
        for grant in grants:
            self._waiting.pop(grant.worker)(ServerAnswer(Said.GRANTED, grant, values))

    def _is_dead(self, worker: int) -> bool:
        return 0 <= worker < self.server.workers and self.server.clocks.phases[worker] is Phase.DEAD

    # Those who see to it -----------------------------------------------------------------------------------------

    def status(self, dead: Sequence[int] = ()) -> Status:
        """Hear which workers are dead now, take those for dead that never came, and say how far the server is."""
        late = self._clock() - self._began_s > self.job.patience_s
        for worker, phase in enumerate(self.server.clocks.phases):
            if phase is not Phase.DEAD and (worker in dead or (late and phase is Phase.EXPECTED)):
                self.leave(worker)
        return Status(self.server.version, self.server.life)

    def leave(self, worker: int) -> None:
        """A worker is dead; whoever waited for it goes on."""
        self._dismiss(worker)
        self._hand(self.server.leave(worker))

    def finish(self) -> tuple[Tensor, list[JournalRow], Status]:
        """Tell all workers that all is done; return the part's parameters, its journal, and how far it is."""
        self.is_done = True
        for worker in list(self._waiting):
            self._waiting.pop(worker)(ServerAnswer(Said.STOP))
        return self.server.values.clone(), self.journal.rows(), Status(self.server.version, self.server.life)


def part_folder(folder: Path, part: int, servers: int) -> Path:
    """Where a part's snapshots and journal lie."""
    return folder / f"part-{part}-of-{servers}"
