"""A job as processes of one machine, which talk over Unix sockets and shared memory."""

from __future__ import annotations

import secrets
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.client import run_worker
from gradwire.asynchronous.several.cut import server_of
from gradwire.asynchronous.several.messages import ServerReply
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.part_server import HEAD_BYTES, PartServer
from gradwire.asynchronous.several.running import MOST_RESTARTS, OutcomeT, RunningJob
from gradwire.asynchronous.several.watching import ServerWatch
from gradwire.asynchronous.simulation import Applied
from gradwire.core.errors import CommunicationError
from gradwire.peers.greeting import SECRET_BYTES
from gradwire.peers.protocol import ANY_LENGTH
from gradwire.peers.sockets import SharedRows, SocketConnections, SocketServer
from gradwire.peers.supervisor import ChildProcess, Supervisor

_WATCHER = -1
"""The number of the process that watches, among the servers' peers."""


class JobOutcome(NamedTuple):
    """What came of a run.

    Attributes:
        parameters: at the end, by name.
        history: pushes in the order in which they were applied; times count from when the run was made.
        lost: workers that died.
        restarts: of the server.
    """

    parameters: dict[str, Tensor]
    history: list[Applied]
    lost: tuple[int, ...]
    restarts: int


class _Running(RunningJob[OutcomeT]):
    """Processes of a job. Leaving the `with` block ends them all."""

    def __init__(self, job: Job, *, servers: int = 1, worker_restarts: int = 0) -> None:
        super().__init__(job)
        self._began_s, self._secret = time.time(), secrets.token_bytes(SECRET_BYTES)
        self._rows = [_rows_of(job, part, servers) for part in range(servers)]
        with ExitStack() as ends:
            home = ends.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-"))  # nobody else may look into it
            self._paths = [str(Path(home) / f"server-{part}") for part in range(servers)]
            connections = SocketConnections(
                ServerReply, self._paths, self._secret, _WATCHER, most_bytes=ANY_LENGTH, silent_s=job.silent_s
            )
            ends.callback(connections.close)
            self.watch = ServerWatch(job, connections, self._missed)
            self.servers = ends.enter_context(Supervisor(self._serve, servers))
            self.workers = ends.enter_context(Supervisor(self._work, job.workers, restarts=worker_restarts))
            self._ends = ends.pop_all()

    def _serve(self, part: int) -> ChildProcess:
        Path(self._paths[part]).unlink(missing_ok=True)
        was_restarted = hasattr(self, "servers")
        where = (self._paths[part], self._secret, self._rows[part])
        return ChildProcess(_serve, self.job, part, len(self._paths), was_restarted, *where)

    def _work(self, number: int) -> ChildProcess:
        return ChildProcess(_work, self.job, number, self._paths, self._secret, self._rows)

    @override
    def look(self) -> None:
        self._look_at_servers()
        super().look()

    def _look_at_servers(self) -> None:
        for part in self.servers.look():
            self._start_again(part, self.servers.how[part])

    def _missed(self, part: int, error: Exception) -> None:
        """A server cannot be reached: it is started again, where it has ended or is silent."""
        before = self.servers.restarted[part]
        self._look_at_servers()
        if before < self.servers.restarted[part]:
            return
        if isinstance(error, TimeoutError) and self.watch.progress[part] is not None:
            self._start_again(part, f"was silent for {self.job.silent_s:g} s")

    def _start_again(self, part: int, how: str) -> None:
        who = "the server" if len(self._paths) == 1 else f"server {part}"
        said = f"{who} {how or 'ended by itself'} at push {self.version} of {self.job.pushes}"
        if self.job.folder is None:
            raise CommunicationError(
                f"{said}: give the job a folder for snapshots, and it is started again from the newest"
            )
        if self.servers.restarted[part] >= MOST_RESTARTS:
            raise CommunicationError(f"{said}, after {MOST_RESTARTS} restarts: look at its messages above")
        self.servers.start_anew(part)

    @override
    def close(self) -> None:
        self._ends.close()


class RunningServers(_Running[ServersOutcome]):
    """Processes of a job with several servers. Leaving the `with` block ends them all.

        with RunningServers(job, servers=2) as running:
            outcome = running.wait(deadline_s=600)

    Args:
        job: what to do.
        servers: S; each keeps as many parameters as the others, up to one. A server that dies, or is silent for
            `job.silent_s`, is started again from its newest snapshot, where the job has a folder.
        worker_restarts: how often a worker that died is started anew, for each worker.

    Attributes:
        servers: the supervisor of the servers' processes.
        workers: and that of the workers'.

    Raises:
        CompositionError: more servers than parameters.
    """

    @override
    def outcome_of(self, outcome: ServersOutcome) -> ServersOutcome:
        return outcome


class RunningProcesses(_Running[JobOutcome]):
    """Processes of a job with one server; the rest is as for `RunningServers`.

    with RunningProcesses(job) as running:
        outcome = running.wait(deadline_s=600)
    """

    def __init__(self, job: Job, *, worker_restarts: int = 0) -> None:
        super().__init__(job, worker_restarts=worker_restarts)

    @property
    def server(self) -> ChildProcess:
        """The process of the one server, which is another one after a restart."""
        return self.servers.children[0]

    @override
    def outcome_of(self, outcome: ServersOutcome) -> JobOutcome:
        history = [
            Applied(row.at_s - self._began_s, row.worker, row.number, row.version, row.staleness, row.loss)
            for row in outcome.histories[0]
        ]
        return JobOutcome(outcome.parameters, history, outcome.lost, outcome.restarts[0])


def _rows_of(job: Job, part: int, servers: int) -> SharedRows:
    values = server_of(job, part, servers).values
    return SharedRows.of(job.workers, job.sending.nbytes(values) + HEAD_BYTES, values.nbytes + HEAD_BYTES)


def _serve(job: Job, part: int, servers: int, was_restarted: bool, path: str, secret: bytes, rows: SharedRows) -> None:
    """The process of a server."""
    torch.set_num_threads(1)
    served = PartServer(job, part, servers, was_restarted=was_restarted)
    SocketServer(served, path, secret, silent_s=job.silent_s, rows=rows).run()


def _work(job: Job, number: int, paths: list[str], secret: bytes, rows: list[SharedRows]) -> None:
    """The process of a worker."""
    torch.set_num_threads(1)
    connections = SocketConnections(
        ServerReply, paths, secret, number, most_bytes=ANY_LENGTH, silent_s=job.silent_s, rows=rows
    )
    run_worker(job, number, connections)


def run(job: Job, deadline_s: float = 600.0) -> JobOutcome:
    """Run a job to its last push, with one server.

    Raises:
        CommunicationError: as `RunningProcesses.wait`.
    """
    with RunningProcesses(job) as running:
        return running.wait(deadline_s)


def run_servers(job: Job, *, servers: int, worker_restarts: int = 0, deadline_s: float = 600.0) -> ServersOutcome:
    """Run a job to its last push, with several servers; the arguments are those of `RunningServers`.

    Raises:
        CompositionError: as `RunningServers`.
        CommunicationError: as `RunningServers.wait`.
    """
    with RunningServers(job, servers=servers, worker_restarts=worker_restarts) as running:
        return running.wait(deadline_s)
