"""A job that runs on Ray: its actors are made, watched, and ended together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

import torch

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.names import Names
from gradwire.asynchronous.parts import sizes
from gradwire.asynchronous.ray_actors.actors import ServerActor, WorkerActor, rows_of
from gradwire.asynchronous.several.journal import Row, history
from gradwire.asynchronous.several.outcome import Outcome
from gradwire.core.errors import CommunicationError, CompositionError

MOST_RESTARTS = 5
"""Of each server."""
_TICK_S = 0.2
_END_S = 60.0


def imported_ray() -> Any:
    """Return Ray.

    Raises:
        CompositionError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise CompositionError("servers and workers as Ray's actors need Ray: pip install 'gradwire[ray]'") from error
    return ray


class Running:
    """Actors of a job. Leaving the `with` block ends them all.

        with Running(job, servers=2) as running:
            outcome = running.wait(deadline_s=600)

    Args:
        job: what to do. On several machines its folder must be one that all of them share. Ray takes the job to other
            processes by cloudpickle, which it uses for whatever it is given; keep strangers out of the cluster.
        servers: S; each keeps as many parameters as the others, up to one. A server that dies is started again by Ray,
            where the job has a folder.
        worker_restarts: how often a worker that died is started anew, for each worker.
        server_options, worker_options: what Ray is told of each actor, such as {"num_cpus": 2, "num_gpus": 1}; by
            default they need no processor of their own, and Ray spreads them over the machines.

    Without `ray.init` before, Ray begins as it does by itself: with the cluster that RAY_ADDRESS names, or on this
    machine alone, where it ends with the block.

    Attributes:
        servers: Ray's handles of the servers.
        workers: and of the workers.

    Raises:
        CompositionError: Ray is not installed, more servers than parameters, or restarts below 0.
    """

    def __init__(
        self,
        job: Job,
        *,
        servers: int = 1,
        worker_restarts: int = 0,
        server_options: Mapping[str, Any] | None = None,
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._ray = imported_ray()
        if worker_restarts < 0:
            raise CompositionError(f"{worker_restarts} restarts of a worker: give 0 or more")
        sizes(Names(job.parameters).numel, servers)  # refuses a number that cannot be before anything is started
        self.job = job
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            self._ray.init(include_dashboard=False)
        self._left = [worker_restarts] * job.workers
        self._worker_options = {"scheduling_strategy": "SPREAD", **(worker_options or {})}
        most = MOST_RESTARTS if job.folder is not None else 0
        options = {"scheduling_strategy": "SPREAD", "max_restarts": most, **(server_options or {})}
        kind = self._ray.remote(ServerActor).options(**options)
        self.servers: list[Any] = [kind.remote(job, part, servers) for part in range(servers)]
        self._asked: list[Any] = [None] * servers
        self._status: list[tuple[int, int] | None] = [None] * servers
        self._first_life: list[int | None] = [None] * servers
        self.workers: list[Any] = [None] * job.workers
        self._runs: dict[Any, int] = {}
        self._lost, self._why = list[int](), dict[int, str]()
        for number in range(job.workers):
            self._begin(number)

    def _begin(self, number: int) -> None:
        kind = self._ray.remote(WorkerActor).options(**self._worker_options)
        self.workers[number] = kind.remote(self.job, number)
        self._runs[self.workers[number].run.remote(self.servers)] = number

    @property
    def versions(self) -> list[int]:
        """How many updates each server had made when it was last looked at."""
        return [0 if status is None else status[0] for status in self._status]

    def wait(self, deadline_s: float = 600.0) -> Outcome:
        """Wait until every server has applied the job's pushes, and return what came of it.

        A worker that dies is gone, unless it may be restarted, and the others go on. A server that dies is started
        again from its newest snapshot, where the job has a folder: what was pushed to it since then is lost. Nobody
        computes while a server is away, since each computation needs all parts.

        Raises:
            CommunicationError: no worker is left, a server that cannot be restarted, or the deadline. All actors are
                ended then.
        """
        self.wait_for(self.job.pushes, deadline_s)
        return self._outcome()

    def wait_for(self, pushes: int, deadline_s: float = 600.0) -> None:
        """Wait until every server has applied so many pushes.

        Raises:
            CommunicationError: as `wait`.
        """
        end_s = time.monotonic() + deadline_s
        self._look()
        while min(self.versions) < pushes:
            if time.monotonic() > end_s:
                self._fail_late(deadline_s)
            self._mourn()
            self._look()

    # Those who died ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        dead = sorted(set(range(self.job.workers)) - set(self._runs.values()))
        for part, server in enumerate(self.servers):
            if self._asked[part] is None:
                self._asked[part] = server.look.remote(dead)
        answered, _ = self._ray.wait(self._asked, num_returns=len(self._asked), timeout=_TICK_S)
        for part in [self._asked.index(one) for one in answered]:
            self._hear(part, self._asked[part])
            self._asked[part] = None

    def _hear(self, part: int, answered: Any) -> None:
        try:
            version, life, failure = self._ray.get(answered)
        except self._ray.exceptions.ActorUnavailableError:
            return None  # it is being restarted
        except self._ray.exceptions.RayError as error:
            return self._miss(part, error)
        if failure:
            self._fail(f"server {part} fails: {failure}")
        if self._first_life[part] is None:
            self._first_life[part] = life
        self._status[part] = (version, life)
        return None

    def _miss(self, part: int, error: Exception) -> None:
        how = f"server {part} died at push {self.versions[part]} of {self.job.pushes}"
        if self.job.folder is None:
            self._fail(f"{how}: give the job a folder for snapshots, and it is started again from the newest")
        self._fail(f"{how} and is not started again: {_reason(error)}")

    def _mourn(self) -> None:
        """Take leave of workers that have ended, and begin those again that may be."""
        ended, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_TICK_S)
        for one in ended:
            number = self._runs.pop(one)
            self._why[number] = self._how_it_ended(one)
            self._lost.append(number)
            if self._left[number]:
                self._left[number] -= 1
                self._begin(number)
        if not self._runs:
            self._look()
            who = "; ".join(f"worker {number} {why}" for number, why in sorted(self._why.items()))
            self._fail(f"no worker is left at push {min(self.versions)} of {self.job.pushes}: {who}")

    def _how_it_ended(self, run: Any) -> str:
        try:
            self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            return _reason(error)
        return "ended by itself"

    def _fail_late(self, deadline_s: float) -> None:
        missing = [part for part, status in enumerate(self._status) if status is None]
        if missing:
            cpus = self._ray.cluster_resources().get("CPU", 0)
            self._fail(
                f"server {missing[0]} was not started within {deadline_s:g} s: Ray has {cpus:g} processors in all, so "
                "give it more, or actors that ask for less"
            )
        self._fail(f"push {min(self.versions)} of {self.job.pushes} was the last after {deadline_s:g} s")

    def _fail(self, message: str) -> None:
        self.close()
        raise CommunicationError(message if len(message) <= 256 else message[:253] + "...")

    # The end -----------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        found = [self._finished(part) for part in range(len(self.servers))]
        flat = torch.cat([torch.tensor(values) for values, *_ in found])
        journals: list[list[Row]] = [rows_of(rows) for _, rows, *_ in found]
        return Outcome(
            Names(self.job.parameters).named(flat),
            journals,
            [history(rows, version) for rows, (_, _, version, _) in zip(journals, found, strict=True)],
            tuple(self._lost),
            tuple(life - (first or 0) for (*_, life), first in zip(found, self._first_life, strict=True)),
        )

    def _finished(self, part: int) -> Any:
        """What a server has in the end; one that dies just now has all of it in its snapshot."""
        end_s = time.monotonic() + _END_S
        while True:
            try:
                return self._ray.get(self.servers[part].finish.remote(), timeout=_END_S)
            except self._ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() > end_s:
                    self._miss(part, error)
                time.sleep(_TICK_S)
            except self._ray.exceptions.RayError as error:
                self._miss(part, error)

    def close(self) -> None:
        """End all actors, and Ray where it began here; a second call does nothing."""
        if self._ray.is_initialized():
            for actor in (*self.workers, *self.servers):
                self._ray.kill(actor)
            if self._is_ours:
                self._ray.shutdown()
        self.workers, self.servers = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(
    job: Job,
    *,
    servers: int = 1,
    deadline_s: float = 600.0,
    worker_restarts: int = 0,
    server_options: Mapping[str, Any] | None = None,
    worker_options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run a job on Ray to its last push; the arguments are those of `Running`.

    Raises:
        CompositionError: as `Running`.
        CommunicationError: as `Running.wait`.
    """
    running = Running(
        job,
        servers=servers,
        worker_restarts=worker_restarts,
        server_options=server_options,
        worker_options=worker_options,
    )
    with running:
        return running.wait(deadline_s)


def _reason(error: Exception) -> str:
    """What an actor's end is put down to, in a line: the last one that Ray tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:160]
