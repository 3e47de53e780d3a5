"""What a worker says to all servers of a run: each has a part of the parameters, and grants and refuses alone.

A worker computes when every server has granted it a push, and pushes to each its part. All servers hear of all pushes,
so the bound holds at each of them, and the slowest worker is held by none: whoever waits, waits for somebody who goes
on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.asynchronous.messages import Grant
from gradwire.asynchronous.parts import seed_of
from gradwire.asynchronous.reception import NOTHING
from gradwire.asynchronous.sockets.frames import Frame
from gradwire.asynchronous.wire import MessageKind, WireMessage, plain
from gradwire.asynchronous.worker import Pusher, require_finite
from gradwire.core.errors import CommunicationError
from gradwire.sending import Sending


class Connection(Protocol):
    """A way to one server: `sockets.connection.RemoteConnection`, or `LocalConnection` to one of this process."""

    def send(self, message: WireMessage, data: Tensor) -> None:
        """Send a message with bytes."""
        ...

    def receive(self, deadline_s: float) -> Frame:
        """Wait for the server's next frame."""
        ...

    def close(self) -> None:
        """The worker has ended."""
        ...


class Granted(NamedTuple):
    """What all servers said together.

    Attributes:
        values: (d,) the parameters, where the parts may be of slightly different moments.
        version: the updates that the first server had made.
        steps: local steps that the next push is to be made of, the fewest that any server asks for.
    """

    values: Tensor
    version: int
    steps: int


class RemoteServers:
    """A worker's side of several servers.

    Args:
        connections: to the servers, in the order of their parts.
        parts: what each of them keeps, by name, in the same order (`several.cut.named_parts`).
        worker: this one's number.
        sending, seed: as the servers have them.
        deadline_s: seconds to wait for an answer. Under a bound the answer may wait for the slowest worker.

    Attributes:
        sent_bytes: payloads that were pushed, by server.
        coded_s: processor time spent on making them.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        parts: Sequence[Mapping[str, Tensor]],
        worker: int,
        *,
        sending: Sending,
        seed: int,
        deadline_s: float,
    ) -> None:
        self.worker, self.deadline_s = worker, deadline_s
        self.sent_bytes, self.coded_s = [0] * len(connections), 0.0
        self._connections = connections
        self._pushers = [Pusher(like, sending=sending, seed=seed_of(seed, part)) for part, like in enumerate(parts)]
        self._grants: list[Grant] = []

    def join(self) -> Granted:
        """Tell all servers that this worker is here, and wait until it may compute.

        Raises:
            CommunicationError: a server that does not answer, or refuses.
        """
        for server in self._servers:
            self._send(server, plain(MessageKind.JOIN, self.worker), NOTHING)
        return self._granted()

    def push(self, change: Tensor, loss: float, seconds: float) -> Granted:
        """Push to all servers what was computed, and wait until this worker may compute again.

        Args:
            change: (d,) what is pushed.
            loss: for the record.
            seconds: that the local steps took.

        Raises:
            StepError: what is not finite. Nothing was pushed then.
            CommunicationError: a server that does not answer, or refuses.
        """
        require_finite(change, self._grants[0])
        steps = min(grant.steps for grant in self._grants)
        changes = change.split([pusher.names.numel for pusher in self._pushers])
        for server, (pusher, grant, part) in enumerate(zip(self._pushers, self._grants, changes, strict=True)):
            begun = time.thread_time()
            push = pusher.push_of(grant, part, loss, seconds)
            self.coded_s += time.thread_time() - begun
            # as long as the steps that this server asked for would have taken: it finds the worker's speed by them
            own_s = seconds * grant.steps / steps
            self._send(server, WireMessage(MessageKind.PUSH, grant, push.fingerprint, loss, own_s), push.wire)
            self.sent_bytes[server] += push.wire.nbytes
        return self._granted()

    def leave(self) -> None:
        """Compute no more: nobody need wait for this worker, which may still `read`."""
        for server in self._servers:
            self._send(server, plain(MessageKind.LEAVE, self.worker), NOTHING)

    def read(self) -> Tensor:
        """The parameters (d,) as they are now; no server takes it for a request to compute."""
        for server in self._servers:
            self._send(server, plain(MessageKind.READ, self.worker), NOTHING)
        return torch.cat([self._values(server, self._heard(server, MessageKind.VALUES)) for server in self._servers])

    @property
    def _servers(self) -> range:
        return range(len(self._connections))

    def _granted(self) -> Granted:
        frames = [self._heard(server, MessageKind.GRANT) for server in self._servers]
        self._grants = [frame.message.grant for frame in frames]
        for pusher, grant in zip(self._pushers, self._grants, strict=True):
            pusher.settle(grant)
        values = torch.cat([self._values(server, frame) for server, frame in enumerate(frames)])
        return Granted(values, self._grants[0].version, min(grant.steps for grant in self._grants))

    def _values(self, server: int, frame: Frame) -> Tensor:
        names = self._pushers[server].names
        if frame.data.numel() != names.nbytes:
            raise CommunicationError(
                f"server {server} sent {frame.data.numel()} bytes of parameters, not {names.nbytes}"
            )
        return frame.data.view(names.dtype)

    def _send(self, server: int, message: WireMessage, data: Tensor) -> None:
        try:
            self._connections[server].send(message, data)
        except OSError as error:
            raise self._lost(server, error) from error

    def _heard(self, server: int, kind: MessageKind) -> Frame:
        try:
            frame = self._connections[server].receive(self.deadline_s)
        except OSError as error:
            raise self._lost(server, error) from error
        if frame.message.kind is MessageKind.REFUSED:
            raise CommunicationError(f"server {server} refuses worker {self.worker}: {frame.message.text}")
        if frame.message.kind is not kind:
            raise CommunicationError(f"server {server} answered {frame.message.kind.name} where {kind.name} was due")
        return frame

    def _lost(self, server: int, error: OSError) -> CommunicationError:
        why = f"silent for {self.deadline_s:g} s" if isinstance(error, TimeoutError) else f"lost: {error}"
        return CommunicationError(f"server {server}, in rank {server}'s process, is {why}", (server,))

    def close(self) -> None:
        """Tell the servers that this worker has ended."""
        for connection in self._connections:
            connection.close()
