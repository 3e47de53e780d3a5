"""What processes may call of each other: functions that rpc finds by name, and the server behind them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution

from gradwire.asynchronous.several.client import Line
from gradwire.asynchronous.several.journal import JournalRow
from gradwire.asynchronous.several.messages import Ask, ServerAnswer
from gradwire.asynchronous.several.part_server import PartServer, Status
from gradwire.core.errors import CommunicationError

FOREVER = 0.0
"""As a timeout of rpc: a worker may wait at a server for as long as its bound says."""


class ServedByRpc:
    """A `PartServer` whose callers are threads of rpc; one at a time gets in."""

    def __init__(self, part_server: PartServer) -> None:
        self._part_server, self._lock = part_server, threading.RLock()
        self.failure = ""

    @property
    def is_done(self) -> bool:
        """Whether `finish` was called."""
        return self._part_server.is_done

    def ask(self, ask: Ask) -> torch.futures.Future[ServerAnswer]:
        """Answer a worker, at once or later."""
        answered: torch.futures.Future[ServerAnswer] = torch.futures.Future()
        with self._lock:
            try:
                self._part_server.ask(ask, answered.set_result)
            except OSError as error:
                self.failure = f"{type(error).__name__}: {error}"
                raise
        return answered

    def status(self, dead: Sequence[int]) -> Status:
        """As `PartServer.status`.

        Raises:
            CommunicationError: a snapshot could not be written.
        """
        with self._lock:
            if self.failure:
                raise CommunicationError(self.failure)
            return self._part_server.status(dead)

    def finish(self) -> tuple[Tensor, list[JournalRow], Status]:
        """What `PartServer.finish` does."""
        with self._lock:
            return self._part_server.finish()


class Here:
    """What this process is: a server with its part, or a worker with those who want to know of its end."""

    served: ServedByRpc | None = None
    ended: torch.futures.Future[None] | None = None
    is_released = False


HERE = Here()
"""rpc calls functions and not objects, so that what they are about must be found from the module."""


def part_server() -> ServedByRpc:
    """This process's server of a part.

    Raises:
        CommunicationError: it is none of a server.
    """
    if HERE.served is None:
        raise CommunicationError("this process is no server: give all processes the same number of servers")
    return HERE.served


@async_execution
def ask(question: Ask) -> torch.futures.Future[ServerAnswer]:
    """At a server: answer a worker."""
    return part_server().ask(question)


def status(dead: Sequence[int]) -> Status:
    """At a server: hear who is dead, and say how far it is."""
    return part_server().status(dead)


def finish() -> tuple[Tensor, list[JournalRow], Status]:
    """At a server: end."""
    return part_server().finish()


def release() -> None:
    """At a server: what it answered to `finish` has come, so it may go."""
    HERE.is_released = True


@async_execution
def end_of_worker() -> torch.futures.Future[None]:
    """At a worker: answered when it ends, so that a call that fails says that it died."""
    if HERE.ended is None:
        HERE.ended = torch.futures.Future()
    return HERE.ended


def line_to(name: str) -> Line:
    """Return a line to the server of that name."""

    def send(question: Ask) -> Future[ServerAnswer]:
        answered: Future[ServerAnswer] = Future()

        def hear(heard: torch.futures.Future[Any]) -> None:
            try:
                answered.set_result(heard.value())
            except Exception as error:  # whatever rpc makes of a process that is gone
                answered.set_exception(error)

        try:
            rpc.rpc_async(name, ask, args=(question,), timeout=FOREVER).add_done_callback(hear)
        except RuntimeError as error:
            answered.set_exception(error)
        return answered

    return send
