"""Random schedules of a federation over the carrier with faults, and watchers that look at each step.

A `RoundServer` is the protocol object around `gradwire.federated.Server`, a `BufferServer` the one around
`BufferedServer`. The global model has an element for each client, to which each update of that one adds 1 before the
mean, and a client's loss is the number of its training, so that both tell whose updates a step was made of.

Watched: each update counts once, a round is atomic, what was refused changes nothing, and a client that is lost is
dropped and the round goes on. Once nothing fails any more, there are more rounds.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.errors import FederationError
from gradwire.core.record import Count, Record
from gradwire.federated import SGD, Assignment, BufferedServer, FedAvg, Server, Update
from gradwire.federated.methods import Work
from gradwire.peers.faulty import FaultyConnections, FaultyNetwork
from gradwire.peers.protocol import Arrived, Reply, Served
from promises import checked, faults_of, require

FAULTS_S = 4.0
END_S = 500.0
LATE_S = 2.5
"""Clients that have not sent anything after so long are dropped."""
AGAIN_S = 1.0


# What travels ---------------------------------------------------------------------------------------------------------


class Ready(Record, frozen=True, tag=True):
    """This client may train. The reply is a `Task` once it is drawn."""

    client: Count


class Sent(Record, frozen=True, tag=True):
    """A client's update. The reply is `Accepted` or `Refused`, at once."""

    update: Update


class Unable(Record, frozen=True, tag=True):
    """A client sends no update of an assignment, which is told by its round and serial. The reply is `Accepted`."""

    client: Count
    round: Count
    serial: Count


class Task(Record, frozen=True, tag=True):
    """What the server asks of a client."""

    assignment: Assignment


class Accepted(Record, frozen=True, tag=True):
    """That update counts, or will with its round."""


class Refused(Record, frozen=True, tag=True):
    """That update is left out, for the reason given."""

    text: str


ClientRequest = Ready | Sent | Unable
TaskReply = Task | Accepted | Refused


# The protocol objects -------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """The global model."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(clients, dtype=torch.float64))


class Kept:
    """What outlives a server.

    Attributes:
        saved: its state; None before it saved any.
        wanted: (clients,) the model as it must be.
        counted: the losses of all updates that a step was made of.
        steps: that were made.
    """

    def __init__(self, clients: int) -> None:
        self.saved: dict[str, Any] | None = None
        self.steps = 0
        self.wanted = torch.zeros(clients, dtype=torch.float64)
        self.counted: set[float] = set()


class TaskServer(Served):
    """Gives tasks to clients, takes their updates, and is looked at after each call.

    Args:
        kept: what was saved.
        clock: seconds.
    """

    requests = ClientRequest

    def __init__(self, kept: Kept, clock: Callable[[], float]) -> None:
        self.kept, self._clock = kept, clock
        self.waiting: dict[int, Reply] = {}
        self.tasks: dict[int, Assignment] = {}
        self.since_s: dict[int, float] = {}
        self.received: list[tuple[int, float]] = []

    @property
    @abstractmethod
    def model(self) -> Tensor:
        """The global model's parameters."""

    @abstractmethod
    def receive(self, update: Update) -> None:
        """Hand an update to the federation's server."""

    @abstractmethod
    def drop(self, client: int, reason: str) -> None:
        """Tell it that a client sends nothing."""

    @abstractmethod
    def go_on(self) -> None:
        """Make a step where it is due, and draw clients where that is due."""

    def ask(self, request: ClientRequest, reply: Reply) -> None:
        before = self.model.clone()
        match request:
            case Ready():
                self.waiting[request.client] = reply
            case Sent():
                reply(self._take(request, before))
            case Unable():
                self._miss(request.client, (request.round, request.serial), "it has said so")
                reply(Accepted())
        self._watched()

    def lost(self, peer: int) -> None:
        self.waiting.pop(peer, None)
        self._miss(peer, None, "it is lost")
        self._watched()

    def tick(self) -> None:
        for client, since_s in list(self.since_s.items()):
            if self._clock() - since_s > LATE_S:
                self._miss(client, None, "it is late")
        self._watched()

    def _take(self, sent: Sent, before: Tensor) -> Record:
        try:
            self.receive(sent.update)
        except FederationError as error:
            require(torch.equal(self.model, before), f"what was refused changed the model: {error}")
            return Refused(str(error))
        self._close(sent.update.client)
        return Accepted()

    def _miss(self, client: int, named: tuple[int, int] | None, reason: str) -> None:
        """Wait no longer for what a client has to do, if that is what is named; None names whatever it is."""
        task = self.tasks.get(client)
        if task is not None and named in (None, (task.round, task.serial)):
            self._close(client)
            self.drop(client, reason)

    def _close(self, client: int) -> None:
        """A task is done or dropped; one that was dropped may be done later, as long as its round is open."""
        self.tasks.pop(client, None)
        self.since_s.pop(client, None)

    def _watched(self) -> None:
        """Go on, look at the model, and hand tasks to those who wait for one."""
        self.go_on()
        require(torch.allclose(self.model, self.kept.wanted), "the model is not the one of the updates that counted")
        for client in self.waiting.keys() & self.tasks.keys():
            self.waiting.pop(client)(Task(self.tasks[client]))

    def assign(self, assignment: Assignment) -> None:
        """Open a task."""
        # the server goes on in the same memory, and what is handed over without being packed is not copied
        handed = assignment.replace(model=assignment.model.clone(), buffers=assignment.buffers.clone())
        self.tasks[assignment.client] = handed
        self.since_s[assignment.client] = self._clock()

    def stepped(self, clients: tuple[int, ...], loss: float, weights: list[float]) -> None:
        """A step was made of these clients' updates; those that were received are the same."""
        received, self.received = self.received, []
        found = sorted(client for client, _ in received)
        require(sorted(clients) == found, f"a step of {clients}, where {found} were accepted")
        losses = [loss for _, loss in received]
        require(math.isclose(loss, sum(losses) / len(losses)), "a step of other updates than those that were accepted")
        require(self.kept.counted.isdisjoint(losses), f"an update of {losses} counted before")
        require(len(set(losses)) == len(losses), f"an update counts twice among {losses}")
        self.kept.counted.update(losses)
        self.kept.steps += 1
        for client, weight in zip(clients, weights, strict=True):
            self.kept.wanted[client] += weight


class RoundServer(TaskServer):
    """In rounds: one ends when all clients that were drawn have sent an update or were dropped."""

    def __init__(self, kept: Kept, clock: Callable[[], float], made: Server) -> None:
        super().__init__(kept, clock)
        self.server = made
        if kept.saved is not None:
            made.load_state_dict(kept.saved)
        self._begin()

    @property
    def model(self) -> Tensor:
        return next(self.server.model.parameters()).detach()

    def receive(self, update: Update) -> None:
        self.server.receive(update)
        self.received.append((update.client, update.loss))

    def drop(self, client: int, reason: str) -> None:
        self.server.drop(client, reason)

    def go_on(self) -> None:
        if self.tasks:
            return
        try:
            done = self.server.end()
        except FederationError:
            self.received = []
        else:
            self.stepped(done.clients, done.loss, [1 / len(done.clients)] * len(done.clients))
            require(not set(done.clients) & set(done.dropped), "a client counts that was dropped")
        self._begin()

    def _begin(self) -> None:
        self.kept.saved = self.server.state_dict()
        for assignment in self.server.begin():
            self.assign(assignment)


class BufferServer(TaskServer):
    """With a buffer: as many clients as are to train do so at each moment."""

    def __init__(self, kept: Kept, clock: Callable[[], float], made: BufferedServer, together: int) -> None:
        super().__init__(kept, clock)
        self.server, self._together = made, together
        if kept.saved is not None:
            made.load_state_dict(kept.saved)
        self.go_on()

    @property
    def model(self) -> Tensor:
        return next(self.server.model.parameters()).detach()

    def receive(self, update: Update) -> None:
        stale = self.server.steps - update.round
        step = self.server.receive(update)
        self.received.append((update.client, update.loss))
        if step is not None:
            require(step.staleness[-1] == stale, "the staleness is another one")
            scales = [1 / math.sqrt(1 + tau) / self.server.buffer for tau in step.staleness]
            self.stepped(step.clients, step.loss, scales)
            self.kept.saved = self.server.state_dict()

    def drop(self, client: int, reason: str) -> None:
        self.server.drop(client, reason)

    def go_on(self) -> None:
        while len(self.tasks) < self._together:
            self.assign(self.server.start())


class TrustingRounds(RoundServer):
    """Takes an update again of which it has one already."""

    def receive(self, update: Update) -> None:
        opened = self.server._open  # pyright: ignore[reportPrivateUsage]
        assert opened is not None
        opened.rows.pop(update.client, None)
        super().receive(update)


class TrustingBuffer(BufferServer):
    """Does not look of which assignment an update is; a client may have had several of one step."""

    def receive(self, update: Update) -> None:
        serial, _ = self.server._training.get(update.client, (0, 0))  # pyright: ignore[reportPrivateUsage]
        super().receive(update.replace(serial=serial))


# Clients --------------------------------------------------------------------------------------------------------------


class RoundSchedule:
    """One schedule, drawn from a seed."""

    def __init__(self, seed: int, serve: Callable[[RoundSchedule], TaskServer]) -> None:
        draw = self.draw = random.Random(f"rounds {seed}")
        self.network = FaultyNetwork(faults_of(draw, 0.05, down_s=1.5, stopped_s=2.5, until_s=FAULTS_S), seed)
        self.clients = draw.randint(2, 6)
        self.kept, self.trained = Kept(self.clients), 0
        self.quorum, self.sample = draw.randint(1, 2), draw.randint(2, self.clients)
        self.buffer, self.together = draw.randint(1, 4), draw.randint(1, self.clients)
        self.damaged = draw.choice((0.0, 0.1))
        self.terms = self.federated().terms
        self.network.serve(lambda: serve(self))
        for number in range(self.clients):
            self.network.join(number, self._client(number), TaskReply)
        self.network.plan_faults(spared=[self.network.peers[number] for number in range(2)])

    def federated(self) -> Server:
        """A new server of rounds."""
        return Server(
            Drawn(self.clients), self.clients, sample=self.sample, quorum=self.quorum, local=SGD(1.0, steps=1)
        )

    def buffered(self) -> BufferedServer:
        """A new server with a buffer."""
        return BufferedServer(
            Drawn(self.clients), self.clients, buffer=self.buffer, most_stale=4, local=SGD(1.0, steps=1)
        )

    def _client(self, number: int) -> Callable[[FaultyConnections], Iterator[float]]:
        speed_s = 10 ** self.draw.uniform(-0.3, 0.3)

        def main(connections: FaultyConnections) -> Iterator[float]:
            """Wait for a task, do it, and send the update until there is a reply."""
            while True:
                task = yield from replied(connections, Ready(number), Task)
                assert isinstance(task, Task)
                connections.sleep(speed_s * self.draw.uniform(0.5, 1.5))
                given = task.assignment
                is_able = self.draw.random() >= 0.05
                made = Sent(self.update_of(given)) if is_able else Unable(number, given.round, given.serial)
                yield from replied(connections, made, Accepted | Refused)

        return main

    def update_of(self, given: Assignment) -> Update:
        """The update of an assignment, some of them damaged."""
        self.trained += 1
        y = given.model.clone()
        y[given.client] += 1.0
        message = FedAvg().message(Work(given.model, y, 1, self.terms.local, {}, {}))
        wires: dict[str, Tensor] = {}
        for name, vector in message.sent.items():
            wires[name], _ = self.terms.update.send(vector, None, self.terms.key(given.client, given.round, name))
        kind = self.draw.choice(("model", "bytes", "nan")) if self.draw.random() < self.damaged else ""
        if kind == "bytes":
            wires = {name: wire[:-1] for name, wire in wires.items()}
        if kind == "nan":
            wires = {name: torch.full_like(wire, 255) for name, wire in wires.items()}
        fingerprint = "another" if kind == "model" else self.terms.fingerprint
        head = (given.client, given.round, fingerprint)
        return Update(*head, 1.0, 1, wires, given.buffers, float(self.trained), given.serial)

    @property
    def counts(self) -> Counter[str]:
        """What happened."""
        return self.network.happened + Counter(
            steps=self.kept.steps,
            updates=self.trained,
            counted=len(self.kept.counted),
            lives=sum(one.lives for one in self.network.processes),
        )

    def run(self) -> None:
        """Run until nothing fails any more, and then for three steps.

        Raises:
            Broken: a promise was.
        """
        faults = self.network.faults
        self.network.run(faults.until_s + max(faults.down_s, faults.stopped_s))
        wanted = self.kept.steps + 3
        self.network.run(END_S, until=lambda: self.kept.steps >= wanted)
        require(self.kept.steps >= wanted, "there are no more rounds")


def replied(connections: FaultyConnections, request: ClientRequest, kind: Any) -> Iterator[Any]:
    """Ask until there is a reply of that kind to it, which is returned; another second asks again."""
    connections.ask(0, request)
    asked_s = connections.now_s()
    while True:
        yield AGAIN_S
        while (arrived := connections.wait(0.0)) is not None:
            if arrived.request is request and isinstance(arrived.reply, kind):
                return arrived.reply
            if _is_missed(arrived, request):
                connections.sleep(0.1)
                connections.ask(0, request)
        if connections.now_s() - asked_s >= AGAIN_S:
            connections.ask(0, request)
            asked_s = connections.now_s()


def _is_missed(arrived: Arrived, request: ClientRequest) -> bool:
    return arrived.request is request and arrived.error is not None


def rounds_of(schedule: RoundSchedule, kind: type[RoundServer] = RoundServer) -> RoundServer:
    """The server of a schedule in rounds."""
    return kind(schedule.kept, lambda: schedule.network.now_s, schedule.federated())


def buffer_of(schedule: RoundSchedule, kind: type[BufferServer] = BufferServer) -> BufferServer:
    """The server of a schedule with a buffer."""
    return kind(schedule.kept, lambda: schedule.network.now_s, schedule.buffered(), schedule.together)


def check(seed: int, serve: Callable[[RoundSchedule], TaskServer]) -> RoundSchedule:
    """Run a schedule.

    Raises:
        Broken: it breaks a promise.
    """
    return checked(RoundSchedule, seed, serve)


def check_rounds(seed: int) -> RoundSchedule:
    """Run a schedule in rounds."""
    return check(seed, rounds_of)


def check_buffered(seed: int) -> RoundSchedule:
    """Run a schedule with a buffer."""
    return check(seed, buffer_of)
