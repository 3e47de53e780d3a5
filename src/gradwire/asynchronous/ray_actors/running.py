"""A job that runs on Ray: its actors are made, watched, and ended together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

import torch

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.names import Names
from gradwire.asynchronous.parts import sizes
from gradwire.asynchronous.ray_actors.watch import Servers, Workers
from gradwire.asynchronous.several.journal import history
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.core.errors import CommunicationError, CompositionError


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


class RunningActors:
    """Actors of a job. Leaving the `with` block ends them all.

        with RunningActors(job, servers=2) as running:
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
        servers: the servers, whose `handles` are Ray's.
        workers: and the workers.

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
        sizes(Names(job.parameters).numel, servers)  # refuses a number that cannot be before anything is started
        if worker_restarts < 0:
            raise CompositionError(f"{worker_restarts} restarts of a worker: give 0 or more")
        self.job, self._ray = job, imported_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            self._ray.init(include_dashboard=False)
        self.servers = Servers(self._ray, job, servers, server_options or {})
        self.workers = Workers(self._ray, job, self.servers.handles, worker_restarts, worker_options or {})

    def wait(self, deadline_s: float = 600.0) -> ServersOutcome:
        """Wait until every server has applied the job's pushes, and return what came of it.

        A worker that dies is gone, unless it may be restarted, and the others go on. A server that dies is started
        again from its newest snapshot, where the job has a folder: what was pushed to it since then is lost. Nobody
        computes while a server is away, since each computation needs all parts.

        Raises:
            CommunicationError: no worker is left, a server that cannot be restarted, or the deadline. All actors are
                ended then.
        """
        self.wait_for(self.job.pushes, deadline_s)
        try:
            return self._outcome()
        except CommunicationError:
            self.close()
            raise

    def wait_for(self, pushes: int, deadline_s: float = 600.0) -> None:
        """Wait until every server has applied so many pushes.

        Raises:
            CommunicationError: as `wait`.
        """
        end_s = time.monotonic() + deadline_s
        try:
            while not self._has_come(pushes):
                if time.monotonic() > end_s:
                    raise CommunicationError(self._late(deadline_s))
        except CommunicationError:
            self.close()
            raise

    def _has_come(self, pushes: int) -> bool:
        self.servers.poll(self.workers.dead)
        if min(self.servers.versions) >= pushes:
            return True
        if len(self.workers.dead) == self.job.workers:
            where = f"push {min(self.servers.versions)} of {self.job.pushes}"
            raise CommunicationError(f"no worker is left at {where}: {self.workers.why}"[:256])
        self.workers.poll()
        return False

    def _late(self, deadline_s: float) -> str:
        if self.servers.unheard:
            first, cpus = self.servers.unheard[0], self._ray.cluster_resources().get("CPU", 0)
            return (
                f"server {first} was not started within {deadline_s:g} s: Ray has {cpus:g} processors: give it more, "
                "or have actors ask for less"
            )
        return f"push {min(self.servers.versions)} of {self.job.pushes} was the last after {deadline_s:g} s"

    def _outcome(self) -> ServersOutcome:
        found = self.servers.finish()
        return ServersOutcome(
            Names(self.job.parameters).named(torch.cat([one.values for one in found])),
            [one.rows for one in found],
            [history(one.rows, one.version) for one in found],
            tuple(self.workers.lost),
            tuple(one.restarts for one in found),
        )

    def close(self) -> None:
        """End all actors, and Ray where it began here; a second call does nothing."""
        handles = [*self.workers.handles, *self.servers.handles]
        self.workers.handles, self.servers.handles = [], []
        if self._ray.is_initialized():
            for actor in handles:
                self._ray.kill(actor)
            if self._is_ours:
                self._ray.shutdown()

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
) -> ServersOutcome:
    """Run a job on Ray to its last push; the arguments are those of `RunningActors`.

    Raises:
        CompositionError: as `RunningActors`.
        CommunicationError: as `RunningActors.wait`.
    """
    running = RunningActors(
        job,
        servers=servers,
        worker_restarts=worker_restarts,
        server_options=server_options,
        worker_options=worker_options,
    )
    with running:
        return running.wait(deadline_s)
