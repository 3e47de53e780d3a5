"""The classes that Ray makes actors of, and the carrier to them: Ray itself is imported where it is called.

Records travel as NumPy arrays of bytes, which Ray hands over as they are. gradwire unpickles nothing.
"""

from __future__ import annotations

import asyncio
import os
import queue
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from typing_extensions import override

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.client import run_worker
from gradwire.asynchronous.several.messages import Failed, ServerReply
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.core.record import Record, pack, unpack
from gradwire.peers.protocol import Connections


class ServerActor:
    """Serves a part. Its methods run one after the other on one event loop, so the server needs no lock.

    Args:
        job: what to serve.
        part: p, from 0.
        servers: S.

    Raises:
        StateError, OSError: as `PartServer`.
    """

    def __init__(self, job: Job, part: int, servers: int) -> None:
        self._served = PartServer(job, part, servers, was_restarted=_was_restarted())
        self._failure: Failed | None = None

    async def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    async def ask(self, packed: Any) -> Any:
        """Reply to a request, which may have to wait for it."""
        replied: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        if self._failure is None:
            try:
                self._served.ask(unpack(memoryview(packed), PartServer.requests), replied.set_result)
            except Exception as error:
                self._failure = Failed(f"{type(error).__name__}: {error}")
                raise
        return as_bytes(self._failure or await replied)


class WorkerActor:
    """Works until a server says that all is done.

    Args:
        job: what to do.
        worker: this one's number.
    """

    def __init__(self, job: Job, worker: int) -> None:
        self._job, self._number = job, worker

    def run(self, servers: Sequence[Any]) -> None:
        """Work, with these actors as servers.

        Raises:
            CommunicationError, PushError, StateError, StepError: as `WorkerClient.run`.
        """
        run_worker(self._job, self._number, ActorConnections(servers))


class ActorConnections(Connections):
    """Connections to actors that are servers.

    Args:
        handles: Ray's.

    Attributes:
        handles: likewise.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        super().__init__(ServerReply, len(handles))
        self.handles = list(handles)
        self._come: queue.SimpleQueue[tuple[int, int, Future[Any]]] = queue.SimpleQueue()

    @override
    def send(self, server: int, number: int, request: Any) -> None:
        replied = self.handles[server].ask.remote(as_bytes(request)).future()
        replied.add_done_callback(lambda future: self._come.put((server, number, future)))  # pyright: ignore[reportUnknownLambdaType]

    @override
    def receive(self, timeout_s: float) -> None:
        try:
            server, number, future = self._come.get(timeout=timeout_s)
        except queue.Empty:
            return
        try:
            packed = future.result()
        except Exception as error:  # whatever Ray makes of an actor that is gone
            self.fail(server, error)
        else:
            self.arrive_packed(number, packed)


def as_bytes(record: Record) -> Any:
    """Return a record as an array of bytes."""
    return np.frombuffer(pack(record), np.uint8)


def _was_restarted() -> bool:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, about a name that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
