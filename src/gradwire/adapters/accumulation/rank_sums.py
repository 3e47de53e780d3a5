"""A few numbers summed over the ranks whose gradients are combined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.collective import AllReduce
from gradwire.drivers.interpreter import ask
from gradwire.session import Session

Finish = Callable[[], Tensor]
"""Waits for the ranks, and returns the sum."""


class RankSums(ABC):
    """Adds up numbers of all ranks of something. All ranks call these methods in the same order."""

    rank = 0
    """Of this process among them, to be named by."""

    @abstractmethod
    def start(self, mine: Tensor) -> Finish:
        """Begin to sum float64 numbers of all ranks, and return what waits for the sum."""

    @abstractmethod
    def largest(self, mine: Tensor) -> Tensor:
        """Return the largest number of all ranks, elementwise."""


class OwnNumbers(RankSums):
    """This rank alone: nothing is sent."""

    def start(self, mine: Tensor) -> Finish:
        """The numbers as they are."""
        return lambda: mine

    def largest(self, mine: Tensor) -> Tensor:
        """The numbers as they are."""
        return mine


class GroupSums(RankSums):
    """Ranks of a process group that others communicate in as well, in the same thread.

    Args:
        group: whose ranks.
        device: where its backend wants tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank = dist.get_rank()

    def start(self, mine: Tensor) -> Finish:
        """An all-reduce on its way."""
        summed = mine.to(self._device, copy=True)
        work = dist.all_reduce(summed, group=self._group, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            return summed.cpu()

        return finish

    def largest(self, mine: Tensor) -> Tensor:
        """An all-reduce of maxima."""
        found = mine.to(self._device, copy=True)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.cpu()


class SessionSums(RankSums):
    """Ranks of a session, over its own communication: errors name the rank at fault.

    Args:
        session: whose ranks.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank = session.lane.failures.rank

    def start(self, mine: Tensor) -> Finish:
        """An all-reduce in the session's lane, before the next step's collectives."""
        lane, transport = self._session.lane, self._session.transport
        given = mine.to(self._session.device)
        lane.require_sound()
        finish = lane.start(lambda: ask(AllReduce(given), transport), " in gradwire.accumulate")

        def waited() -> Tensor:
            lane.failures.begin()
            try:
                return finish().cpu()
            finally:
                lane.failures.end()

        return waited

    def largest(self, mine: Tensor) -> Tensor:
        """An all-reduce of maxima in the session's lane."""
        given, lane, transport = mine.to(self._session.device), self._session.lane, self._session.transport
        lane.require_sound()
        return lane.call(lambda: ask(AllReduce(given, "max"), transport), " in gradwire.accumulate").cpu()


class NestedSums(RankSums):
    """Ranks along several axes of a mesh: a sum over the first ones, then one over the next of what these have got.

    Args:
        axes: one sum for each axis.
    """

    def __init__(self, axes: Sequence[RankSums]) -> None:
        self._axes = axes
        self.rank = axes[0].rank

    def start(self, mine: Tensor) -> Finish:
        """All axes but the last are waited for at once."""
        *inner, last = self._axes
        for axis in inner:
            mine = axis.start(mine)()
        return last.start(mine)

    def largest(self, mine: Tensor) -> Tensor:
        """The largest along each axis in turn."""
        for axis in self._axes:
            mine = axis.largest(mine)
        return mine
