"""A part's server and the workers that wait at it, without any I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from gradwire.asynchronous import snapshots
from gradwire.asynchronous.clocks import Phase
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.messages import Grant
from gradwire.asynchronous.several.cut import server_of
from gradwire.asynchronous.several.journal import Journal, JournalRow
from gradwire.asynchronous.several.messages import (
    AnyRequest,
    Finish,
    Finished,
    Gone,
    Granted,
    Hello,
    Here,
    Join,
    Leave,
    Look,
    Pause,
    Progress,
    PushRequest,
    ReadValues,
    Refused,
    Stop,
    Values,
    Watch,
    WorkerRequest,
)
from gradwire.core.errors import PushError, RecordError, StateError
from gradwire.peers.protocol import Reply, Served

HEAD_BYTES = 1 << 16
"""More than a record needs beside its tensor."""


class PartServer(Served):
    """Replies to workers for a part's server, keeps its journal, and writes its snapshots.

    Args:
        job: with a folder, this part's snapshots and journal lie in `part-P-of-S` of it, and the server goes on from
            the newest one. A single server also goes on from one in the folder itself, where version 0.2 wrote it.
        part: p, from 0.
        servers: S.
        was_restarted: whether there must be a snapshot.
        clock: seconds, for `patience_s`.

    Attributes:
        server: the core.
        journal: of what it applied.
        losses: workers that were lost before the end, in order, as often as they were.
        is_done: whether all requests are replied to by `Stop`. A single server stops by itself after its last push.

    Raises:
        StateError: a snapshot of another model or of other settings, or none where there must be one.
        OSError: as the file system says.
    """

    requests = AnyRequest

    def __init__(
        self,
        job: Job,
        part: int,
        servers: int,
        *,
        was_restarted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.server = job, server_of(job, part, servers)
        self.folder = None if job.folder is None else job.folder / f"part-{part}-of-{servers}"
        self.journal = Journal(None if self.folder is None else self.folder / "journal")
        self.most_bytes = job.sending.nbytes(self.server.values) + HEAD_BYTES
        self.losses: list[int] = []
        self._waiting: dict[int, tuple[int, Reply]] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._clock = clock
        self._expected_s = [clock()] * job.workers
        self._stops_itself = servers == 1
        self._restore(was_restarted)
        self.is_done = self._is_complete()

    def _restore(self, was_restarted: bool) -> None:
        if self.folder is not None and snapshots.restore(self.server, self.folder):
            return
        if self._restore_whole():
            self.server.begin_life()
        elif was_restarted:
            raise StateError(
                f"server was restarted and finds no snapshot in {self.folder}: give the job a folder that all machines "
                "share"
            )
        self._save()

    def _restore_whole(self) -> bool:
        """Load version 0.2's snapshot of a single server, which kept parameters by their own names, if there is one."""
        if not self._stops_itself or self.job.folder is None:
            return False
        whole = self.job.server()  # with copies of all parameters, so only where it may be needed
        if not snapshots.read(whole, self.job.folder):
            return False
        self.server.load_state_dict({**whole.state_dict(), "reducer": self.server.settings()})
        return True

    def _is_complete(self) -> bool:
        return self._stops_itself and self.server.version >= self.job.pushes

    @override
    def require_from(self, peer: int, request: AnyRequest) -> None:
        """Refuse what is asked in the name of another worker, and workers that say who is dead or that all is done."""
        is_worker = 0 <= peer < self.server.workers
        if is_worker if isinstance(request, Watch | Finish) else request.worker != peer:
            raise RecordError(f"a {type(request).__name__} that is not its own to ask")

    @override
    def ask(self, request: AnyRequest, reply: Reply) -> None:
        """Reply to a request, or keep it until there is a reply.

        Raises:
            OSError: a snapshot that cannot be written.
        """
        match request:
            case Watch():
                reply(self.watched(request.dead))
            case Finish():
                reply(self.finish())
            case ReadValues():
                reply(Values(self.server.values.clone()))
            case _ if self.is_done:
                reply(Stop())
            case _ if not self._is_newest(request):
                reply(Gone())
            case _:
                try:
                    self._ask(request, reply)
                except PushError as error:
                    reply(Refused(str(error)))

    def _is_newest(self, request: WorkerRequest) -> bool:
        """Whether this is no late message: of a process that is this worker no more, or older than its last one."""
        if request.worker >= self.server.workers:
            return True  # it is refused by name, and nothing is remembered of it
        process, serial = self._last.get(request.worker, (request.process, -1))
        if not isinstance(request, Hello) and (request.process != process or request.serial <= serial):
            return False
        self._last[request.worker] = (request.process, request.serial)
        return True

    def _ask(self, request: Hello | Join | PushRequest | Look | Leave | Pause, reply: Reply) -> None:
        match request:
            case Hello():
                clock = self._expect(request.worker)
                self._expected_s[request.worker] = self._clock()
                self._dismiss(request.worker)
                reply(Here(clock, self.server.life))
            case Join():
                self._join(request, reply)
            case PushRequest():
                self._receive(request, reply)
            case Leave():
                self.leave(request.worker)
                reply(Here(life=self.server.life))
            case Pause():
                self._hand(self.server.pause(request.worker))
                reply(Here(life=self.server.life))
            case Look():
                keeps, _ = self._waiting.get(request.worker, (0, reply))
                reply(Here(life=self.server.life, keeps=keeps))

    def _expect(self, worker: int) -> int:
        before = list(self.server.clocks.completed)
        clock = self.server.expect(worker)
        if clock < before[worker]:
            self._save()  # else a server that comes back would not wait for one that begins so far behind
        return clock

    def _join(self, request: Join, reply: Reply) -> None:
        phases = self.server.clocks.phases
        if request.worker < len(phases) and phases[request.worker] is Phase.DEAD:
            return reply(Gone())
        grants = self.server.join(request.worker, request.clock)
        self._wait(request, reply)
        return self._hand(grants)

    def _receive(self, request: PushRequest, reply: Reply) -> None:
        version, push = self.server.version, request.push
        receipt = self.server.receive(push)
        self.journal.add(
            JournalRow(
                time.time(), self.server.life, request.worker, push.grant.number, version, receipt.staleness, push.loss
            )
        )
        if self.server.version % self.job.snapshot_every == 0 or self.server.version == self.job.pushes:
            self._save()  # the last one is saved at once, so that a server that was done is so when it comes back
        self._wait(request, reply)
        if self._is_complete():
            self.stop()
        else:
            self._hand(receipt.grants)

    def _save(self) -> None:
        if self.folder is not None:
            snapshots.save(self.server, self.folder)

    def _wait(self, request: WorkerRequest, reply: Reply) -> None:
        self._dismiss(request.worker)
        self._waiting[request.worker] = (request.serial, reply)

    def _dismiss(self, worker: int) -> None:
        """Reply to an older request of a worker that asked again."""
        _, older = self._waiting.pop(worker, (0, None))
        if older is not None:
            older(Gone())

    def _hand(self, grants: Sequence[Grant]) -> None:
        values = self.server.values.clone() if grants else self.server.values
        for grant in grants:
            _, reply = self._waiting.pop(grant.worker)
            reply(Granted(*grant, values))

    @property
    def living(self) -> int:
        """How many workers are not dead."""
        return sum(phase is not Phase.DEAD for phase in self.server.clocks.phases)

    # Those who see to it -----------------------------------------------------------------------------------------

    def watched(self, dead: Sequence[int] = ()) -> Progress:
        """Hear which workers are dead now, and say how far the server is."""
        for worker in dead:
            self.lost(worker)
        self.tick()
        return Progress(self.server.version, self.server.life)

    @override
    def tick(self) -> None:
        """Take those for dead that did not come, or said hello and did not join."""
        now_s = self._clock()
        for worker, phase in enumerate(self.server.clocks.phases):
            if phase is Phase.EXPECTED and now_s - self._expected_s[worker] > self.job.patience_s:
                self.leave(worker)

    @override
    def lost(self, peer: int) -> None:
        """A worker is dead, or whoever watches has gone, which changes nothing."""
        away = (Phase.DEAD, Phase.PAUSED)  # one that is paused may have lost its connection alone
        if 0 <= peer < self.server.workers and self.server.clocks.phases[peer] not in away:
            if not self.is_done:
                self.losses.append(peer)
            self.leave(peer)

    def leave(self, worker: int) -> None:
        """A worker is dead or has left; whoever waited for it goes on.

        Raises:
            PushError: a worker that this server does not have.
        """
        grants = self.server.leave(worker)
        self._dismiss(worker)
        if not self.is_done:  # else nobody waits for a grant any more
            self._hand(grants)

    def stop(self) -> None:
        """Tell all workers that all is done."""
        self.is_done = True
        for worker in list(self._waiting):
            self._waiting.pop(worker)[1](Stop())

    def finish(self) -> Finished:
        """Tell all workers that all is done; return the part's parameters, its journal, and how far it is."""
        self.stop()
        return Finished(self.server.values.clone(), self.journal.rows(), self.server.version, self.server.life)
