"""What the driver sees of its actors: how far servers are, which workers have ended, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.ray_actors.actors import ServerActor, WorkerActor, rows_of
from gradwire.asynchronous.several.journal import JournalRow
from gradwire.asynchronous.several.part_server import Status
from gradwire.core.errors import CommunicationError

MOST_RESTARTS = 5
"""Of each server."""
TICK_S = 0.2
_END_S = 60.0
_SPREAD = {"scheduling_strategy": "SPREAD"}


class Finished(NamedTuple):
    """What a server had in the end.

    Attributes:
        values: (d_p,) its part of the parameters.
        rows: its journal.
        version: updates that the values are made of.
        restarts: in this run.
    """

    values: Tensor
    rows: list[JournalRow]
    version: int
    restarts: int


class Servers:
    """The servers of a job, and what they last said.

    Args:
        ray: the module.
        job: what they serve.
        servers: S.
        options: of each actor.

    Attributes:
        handles: Ray's.
    """

    def __init__(self, ray: ModuleType | Any, job: Job, servers: int, options: Mapping[str, Any]) -> None:
        self._ray, self._job = ray, job
        most = MOST_RESTARTS if job.folder is not None else 0
        kind = ray.remote(ServerActor).options(**{**_SPREAD, "max_restarts": most, **options})
        self.handles: list[Any] = [kind.remote(job, part, servers) for part in range(servers)]
        self._asked: list[Any] = [None] * servers
        self._first: list[Status | None] = [None] * servers
        self._status: list[Status | None] = [None] * servers

    @property
    def versions(self) -> list[int]:
        """Updates that each had made when it last said so."""
        return [0 if status is None else status.version for status in self._status]

    @property
    def unheard(self) -> list[int]:
        """Those that never said anything."""
        return [part for part, status in enumerate(self._status) if status is None]

    def poll(self, dead: Sequence[int]) -> None:
        """Tell them which workers are dead, and hear how far they are; what takes long is heard of next time.

        Raises:
            CommunicationError: one that died and is not started again, or that could not write a snapshot.
        """
        for part, handle in enumerate(self.handles):
            if self._asked[part] is None:
                self._asked[part] = handle.status.remote(dead)
        answered, _ = self._ray.wait(self._asked, num_returns=len(self._asked), timeout=TICK_S)
        for part in [self._asked.index(one) for one in answered]:
            one, self._asked[part] = self._asked[part], None
            self._hear(part, one)

    def _hear(self, part: int, answered: Any) -> None:
        try:
            version, life, failure = self._ray.get(answered)
        except self._ray.exceptions.ActorUnavailableError:
            return  # it is being restarted
        except self._ray.exceptions.RayError as error:
            raise self._lost(part, error) from error
        if failure:
            raise CommunicationError(f"server {part} fails: {failure[:200]}")
        self._status[part] = Status(version, life)
        self._first[part] = self._first[part] or self._status[part]

    def _lost(self, part: int, error: Exception) -> CommunicationError:
        how = f"server {part} died at push {self.versions[part]} of {self._job.pushes}"
        if self._job.folder is None:
            return CommunicationError(
                f"{how}: give the job a folder for snapshots, and it is started again from the newest"
            )
        return CommunicationError(f"{how} and is not started again: {reason(error)}")

    def finish(self) -> list[Finished]:
        """End them; return what each had. One that dies just now comes back with all of it, from its snapshot.

        Raises:
            CommunicationError: one that does not come back.
        """
        return [self._finished(part) for part in range(len(self.handles))]

    def _finished(self, part: int) -> Finished:
        end_s = time.monotonic() + _END_S
        while True:
            try:
                values, rows, version, life = self._ray.get(self.handles[part].finish.remote(), timeout=_END_S)
            except self._ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() > end_s:
                    raise self._lost(part, error) from error
                time.sleep(TICK_S)
            except self._ray.exceptions.RayError as error:
                raise self._lost(part, error) from error
            else:
                first = self._first[part]
                return Finished(torch.tensor(values), rows_of(rows), version, 0 if first is None else life - first.life)


class Workers:
    """The workers of a job; those that die are started anew as often as may be.

    Args:
        ray: the module.
        job: what they do.
        servers: handles.
        restarts: of each worker.
        options: of each actor.

    Attributes:
        handles: Ray's.
        lost: those that died, in order.
    """

    def __init__(
        self, ray: ModuleType | Any, job: Job, servers: Sequence[Any], restarts: int, options: Mapping[str, Any]
    ) -> None:
        self._ray, self._job, self._servers = ray, job, servers
        self._kind = ray.remote(WorkerActor).options(**{**_SPREAD, **options})
        self._left, self._why = [restarts] * job.workers, dict[int, str]()
        self.handles: list[Any] = [None] * job.workers
        self._runs: dict[Any, int] = {}
        self.lost: list[int] = []
        for number in range(job.workers):
            self._begin(number)

    def _begin(self, number: int) -> None:
        self.handles[number] = self._kind.remote(self._job, number)
        self._runs[self.handles[number].run.remote(self._servers)] = number

    @property
    def dead(self) -> list[int]:
        """Those that are not there any more."""
        return sorted(set(range(self._job.workers)) - set(self._runs.values()))

    @property
    def why(self) -> str:
        """How those ended that did."""
        return "; ".join(f"worker {number} {why}" for number, why in sorted(self._why.items()))

    def poll(self) -> None:
        """Wait for a moment, take leave of those that have ended, and begin those again that may be."""
        ended, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=TICK_S)
        for one in ended:
            number = self._runs.pop(one)
            self._why[number] = self._how_it_ended(one)
            self.lost.append(number)
            if self._left[number]:
                self._left[number] -= 1
                self._begin(number)

    def _how_it_ended(self, run: Any) -> str:
        try:
            self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            return reason(error)
        return "ended by itself"


def reason(error: Exception) -> str:
    """What an actor's end is put down to, in a line: the last one that Ray tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:120]
