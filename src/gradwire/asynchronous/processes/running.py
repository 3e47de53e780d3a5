"""A job that runs: its processes are started, watched, and ended together."""

from __future__ import annotations

import shutil
import tempfile
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.names import Names
from gradwire.asynchronous.processes.children import end, how_it_ended, started, wait_for_any
from gradwire.asynchronous.processes.job import JobOutcome, SharedTensors
from gradwire.asynchronous.processes.job_server import serve
from gradwire.asynchronous.processes.remote import work
from gradwire.asynchronous.simulation import Applied
from gradwire.core.errors import CommunicationError

MOST_RESTARTS = 5
_TICK_S = 0.2


class RunningProcesses:
    """Processes of a job. Leaving the `with` block ends them all.

        with RunningProcesses(job) as running:
            outcome = running.wait(deadline_s=600)

    Args:
        job: what to do.

    Attributes:
        shared: tensors that the processes share; `shared.version` says how far they are.
        server: the server's process.
        workers: the workers' processes.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.shared = job, SharedTensors.of(job)
        self._home = tempfile.mkdtemp(prefix="gradwire-")  # nobody else may look into it
        self._began_s, self._restarts = time.monotonic(), 0
        self.workers: list[SpawnProcess] = []
        self.server = self._serve()
        self.workers += [started(work, job, self.shared, self.path, number) for number in range(job.workers)]

    @property
    def path(self) -> str:
        """Of the server's socket."""
        return str(Path(self._home) / "server")

    def _serve(self) -> SpawnProcess:
        Path(self.path).unlink(missing_ok=True)
        return started(serve, self.job, self.shared, self.path, self._dead())

    def _dead(self) -> tuple[int, ...]:
        return tuple(number for number, process in enumerate(self.workers) if process.exitcode is not None)

    def wait(self, deadline_s: float = 600.0) -> JobOutcome:
        """Wait for the last push.

        A worker that dies is gone, and the others go on. A server that dies is started again from its newest snapshot,
        where the job has a folder; what was pushed since then is lost, and workers make other pushes of the same
        numbers.

        Raises:
            CommunicationError: no worker is left, a server that cannot be restarted, or the deadline. All processes
                are ended then.
        """
        end_s = time.monotonic() + deadline_s
        while not self._is_done():
            self._require_time(end_s, deadline_s)
            self._look()
            living = [process for process in (self.server, *self.workers) if process.is_alive()]
            wait_for_any(living, min(_TICK_S, end_s - time.monotonic()))
        return self._outcome()

    def _look(self) -> None:
        if self.server.exitcode is not None and not self._is_done():
            self._restart()
        if len(self._dead()) == self.job.workers and not self._is_done():
            who = "; ".join(f"worker {i} {how_it_ended(process)}" for i, process in enumerate(self.workers))
            self._fail(f"no worker is left at push {self._version()} of {self.job.pushes}: {who}")

    def _version(self) -> int:
        return int(self.shared.version)

    def _is_done(self) -> bool:
        return self._version() >= self.job.pushes

    def _restart(self) -> None:
        how = f"the server {how_it_ended(self.server)} at push {self._version()} of {self.job.pushes}"
        if self.job.folder is None:
            self._fail(f"{how}: give the job a folder for snapshots, and it is started again from the newest")
        if self._restarts >= MOST_RESTARTS:
            self._fail(f"{how}, after {self._restarts} restarts: look at its messages above")
        self._restarts += 1
        self.server = self._serve()

    def _require_time(self, end_s: float, deadline_s: float) -> None:
        if time.monotonic() > end_s:
            self._fail(f"push {self._version()} of {self.job.pushes} was the last after {deadline_s:g} s")

    def _fail(self, message: str) -> None:
        self.close()
        raise CommunicationError(message)

    def _outcome(self) -> JobOutcome:
        lost = tuple(number for number in self._dead() if self.workers[number].exitcode)
        history = [
            Applied(row[0] - self._began_s, *map(int, row[1:5]), row[5])  # pyright: ignore[reportCallIssue]
            for row in self.shared.log.tolist()
        ]
        parameters = Names(self.job.parameters).named(self.shared.values.clone())
        return JobOutcome(parameters, history, lost, self._restarts)

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        end([self.server, *self.workers])
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(job: Job, deadline_s: float = 600.0) -> JobOutcome:
    """Run a job to its last push.

    Raises:
        CommunicationError: as `RunningProcesses.wait`.
    """
    with RunningProcesses(job) as running:
        return running.wait(deadline_s)
