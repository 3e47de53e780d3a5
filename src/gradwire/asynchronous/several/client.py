"""A worker of several servers at its connections: sends what it asks, waits for whichever replies, and asks again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.messages import PushRequest, WorkerRequest
from gradwire.asynchronous.several.worker import PartedWorker
from gradwire.core.errors import CommunicationError, first_line
from gradwire.peers.protocol import Arrived, Connections

LOOK_S = 0.5
"""Seconds without a reply until servers are looked at."""
_AGAIN_S = 0.1


class WorkerClient:
    """Works until a server says that all is done.

    Args:
        worker: what is to be said.
        connections: to the servers.
        patience_s: seconds until it gives up a server that is not there.
    """

    def __init__(self, worker: PartedWorker, connections: Connections, patience_s: float) -> None:
        self.worker, self.connections, self.patience_s = worker, connections, patience_s
        self._missing_s: dict[int, float] = {}

    def run(self) -> None:
        """Work.

        Raises:
            CommunicationError: a server that is not there, or is of another version or another run.
            PushError, StateError, StepError: as `PartedWorker.receive`.
        """
        self.send(self.worker.begin())
        while not self.worker.is_done:
            self.turn()

    def turn(self) -> None:
        """Take up the next reply, or look at the servers where none comes for a while."""
        arrived = self.connections.wait(LOOK_S)
        if arrived is None:
            self.send(self.worker.poll())
        elif arrived.error is not None:
            self._miss(arrived, arrived.error)
        else:
            self._missing_s.pop(arrived.server, None)
            self.arrived(arrived)

    def arrived(self, arrived: Arrived) -> None:
        """Take up a reply."""
        self.send(self.worker.receive(arrived.request, arrived.reply))

    def send(self, requests: Sequence[WorkerRequest]) -> None:
        """Send each request to its server."""
        for request in requests:
            self.connections.ask(request.server, request)

    def _miss(self, arrived: Arrived, error: Exception) -> None:
        now_s = self.connections.now_s()
        since_s = now_s - self._missing_s.setdefault(arrived.server, now_s)
        if since_s > self.patience(error):
            raise self.lost(arrived.server, since_s, error) from error
        if not isinstance(arrived.request, PushRequest):
            self.connections.sleep(_AGAIN_S)
        self.send(self.worker.miss(arrived.request))

    def patience(self, error: Exception) -> float:
        """Seconds until a server that cannot be reached for this reason is given up."""
        return self.patience_s

    def lost(self, server: int, since_s: float, error: Exception) -> CommunicationError:
        """What to raise where a server was not there for so long."""
        return CommunicationError(
            f"worker {self.worker.number} finds no server {server} after {since_s:.0f} s: start it again "
            f"({first_line(error)})",
            (server,),
        )


def run_worker(job: Job, number: int, connections: Connections) -> None:
    """Be a worker of a job until a server says that all is done; the connections are closed then.

    Args:
        job: what to do.
        number: of the worker.
        connections: to all servers.

    Raises:
        CommunicationError, PushError, StateError, StepError: as `WorkerClient.run`.
    """
    with closing(connections):
        servers, work = connections.servers, job.work(number)
        worker = PartedWorker(number, work, job.parameters, servers=servers, sending=job.sending, seed=job.seed)
        WorkerClient(worker, connections, job.patience_s).run()
