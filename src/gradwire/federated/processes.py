"""Clients that train in processes of their own, several at once.

Each worker process serves requests (`gradwire.peers`): a request is a job, and its reply is the outcome. Only what a
worker is started with (how to make its model and its clients, and the terms) is handed over as `multiprocessing` does
that: it has to be importable, and comes from this program alone.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from typing_extensions import override

from gradwire.core.errors import CompositionError, FederationError, RecordError
from gradwire.core.record import Record
from gradwire.federated.client import Federation, Terms
from gradwire.federated.engines import ClientJob, LocalTrainer, Lost, Outcome
from gradwire.peers.greeting import SECRET_BYTES
from gradwire.peers.protocol import ANY_LENGTH, Arrived, Reply, Served
from gradwire.peers.sockets import SocketConnections, SocketServer
from gradwire.peers.supervisor import ChildProcess, Supervisor

Make = Callable[[], tuple[nn.Module, Federation]]
START_S = 300.0
"""How long a worker may take to begin."""
_AGAIN_S = 0.05
_END_S = 5.0


class ReadyRequest(Record, frozen=True, tag=True):
    """Have you made your model and clients? `WorkerReady` is the reply."""


class ClientRequest(Record, frozen=True, tag=True):
    """Train a client. The reply is an outcome."""

    job: ClientJob


class WorkerReady(Record, frozen=True, tag=True):
    """A worker is ready, or says what went wrong."""

    failure: str = ""


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
        self._running: _Running | None = None

    def run(self, terms: Terms, jobs: Sequence[ClientJob]) -> Iterator[Outcome]:
        """Hand jobs out as workers get free; yield outcomes as they come.

        Raises:
            FederationError: the engine is closed, a worker could not be started, or its reply is no outcome.
        """
        if not self._count:
            raise FederationError("these workers are closed: make a new Processes")
        if self._running is None or terms != self._running.terms:
            self._end()
            self._running = _Running(self._make, terms, self._count, self._deadline_s)
        yield from self._running.run(jobs)

    def close(self) -> None:
        """End all worker processes."""
        self._count = 0
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    """Workers that were told the terms."""

    def __init__(self, make: Make, terms: Terms, count: int, deadline_s: float) -> None:
        self.terms, self._make, self._deadline_s = terms, make, deadline_s
        self._home = tempfile.mkdtemp(prefix="gradwire-")  # nobody else may look into it
        self._secret, self._silent_s = secrets.token_bytes(SECRET_BYTES), 2 * deadline_s + START_S
        self._paths = [str(Path(self._home) / f"worker-{place}") for place in range(count)]
        self._connections = SocketConnections(
            WorkerReady | Outcome, self._paths, self._secret, 0, most_bytes=ANY_LENGTH, silent_s=self._silent_s
        )
        self._ready: set[int] = set()
        self._aside: list[Arrived] = []
        self._training: dict[int, tuple[ClientRequest, float]] = {}  # and its deadline, by the worker's place
        self._workers = Supervisor(self._start, count)

    def _start(self, place: int) -> ChildProcess:
        Path(self._paths[place]).unlink(missing_ok=True)
        return ChildProcess(_serve, self._make, self.terms, self._paths[place], self._secret, self._silent_s)

    def run(self, jobs: Sequence[ClientJob]) -> Iterator[Outcome]:
        """Hand jobs out as workers get free; yield outcomes as they come."""
        for place in self._workers.look():
            self._replace(place)
        waiting = list(reversed(jobs))
        try:
            for place in range(len(self._paths)):
                self._hand_out(place, waiting)
            while self._training:
                for place, outcome in self._outcomes():
                    yield outcome
                    self._hand_out(place, waiting)
        finally:  # where nobody wants the other outcomes, the next run must not find them
            for place in list(self._training):
                self._replace(place)

    def _hand_out(self, place: int, waiting: list[ClientJob]) -> None:
        if waiting:
            self._await_start(place)
            job = waiting.pop()
            request = ClientRequest(job)
            self._training[place] = (request, time.monotonic() + self._deadline_s)
            self._connections.ask(place, request)

    def _outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """The next reply with its worker's place; where none comes, those who are late."""
        first_s = min(end_s for _, end_s in self._training.values())
        arrived = self._aside.pop() if self._aside else self._wait(first_s - time.monotonic())
        if arrived is not None:
            # what an older request brings is left out, such as that of a worker that was ended at its deadline
            if arrived.server in self._training and arrived.request is self._training[arrived.server][0]:
                yield arrived.server, self._outcome(arrived)
            return
        for place, (request, end_s) in list(self._training.items()):
            if time.monotonic() > end_s:
                self._replace(place)
                client = request.job.task.client
                why = f"client {client} took longer than {self._deadline_s:g} s, and its worker was killed"
                yield place, Lost(client, why)

    def _wait(self, seconds: float) -> Arrived | None:
        try:
            return self._connections.wait(max(0.0, seconds))
        except RecordError as error:
            raise FederationError(f"a worker answers with {error}") from error

    def _outcome(self, arrived: Arrived) -> Outcome:
        """What a worker has to say; where it is dead, another one takes its place."""
        place = arrived.server
        if arrived.error is None:
            del self._training[place]
            return arrived.reply
        client, status = arrived.request.job.task.client, self._status(place)
        self._replace(place)
        return Lost(client, f"client {client}'s worker died with status {status}")

    def _status(self, place: int) -> int | None:
        process = self._workers.children[place].process
        process.join(_END_S)  # its connection ends a little before it does
        return process.exitcode

    def _await_start(self, place: int) -> None:
        """Wait until a worker has imported and made what it needs, which counts for no client."""
        end_s = time.monotonic() + START_S
        while place not in self._ready:
            arrived = self._asked(place, end_s)
            if arrived is not None and arrived.error is None:
                self._require_good(place, arrived.reply.failure)
            elif self._workers.children[place].ended() is not None:
                self._require_good(place, f"it died with status {self._status(place)}; see what it has printed")
            elif time.monotonic() > end_s:
                self._require_good(place, "it took too long")
            else:
                time.sleep(_AGAIN_S)

    def _asked(self, place: int, end_s: float) -> Arrived | None:
        """What a worker says when it is asked whether it is ready; None where it says nothing in time."""
        request = ReadyRequest()
        self._connections.ask(place, request)
        while time.monotonic() <= end_s:
            arrived = self._wait(_AGAIN_S)
            if arrived is not None and arrived.request is request:
                return arrived
            if arrived is not None and isinstance(arrived.request, ClientRequest):
                self._aside.append(arrived)  # of another worker, which trains meanwhile
        return None

    def _require_good(self, place: int, failure: str) -> None:
        if failure:
            self._workers.children[place].kill()
            raise FederationError(f"a worker could not be started: {failure}")
        self._ready.add(place)

    def _replace(self, place: int) -> None:
        self._training.pop(place, None)
        self._ready.discard(place)
        self._connections.fail(place, OSError("it was ended"))
        self._workers.start_anew(place)

    def close(self) -> None:
        """End all of them."""
        self._connections.close()
        self._workers.close()
        shutil.rmtree(self._home, ignore_errors=True)


class _Trainer(Served):
    """A worker: trains one client after another."""

    requests = ReadyRequest | ClientRequest
    most_bytes = ANY_LENGTH

    def __init__(self, make: Make, terms: Terms) -> None:
        self._terms, self._failure = terms, ""
        try:
            self._trainer = LocalTrainer(*make())
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    @override
    def ask(self, request: ReadyRequest | ClientRequest, reply: Reply) -> None:
        reply(
            WorkerReady(self._failure)
            if isinstance(request, ReadyRequest)
            else self._trainer.do(self._terms, request.job)
        )


def _serve(make: Make, terms: Terms, path: str, secret: bytes, silent_s: float) -> None:
    """The process of a worker."""
    torch.set_num_threads(1)
    SocketServer(_Trainer(make, terms), path, secret, silent_s=silent_s).run()
