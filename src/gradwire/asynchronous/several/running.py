"""A job that runs: its workers and servers are watched until the last push, and ended together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Generic, Self, TypeVar

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.watching import ServerWatch
from gradwire.core.errors import CommunicationError
from gradwire.peers.supervisor import Supervisor

TICK_S = 0.2
MOST_RESTARTS = 5
"""Of each server."""


OutcomeT = TypeVar("OutcomeT")
"""What came of a job."""


class RunningJob(ABC, Generic[OutcomeT]):
    """Leaving the `with` block ends all of it.

    Args:
        job: what to do.

    Attributes:
        watch: how far servers are.
        workers: the supervisor of the workers.
    """

    watch: ServerWatch
    workers: Supervisor[Any]

    def __init__(self, job: Job) -> None:
        self.job = job

    def wait(self, deadline_s: float = 600.0) -> OutcomeT:
        """Wait until every server has applied the job's pushes, and return what came of it.

        A worker that dies is gone, unless it may be started anew, and the others go on. A server that dies is started
        again from its newest snapshot, where the job has a folder: what was pushed to it since then is lost, and
        workers make other pushes of the same numbers. Nobody computes while a server is away, since each computation
        needs all parts.

        Raises:
            CommunicationError: no worker is left, a server that cannot be started again, or the deadline. All processes
                are ended then.
        """
        self.wait_for(self.job.pushes, deadline_s)
        try:
            return self.outcome_of(self.watch.outcome(self.workers.lost))
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
                    raise CommunicationError(self.late(deadline_s))
        except CommunicationError:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Updates of the server that has made the fewest, when they last said so."""
        return min(self.watch.versions)

    def look(self) -> None:
        """See who has ended, and hear how far servers are."""
        self.workers.look()
        self.watch.poll(self.workers.dead, TICK_S)

    def _has_come(self, pushes: int) -> bool:
        self.look()
        if self.version >= pushes:
            return True
        dead = self.workers.dead
        if len(dead) == self.job.workers and self.watch.know_of(dead):  # else a server may have come to its last push
            who = "; ".join(f"worker {number} {how or 'ended by itself'}" for number, how in self.workers.how.items())
            raise CommunicationError(f"no worker is left at push {self.version} of {self.job.pushes}: {who}"[:256])
        return False

    def late(self, deadline_s: float) -> str:
        """What is said where the deadline has passed."""
        return f"push {self.version} of {self.job.pushes} was the last after {deadline_s:g} s"

    @abstractmethod
    def outcome_of(self, outcome: ServersOutcome) -> OutcomeT:
        """Turn what came of the servers into what `wait` returns."""

    @abstractmethod
    def close(self) -> None:
        """End all of it; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
