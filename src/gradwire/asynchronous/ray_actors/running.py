"""A job that runs on Ray: its actors are made, watched, and ended together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.ray_actors.actors import ActorConnections, ServerActor, WorkerActor
from gradwire.asynchronous.several.cut import sizes
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.running import MOST_RESTARTS, RunningJob
from gradwire.asynchronous.several.watching import ServerWatch
from gradwire.core.errors import CommunicationError, CompositionError, last_line
from gradwire.core.flat_layout import FlatLayout
from gradwire.peers.supervisor import Supervisor

_SPREAD = {"scheduling_strategy": "SPREAD"}


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


class WorkerRun:
    """A worker that runs as an actor, for the supervisor.

    Attributes:
        handle: Ray's.
    """

    def __init__(self, ray: Any, handle: Any, run: Any) -> None:
        self._ray, self.handle, self._run = ray, handle, run

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        ended, _ = self._ray.wait([self._run], num_returns=1, timeout=0)
        if not ended:
            return None
        try:
            self._ray.get(self._run)
        except self._ray.exceptions.RayError as error:
            return last_line(error)
        return "ended by itself"

    def kill(self) -> None:
        """End the actor now; nothing where Ray itself has ended."""
        if self._ray.is_initialized():
            self._ray.kill(self.handle)


class RunningActors(RunningJob[ServersOutcome]):
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
        servers: connections to the servers, whose `handles` are Ray's.
        workers: the supervisor of the workers, whose children have Ray's `handle`.

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
        super().__init__(job)
        sizes(FlatLayout(job.parameters).numel, servers)  # refuses a number that cannot be before anything is started
        if worker_restarts < 0:
            raise CompositionError(f"{worker_restarts} restarts of a worker: give 0 or more")
        self._ray = imported_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            self._ray.init(include_dashboard=False)
        most = MOST_RESTARTS if job.folder is not None else 0
        made = self._ray.remote(ServerActor).options(**{**_SPREAD, "max_restarts": most, **(server_options or {})})
        self.servers = ActorConnections([made.remote(job, part, servers) for part in range(servers)])
        self._worker = self._ray.remote(WorkerActor).options(**{**_SPREAD, **(worker_options or {})})
        self.workers = Supervisor(self._work, job.workers, restarts=worker_restarts)
        self.watch = ServerWatch(job, self.servers, self._missed)

    def _work(self, number: int) -> WorkerRun:
        handle = self._worker.remote(self.job, number)
        return WorkerRun(self._ray, handle, handle.run.remote(self.servers.handles))

    def _missed(self, part: int, error: Exception) -> None:
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return  # it is being restarted
        how = f"server {part} died at push {self.watch.versions[part]} of {self.job.pushes}"
        if self.job.folder is None:
            raise CommunicationError(
                f"{how}: give the job a folder for snapshots, and it is started again from the newest"
            ) from error
        raise CommunicationError(f"{how} and is not started again: {last_line(error)}") from error

    @override
    def outcome_of(self, outcome: ServersOutcome) -> ServersOutcome:
        return outcome

    @override
    def late(self, deadline_s: float) -> str:
        if self.watch.unheard:
            first, cpus = self.watch.unheard[0], self._ray.cluster_resources().get("CPU", 0)
            return (
                f"server {first} was not started within {deadline_s:g} s: Ray has {cpus:g} processors: give it more, "
                "or have actors ask for less"
            )
        return super().late(deadline_s)

    @override
    def close(self) -> None:
        self.workers.close()
        handles, self.servers.handles = self.servers.handles, []
        if self._ray.is_initialized():
            for actor in handles:
                self._ray.kill(actor)
            if self._is_ours:
                self._ray.shutdown()


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
