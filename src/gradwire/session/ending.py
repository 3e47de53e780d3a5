"""How what communicates on a lane ends: when it is told to, when it is forgotten, and when Python ends."""

from __future__ import annotations

import atexit
import weakref

from gradwire.core import buffers
from gradwire.drivers.process_group import GroupTransport
from gradwire.session.lane import INTERRUPTED_S, Lane


class Ending:
    """Lets go of a transport once, and of its lane, where nobody else uses that.

    Args:
        holder: whose transport it is. Where it is forgotten it ends as well: nothing that threads run for good refers
            to it.
        lane: that the transport is of.
        transport: its own.
        shares_lane: whether others use the lane too.
    """

    def __init__(self, holder: object, lane: Lane, transport: GroupTransport, shares_lane: bool) -> None:
        self.lane = lane
        self._finalizer = weakref.finalize(holder, _leave if shares_lane else _let_go, lane, transport, at_once=True)
        self._finalizer.atexit = False  # `_close_all` knows what may still be torn down then
        if not shares_lane:
            _to_come.add(self)

    @property
    def has_come(self) -> bool:
        """Whether it is over."""
        return not self._finalizer.alive

    def come(self, at_once: bool) -> None:
        """End it; a second call does nothing.

        Args:
            at_once: do not wait for a step that is under way.
        """
        if (finalizer := self._finalizer.detach()) is not None:
            _to_come.discard(self)
            finalizer[1](*finalizer[2], at_once=at_once)


_to_come: weakref.WeakSet[Ending] = weakref.WeakSet()


def _let_go(lane: Lane, transport: GroupTransport, at_once: bool) -> None:
    """End the lane, after the step that is under way or at once; memory that only its steps used goes with it."""
    lane.let_go(transport, INTERRUPTED_S if at_once else lane.deadline_s + 10.0)
    buffers.let_go()


def _leave(lane: Lane, transport: GroupTransport, at_once: bool) -> None:
    """Let go of the transport alone: once its jobs on the lane are done."""
    lane.executor.run(transport.close)


@atexit.register
def _close_all() -> None:
    """Join communication threads before the interpreter takes their process groups apart."""
    for ending in list(_to_come):
        ending.lane.close()
