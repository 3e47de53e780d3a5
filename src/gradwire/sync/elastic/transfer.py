"""What passes between two workers: the global copy to a newcomer, and what is owed by a worker that leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.drivers.process_group import GroupTransport
from gradwire.sync.elastic.attempt import Attempt
from gradwire.sync.elastic.handover import receive, send
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.link import GroupLine, WorkerLink
from gradwire.sync.elastic.messages import Hands
from gradwire.sync.elastic.rounds import Rounds

T = TypeVar("T")


class Transfer:
    """One worker's side of it. The other one may be lost meanwhile.

    Args:
        store: a client of the run's keys.
        heartbeat: who is alive.
        rounds: those of the run.
        deadline_s: the patience of process groups.

    Attributes:
        sent_bytes: what this worker has given.
    """

    def __init__(self, store: Store, heartbeat: Heartbeat, rounds: Rounds, deadline_s: float) -> None:
        self._store, self._heartbeat, self._rounds, self._deadline_s = store, heartbeat, rounds, deadline_s
        self.sent_bytes = 0

    # The global copy ----------------------------------------------------------------------------------------------

    def give_copy(self, payload: Tensor, others: Sequence[int]) -> int:
        """Give others the global copy, all at once; return how many have it."""
        self._rounds.append(Hands(self._heartbeat.number, payload.numel()))
        me = self._heartbeat.number
        attempts = {
            other: self._over_line(other, (me, other), lambda transport: send(payload, transport, 1))
            for other in others
        }
        handed = 0
        for other, attempt in attempts.items():
            with contextlib.suppress(CommunicationError):
                attempt.result(lambda other=other: self._heartbeat.alive(other))
                handed += 1
        self.sent_bytes += handed * payload.numel()
        return handed

    def copy_from(self, source: int) -> Tensor:
        """The global copy as a payload.

        Raises:
            CommunicationError: the source was lost.
        """
        nbytes, empty, me = self._rounds.handed(), torch.empty(0, dtype=torch.uint8), self._heartbeat.number
        taking = self._over_line(me, (source, me), lambda transport: receive(empty, nbytes, transport, 0))
        return taking.result(lambda: self._heartbeat.alive(source))

    def _over_line(self, newcomer: int, pair: tuple[int, int], act: Callable[[GroupTransport], T]) -> Attempt[T]:
        """Connect a pair of which one is a newcomer, and do something over the line, which is closed after it."""
        name, line = f"{self._rounds.name}/to/{newcomer}", GroupLine()

        def job() -> T:
            transport = line.connected(self._store, name, pair, self._heartbeat.number, self._deadline_s)
            try:
                return act(transport)
            finally:
                line.close()

        return Attempt(job, line.close)

    # What is owed -------------------------------------------------------------------------------------------------

    def give_owed(self, link: WorkerLink, mine: Sequence[Tensor], heir: int) -> None:
        """Give what this worker owes to another one of a link."""
        payload = torch.cat(list(mine))
        if self._done(lambda: send(payload, link.transport, link.workers.index(heir)), heir, link):
            self.sent_bytes += payload.nbytes

    def owed_from(self, link: WorkerLink, mine: Sequence[Tensor], leaver: int) -> Sequence[Tensor]:
        """What a worker that leaves owes, in tensors like `mine`; nothing where it was lost meanwhile."""
        sizes = [tensor.numel() for tensor in mine]
        given: list[Tensor] = []

        def job() -> None:
            given.append(receive(mine[0], sum(sizes), link.transport, link.workers.index(leaver)))

        return given[0].split(sizes) if self._done(job, leaver, link) else ()

    def _done(self, job: Callable[[], None], other: int, link: WorkerLink) -> bool:
        try:
            Attempt(job, link.close).result(lambda: self._heartbeat.alive(other))
        except CommunicationError:
            return False
        return True
