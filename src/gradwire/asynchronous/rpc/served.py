"""What processes may call of each other: functions that rpc finds by name, and the server behind them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from typing_extensions import override

from gradwire.asynchronous.several.messages import Failed, ServerReply
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.core.errors import CommunicationError
from gradwire.core.record import Record, pack, unpack
from gradwire.peers.protocol import QueuedConnections

FOREVER = 0.0
"""As a timeout of rpc: a worker may wait at a server for as long as its bound says."""


class RpcProcess:
    """What this process is: a server with its part, or a worker with those who want to know of its end."""

    served: PartServer | None = None
    failure: Failed | None = None
    ended: torch.futures.Future[None] | None = None
    is_released = False
    lock = threading.RLock()
    """Callers are threads of rpc, of which one at a time gets in."""


HERE = RpcProcess()
"""rpc calls functions and not objects, so that what they are about must be found from the module."""


def part_server() -> PartServer:
    """This process's server of a part.

    Raises:
        CommunicationError: it is none of a server.
    """
    if HERE.served is None:
        raise CommunicationError("this process is no server: give all processes the same number of servers")
    return HERE.served


@async_execution
def ask(packed: bytes) -> torch.futures.Future[bytes]:
    """At a server: reply to a request, at once or later."""
    replied: torch.futures.Future[bytes] = torch.futures.Future()

    def reply(record: Record) -> None:
        replied.set_result(pack(record))

    with HERE.lock:
        if HERE.failure is not None:
            reply(HERE.failure)
            return replied
        try:
            part_server().ask(unpack(packed, PartServer.requests), reply)
        except OSError as error:
            HERE.failure = Failed(f"{type(error).__name__}: {error}")
            raise
    return replied


def release() -> None:
    """At a server: what it said in the end has come, so it may go."""
    HERE.is_released = True


@async_execution
def end_of_worker() -> torch.futures.Future[None]:
    """At a worker: replied to when it ends, so that a call that fails says that it died."""
    if HERE.ended is None:
        HERE.ended = torch.futures.Future()
    return HERE.ended


class RpcConnections(QueuedConnections):
    """Connections to processes that are servers, by their names."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(ServerReply, len(names))
        self._names = list(names)

    @override
    def send(self, server: int, number: int, request: Any) -> None:
        def come(future: Any) -> None:
            self.come(server, number, future.value)

        try:
            rpc.rpc_async(self._names[server], ask, args=(pack(request),), timeout=FOREVER).add_done_callback(come)
        except RuntimeError as error:
            raise OSError(str(error)) from error
