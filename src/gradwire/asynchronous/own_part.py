"""What a rank has of a run of `AsynchronousOptimizer`: the server of its part, what it owes to all, and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from gradwire.asynchronous.clocks import Phase
from gradwire.asynchronous.remote_servers import RemoteServers
from gradwire.asynchronous.server import CheckedServer, ParameterServer
from gradwire.asynchronous.several.client import LOOK_S
from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import CommunicationError, StateError
from gradwire.core.saved_schema import is_count
from gradwire.peers.sockets import SocketServer

_POLL_S = 0.01
_Found = TypeVar("_Found")


class CheckedPart(NamedTuple):
    """A saved state that belongs to a rank."""

    clock: int
    memories: list[ErrorMemory | None]
    server: CheckedServer


class OwnPart:
    """A rank's server and its side of all servers, while this rank has paused at all of them.

    Args:
        host: of the server, which is called in its thread.
        server: of this rank's part of the parameters.
        servers: this rank's side.
        deadline_s: seconds to wait for other ranks.
    """

    def __init__(self, host: SocketServer, server: ParameterServer, servers: RemoteServers, deadline_s: float) -> None:
        self._host, self._server, self._servers, self._deadline_s = host, server, servers, deadline_s

    def wait_for_all(self, call: str) -> int:
        """Wait until no rank has anything under way at this rank's server; return the updates that it has made.

        Raises:
            CommunicationError: a rank that has ended, or has not paused by the deadline.
        """
        end_s = time.monotonic() + self._deadline_s
        while missing := self._missing_after(LOOK_S):
            have_left = not self._called(lambda: self._server.clocks.here)
            self._servers.pause()  # raises where a rank has ended: its server ends before the rank counts as away
            if have_left:
                break  # they call something else: the meeting says so
            if time.monotonic() > end_s:
                late = f"rank {missing[0]} has not come to {call} within {self._deadline_s:g} s"
                raise CommunicationError(f"{late}: every rank must call it", missing)
        return self._called(lambda: self._server.version)

    def _missing_after(self, seconds: float) -> list[int]:
        """Ranks that have not paused within so many seconds."""
        end_s = time.monotonic() + seconds
        while True:
            phases = self._called(lambda: list(self._server.clocks.phases))
            missing = [rank for rank, phase in enumerate(phases) if phase is not Phase.PAUSED]
            if not missing or time.monotonic() > end_s:
                return missing
            time.sleep(_POLL_S)

    def _called(self, what: Callable[[], _Found]) -> _Found:
        """Return what a call in the server's thread returns."""
        future = Future[_Found]()

        def act() -> None:
            try:
                future.set_result(what())
            except Exception as error:
                future.set_exception(error)

        self._host.call(act)
        try:
            return future.result(self._deadline_s)
        except TimeoutError as error:
            raise CommunicationError("this rank's server has ended: look for its error above") from error

    def state_dict(self) -> dict[str, Any]:
        """Copies of what the server goes on from, what this rank owes to each server, and its clock."""
        worker = self._servers.worker
        memories = [None if pusher.memory is None else pusher.memory.state_dict() for pusher in worker.pushers]
        return {"clock": worker.clock, "memories": memories, "server": self._called(self._server.state_dict)}

    def checked(self, saved: Mapping[str, Any]) -> CheckedPart:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: a damaged state, or one of another run.
        """
        memories, pushers = saved.get("memories"), self._servers.worker.pushers
        if not is_count(saved.get("clock")) or not isinstance(memories, list) or len(memories) != len(pushers):
            raise StateError("the save does not say what this rank owes to each server: it is damaged")
        found = [None if memory is None else ErrorMemory.from_state_dict(memory) for memory in memories]
        for server, (memory, pusher) in enumerate(zip(found, pushers, strict=True)):
            if memory is not None and memory.owed.numel() != pusher.names.numel:
                raise StateError(
                    f"the save has a memory of {memory.owed.numel()} elements for server {server}, whose part has "
                    f"{pusher.names.numel}"
                )
        server = self._called(lambda: self._server.checked(saved.get("server")))
        return CheckedPart(saved["clock"], found, server)

    def take_up(self, checked: CheckedPart) -> None:
        """Go on from what `checked` returned."""
        worker = self._servers.worker
        worker.clock = checked.clock
        for pusher, memory in zip(worker.pushers, checked.memories, strict=True):
            pusher.memory = memory
        self._called(lambda: self._server.take_up(checked.server))
