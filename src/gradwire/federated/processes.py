"""Clients that train in processes of their own, several at once.

Jobs and outcomes go between this process and its workers as packed records (`gradwire.core.record`). Only what a worker
is started with (how to make its model and its clients, and the terms) is handed over as `multiprocessing` does that: it
has to be importable, and comes from this program alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from torch import nn

from gradwire.core.errors import CompositionError, FederationError, RecordError
from gradwire.core.record import pack, unpack
from gradwire.federated.client import Federation, Terms
from gradwire.federated.engines import ClientJob, LocalTrainer, Lost, Outcome

Make = Callable[[], tuple[nn.Module, Federation]]
STARTED = "started"
START_S = 300.0
"""How long a worker may take to begin."""
STOP_S = 5.0
"""How long a worker may take to end before it is killed."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    started: bool = False
    client: int | None = None  # whom it trains


class Processes:
    """Trains clients in workers, each with one thread of torch; results are those of `InProcess` with one thread.

    A worker that dies loses the client that it trained, which the round reports by name, and a new one takes its place.
    One that cannot be started ends the round with an error; the next round starts it anew.
    Workers start with the first round, since they are told the terms then, and anew where they have changed.

    Args:
        make: called once in each worker; returns a model with the structure of the server's, and the federation. It
            must be importable: a function of a module, or a `functools.partial` of one. So must be what the terms are
            made of, where you have written it yourself.
        workers: how many at once, 1 or more.
        deadline_s: how long a client may take; its worker is killed then.

    Raises:
        CompositionError: no worker, or a deadline that is not positive.
    """

    def __init__(self, make: Make, workers: int, deadline_s: float = 600.0) -> None:
        if workers < 1 or not deadline_s > 0:
            raise CompositionError(f"{workers} workers with {deadline_s} s a client: give one at least, and some time")
        self._make, self._deadline_s, self._count = make, deadline_s, workers
        self._terms: Terms | None = None
        self._workers: list[_Worker] = []

    def _require_workers(self, terms: Terms) -> None:
        if not self._count:
            raise FederationError("these workers are closed: make a new Processes")
        if terms != self._terms:
            self._end_all()
            self._terms = terms
        for place, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                self._replace(place, terms)
        while len(self._workers) < self._count:
            self._workers.append(self._start(terms))

    def _start(self, terms: Terms) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, self._make, terms), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def run(self, terms: Terms, jobs: Sequence[ClientJob]) -> Iterator[Outcome]:
        """Hand jobs out as workers get free; yield outcomes as they come.

        Raises:
            FederationError: the engine is closed, a worker could not be started, or its answer is no outcome.
        """
        self._require_workers(terms)
        waiting = list(reversed(jobs))
        try:
            for place in range(len(self._workers)):
                self._hand_out(place, waiting)
            while busy := self._busy():
                ready = wait(list(busy), self._deadline_s)
                for connection in ready or list(busy):
                    place = busy[connection]  # pyright: ignore[reportArgumentType]
                    yield self._outcome(place, terms, late=not ready)
                    self._hand_out(place, waiting)
        finally:  # where nobody wants the other outcomes, the next run must not find them
            for place in self._busy().values():
                self._replace(place, terms)

    def _busy(self) -> dict[Connection, int]:
        """Places of the workers that train somebody, by connection."""
        return {worker.connection: i for i, worker in enumerate(self._workers) if worker.client is not None}

    def _hand_out(self, place: int, waiting: list[ClientJob]) -> None:
        if not waiting:
            return
        job, worker = waiting.pop(), self._workers[place]
        _await_start(worker)
        worker.client = job.task.client
        with contextlib.suppress(OSError):  # a worker that is dead by now shows when its answer is read
            worker.connection.send_bytes(pack(job))

    def _outcome(self, place: int, terms: Terms, *, late: bool) -> Outcome:
        """What a worker has to say; where it is dead or late, another one takes its place."""
        worker = self._workers[place]
        client, worker.client = worker.client or 0, None
        if not late:
            with contextlib.suppress(EOFError, OSError):
                return _received(worker.connection.recv_bytes())
        self._replace(place, terms)
        if late:
            return Lost(client, f"client {client} took longer than {self._deadline_s:g} s, and its worker was killed")
        return Lost(client, f"client {client}'s worker died with status {worker.process.exitcode}")

    def _replace(self, place: int, terms: Terms) -> None:
        _end(self._workers[place])
        self._workers[place] = self._start(terms)

    def close(self) -> None:
        """End all worker processes."""
        self._count, self._terms = 0, None
        self._end_all()

    def _end_all(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.process.join(STOP_S)
            _end(worker)


def _received(packed: bytes) -> Outcome:
    try:
        return unpack(packed, Outcome)
    except RecordError as error:
        raise FederationError(f"a worker answers with {error}") from error


def _await_start(worker: _Worker) -> None:
    """Wait until a worker has imported and made what it needs, which counts for no client."""
    if worker.started:
        return
    told = ""
    with contextlib.suppress(EOFError, OSError):
        told = worker.connection.recv_bytes().decode() if worker.connection.poll(START_S) else "it took too long"
    if told != STARTED:
        _end(worker)
        told = told or f"it died with status {worker.process.exitcode}; see what it has printed"
        raise FederationError(f"a worker could not be started: {told}")
    worker.started = True


def _end(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.join(0.5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _work(connection: Connection, make: Make, terms: Terms) -> None:
    """The life of a worker: a job, its outcome, and again, until nobody asks any more."""
    torch.set_num_threads(1)
    try:
        trainer = LocalTrainer(*make())
    except Exception as error:
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    connection.send_bytes(STARTED.encode())
    while True:
        try:
            job = unpack(connection.recv_bytes(), ClientJob)
        except (EOFError, OSError, KeyboardInterrupt):
            return
        connection.send_bytes(pack(trainer.do(terms, job)))
