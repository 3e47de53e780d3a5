"""The classes that Ray makes actors of. They are ordinary ones: Ray is imported where it is called."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.ray_actors.packing import Packed, pack_answer, pack_ask, unpack_answer, unpack_ask
from gradwire.asynchronous.several.client import Line, WorkerClient
from gradwire.asynchronous.several.journal import JournalRow
from gradwire.asynchronous.several.messages import Ask, ServerAnswer
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.asynchronous.several.worker import PartedWorker


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
        self._part_server = PartServer(job, part, servers, was_restarted=_was_restarted())
        self._failure = ""

    async def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    async def ask(self, packed: Packed) -> Packed:
        """Answer a worker, which may have to wait for it."""
        answered: asyncio.Future[ServerAnswer] = asyncio.get_running_loop().create_future()
        try:
            self._part_server.ask(unpack_ask(packed), answered.set_result)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        return pack_answer(await answered)

    async def status(self, dead: Sequence[int]) -> tuple[int, int, str]:
        """Hear who is dead; return version and life, and what went wrong here."""
        status = self._part_server.status(dead)
        return status.version, status.life, self._failure

    async def finish(self) -> tuple[Any, list[tuple[Any, ...]], int, int]:
        """End; return the part's parameters, its journal, version and life."""
        values, rows, status = self._part_server.finish()
        return values.cpu().numpy(), [tuple(row) for row in rows], status.version, status.life


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
        job = self._job
        worker = PartedWorker(
            self._number,
            job.work(self._number),
            job.parameters,
            servers=len(servers),
            sending=job.sending,
            seed=job.seed,
        )
        WorkerClient(worker, [line_to(server) for server in servers], job.patience_s).run()


def line_to(server: Any) -> Line:
    """Return a line to an actor that is a server."""

    def ask(ask: Ask) -> Future[ServerAnswer]:
        answered: Future[ServerAnswer] = Future()

        def hear(heard: Future[Packed]) -> None:
            error = heard.exception()
            if error is None:
                answered.set_result(unpack_answer(heard.result()))
            else:
                answered.set_exception(error)

        server.ask.remote(pack_ask(ask)).future().add_done_callback(hear)
        return answered

    return ask


def rows_of(plain: Sequence[Sequence[Any]]) -> list[JournalRow]:
    """Return a journal's rows from tuples of their fields."""
    return [JournalRow(*fields) for fields in plain]


def _was_restarted() -> bool:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, about a name that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
