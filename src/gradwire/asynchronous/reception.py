"""From the frames of `Host` to calls of `ParameterServer`, and from its grants to frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.server import ParameterServer
from gradwire.asynchronous.wire import MessageKind, WireMessage, plain
from gradwire.core.errors import PushError

NOTHING = torch.empty(0, dtype=torch.uint8)


class WorkerChannel(Protocol):
    """A way to one worker."""

    def reply(self, message: WireMessage, data: Tensor) -> None:
        """Send a message with bytes; a worker that has just died is no error here, since its end is heard next."""
        ...


class Reception:
    """Knows on which line each worker is. It does no I/O: a transport calls `receive` and `disconnect`, one at a time.

    Args:
        server: whose messages these are.
    """

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        self._lines: dict[int, WorkerChannel] = {}

    @property
    def workers(self) -> list[int]:
        """The workers that are here."""
        return sorted(self._lines)

    def receive(self, line: WorkerChannel, message: WireMessage, data: Tensor) -> None:
        """Do what a worker asks for, and tell those whom it concerns."""
        try:
            if message.kind is MessageKind.JOIN:
                self._join(line, message.grant.worker)
            elif message.kind is MessageKind.PUSH:
                self._receive(message, data)
            elif message.kind is MessageKind.LEAVE:
                self._grant(self.server.leave(message.grant.worker))
            elif message.kind is MessageKind.READ:
                line.reply(message._replace(kind=MessageKind.VALUES), self._values())
        except PushError as error:
            line.reply(message._replace(kind=MessageKind.REFUSED, text=str(error)), NOTHING)

    def disconnect(self, line: WorkerChannel) -> None:
        """A line has ended: its worker counts no more, and those who waited for it go on."""
        for worker in [worker for worker, known in self._lines.items() if known is line]:
            del self._lines[worker]
            self._grant(self.server.leave(worker))

    def _join(self, line: WorkerChannel, worker: int) -> None:
        grants = self.server.join(worker)
        self._lines[worker] = line
        self._grant(grants)

    def _receive(self, message: WireMessage, data: Tensor) -> None:
        push = Push(message.grant, data, message.fingerprint, message.loss, message.seconds)
        self._grant(self.server.receive(push).grants)

    def _grant(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._lines[grant.worker].reply(
                plain(MessageKind.GRANT, grant.worker)._replace(grant=grant), self._values()
            )

    def _values(self) -> Tensor:
        """A copy of the parameters as bytes: the server goes on while they are sent."""
        return self.server.values.cpu().clone().view(torch.uint8)
