"""A rank's side of the servers of all ranks, between the steps of an optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from gradwire.asynchronous.several.client import WorkerClient
from gradwire.asynchronous.several.messages import Here, Leave, Pause, ReadValues, Values, WorkerRequest
from gradwire.asynchronous.several.worker import PartedWorker, values_of
from gradwire.core.errors import CommunicationError, first_line
from gradwire.peers.protocol import Arrived
from gradwire.peers.sockets import SocketConnections

_PATIENCE_S = 3.0
"""Seconds in which a connection that was lost may be made again."""


class GrantedValues(NamedTuple):
    """What all servers said together.

    Attributes:
        values: (d,) the parameters, where the parts may be of slightly different moments.
        version: the updates that had been made, by the server that had made the most.
        steps: local steps that the next push is to be made of, the fewest that any server asks for.
    """

    values: Tensor
    version: int
    steps: int


class RemoteServers(WorkerClient):
    """A worker's side of servers that are ranks: each call waits until all of them have replied.

    Args:
        worker: of a rank; it computes nothing by itself.
        connections: to the servers.
        deadline_s: seconds to wait for replies. Under a bound a reply may wait for the slowest worker.

    Attributes:
        coded_s: processor time spent on making pushes.
    """

    connections: SocketConnections

    def __init__(self, worker: PartedWorker, connections: SocketConnections, deadline_s: float) -> None:
        super().__init__(worker, connections, min(_PATIENCE_S, deadline_s))
        self.deadline_s, self.coded_s = deadline_s, 0.0
        self._replies: dict[int, Here | Values] = {}

    def join(self) -> GrantedValues:
        """Tell all servers that this worker is here, and wait until it may compute.

        Raises:
            CommunicationError: a server that does not reply, or refuses.
        """
        self.send(self.worker.begin())
        return self._granted()

    def push(self, change: Tensor, loss: float, seconds: float) -> GrantedValues:
        """Push to all servers what was computed, and wait until this worker may compute again.

        Args:
            change: (d,) what is pushed.
            loss: for the record.
            seconds: that the local steps took.

        Raises:
            StepError: what is not finite. Nothing was pushed then.
            CommunicationError: a server that does not reply, or refuses again and again.
        """
        begun = time.thread_time()
        requests = self.worker.push(change, loss, seconds)
        self.coded_s += time.thread_time() - begun
        self.send(requests)
        return self._granted()

    def _granted(self) -> GrantedValues:
        self._until(lambda: self.worker.granted is not None, lambda server: not self.worker.holds(server))
        grant = self.worker.granted
        assert grant is not None
        return GrantedValues(self.worker.values, grant.version, grant.steps)

    def leave(self) -> None:
        """Compute no more: nobody need wait for this worker, which may still `read`."""
        self._all(self.worker.leave())

    def pause(self) -> None:
        """Compute nothing until `resume`: nobody need wait for this worker. A second call does nothing more.

        Raises:
            CommunicationError: a server that does not reply.
        """
        self._all(self.worker.pause())

    def resume(self) -> GrantedValues:
        """Join again after `pause`; this worker may compute at once, whatever the pace says.

        Raises:
            CommunicationError: a server that does not reply.
        """
        self.send(self.worker.resume())
        return self._granted()

    def read(self) -> Tensor:
        """The parameters (d,) as they are now; no server takes it for a request to compute."""
        replies = self._all(self.worker.read())
        return values_of([reply for reply in replies if isinstance(reply, Values)])

    def _all(self, requests: Sequence[WorkerRequest]) -> list[Here | Values]:
        self._replies = {}
        self.send(requests)
        self._until(lambda: len(self._replies) == len(requests), lambda server: server not in self._replies)
        return [self._replies[request.server] for request in requests]

    @override
    def arrived(self, arrived: Arrived) -> None:
        if isinstance(arrived.request, ReadValues | Leave | Pause):
            self._replies[arrived.server] = arrived.reply
        super().arrived(arrived)

    def _until(self, is_done: Callable[[], bool], is_missing: Callable[[int], bool]) -> None:
        end_s = time.monotonic() + self.deadline_s
        while not is_done():
            self.turn()
            if time.monotonic() > end_s and not is_done():
                server = next(server for server in range(self.connections.servers) if is_missing(server))
                raise self.lost(server, 0.0, TimeoutError())

    @override
    def patience(self, error: Exception) -> float:
        # a process that is silent may compile, or be stopped, and goes on then; one whose connection ended has ended
        return self.deadline_s if isinstance(error, TimeoutError) else self.patience_s

    @override
    def lost(self, server: int, since_s: float, error: Exception) -> CommunicationError:
        why = f"silent for {self.deadline_s:g} s" if isinstance(error, TimeoutError) else f"lost: {first_line(error)}"
        return CommunicationError(f"server {server}, in rank {server}'s process, is {why}", (server,))

    def close(self) -> None:
        """Tell the servers that this worker has ended."""
        self.connections.close()
