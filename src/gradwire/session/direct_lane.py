"""A lane over a process group that the caller has made: for sessions among workers that come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

from gradwire.drivers.process_group import GroupTransport
from gradwire.flight.recorder import recorder
from gradwire.session.failures import FailureBoard
from gradwire.session.lane import Lane
from gradwire.session.meeting import GroupMeeting


class CallersThread:
    """Jobs run where the caller is, at once."""

    def run(self, job: Callable[[], None]) -> None:
        """Do a job."""
        with torch.inference_mode(False), torch.no_grad():
            job()

    def is_here(self) -> bool:
        """Always: whoever asks may do a job itself."""
        return True

    def order(self) -> None:
        """Nothing: a job has ended once `run` returns."""

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that a job may resolve."""
        return torch.futures.Future()

    def close(self, timeout_s: float, at_end: Callable[[], None] | None = None) -> None:
        """Do `at_end`."""
        if at_end is not None:
            at_end()


class NoBoard(FailureBoard):
    """Raises errors as they are, and tells nobody: whoever made the group knows who of it is lost."""

    def __init__(self, group: dist.ProcessGroup, name: str, what: str, workers: Sequence[int]) -> None:
        self.rank, self.ranks = group.rank(), list(range(group.size()))
        self.error: BaseException | None = None
        self.log = recorder().lane(name, what, workers or self.ranks)

    @override
    def explain(self, error: BaseException, where: str = "") -> BaseException:
        self.error = self.error or error
        return error

    @override
    def leave_word(self, error: BaseException) -> None:
        """Nothing."""

    @override
    def tell(self, error: BaseException) -> None:
        """Nothing."""

    @override
    def close(self, timeout_s: float) -> None:
        """End the log: there is no thread."""
        self.log.end()


class DirectLane(Lane):
    """Communication over a group on CPUs that the caller has made and lets go of, in the caller's own thread.

    No default process group is needed. Several sessions may share a lane, one step after another.

    Args:
        group: between the processes; a default group need not know of it.
        store: where they leave words for each other.
        name: of the group, used for no other.
        deadline_s: how long they are waited for at the store.
        what: the call that makes it, for the flight recorder.
        workers: the numbers of the group's processes, if they have any, for the flight recorder.

    Example:
        lane = DirectLane(group_apart(store, rank, world_size, 60.0), store, "workers/7", 60.0)
        session = Session({"w": torch.zeros(1000)}, "int4", lane=lane)
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        name: str,
        deadline_s: float,
        what: str = "a lane of workers",
        workers: Sequence[int] = (),
    ) -> None:
        self.group, self.store, self.name, self.deadline_s = group, store, name, deadline_s
        self.failures = NoBoard(group, name, what, workers)
        self.log = self.failures.log
        self.executor = CallersThread()
        self.poison, self.ports = None, {}
        self.meeting = GroupMeeting(store, name, group.rank(), self.failures.ranks, self.log)

    @override
    def transport(self) -> GroupTransport:
        return GroupTransport(self.group, self.log)
