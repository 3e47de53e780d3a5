"""FedBuff: no rounds. Clients come and go, and the server makes a step whenever so many updates are here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor, nn

from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.core.key import Key
from gradwire.core.saved_schema import part_of
from gradwire.federated.aggregation import require_rows
from gradwire.federated.checks import DecodedUpdate
from gradwire.federated.client import Assignment, Update
from gradwire.federated.global_model import GlobalModel, HasModel, ModelSettings, pairs_of
from gradwire.federated.sampling import generator
from gradwire.reducers.aggregate import epsilon_of_replacing


@dataclass(frozen=True)
class BufferedStep:
    """A step of the server.

    Attributes:
        number: from 0.
        clients: whose updates it was made of, in the order in which they came.
        staleness: how many steps the server had made while each of them trained.
        dropped: why clients sent nothing that counted since the last step, by client.
        loss: the mean training loss of the local steps.
        sent_bytes: from these clients to the server.
        received_bytes: from the server to all clients that began since the last step.
    """

    number: int
    clients: tuple[int, ...]
    staleness: tuple[int, ...]
    dropped: Mapping[int, str]
    loss: float
    sent_bytes: int
    received_bytes: int


@dataclass
class _Buffer:
    """What has come since the last step."""

    clients: list[int] = field(default_factory=list[int])
    rows: list[DecodedUpdate] = field(default_factory=list[DecodedUpdate])
    staleness: list[int] = field(default_factory=list[int])
    dropped: dict[int, str] = field(default_factory=dict[int, str])
    received_bytes: int = 0


class BufferedServer(HasModel):
    """A server that waits for K updates and for no client (Nguyen et al. 2022, Algorithm 1, FedBuff).

        x += lr 1/K sum_i s(tau_i) (y_i - x_i),    s(tau) = 1 / sqrt(1 + tau)

    x_i is the model that client i began with, tau_i the steps that the server has made since. Clients count alike but
    for s. Any `ServerStep` may stand for the plain one, and any method without vectors of its own for `FedAvg`.

        task = server.start()           # as many at once as you like
        step = server.receive(update)   # a Step where it was the K-th update, else None

    Algorithm 1 has no s; it is the paper's scaling by staleness, which its experiments use. Here it is always on. A
    client that trains is not drawn a second time, and where the paper's clients turn up by themselves, `start` draws
    one. A rule (`aggregate=`) sees updates that are scaled already, so a private mean clips s(tau_i) (y_i - x_i).

    Running statistics move towards what a client has of them, by the same factor. Each assignment has a serial, so an
    update counts once, also where it comes again after its client was drawn again.

    Args:
        model: the global model begins as a copy of it.
        clients: how many there are.
        buffer: K.
        most_stale: staleness beyond which an update is refused; None for none.
        **settings: `local`, `method`, `optimizer`, `update`, `broadcast`, `aggregate` and `seed`, as for `Server`.

    Raises:
        CompositionError, SpecError: as `Server`; a method that shares vectors, such as SCAFFOLD.

    References:
        Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek & Huba 2022, "Federated learning with buffered asynchronous
        aggregation".
    """

    def __init__(
        self,
        model: nn.Module,
        clients: int,
        *,
        buffer: int,
        most_stale: int | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        if buffer < 1 or clients < 1 or (most_stale is not None and most_stale < 0):
            raise CompositionError(
                f"a buffer of {buffer} updates of {clients} clients, most_stale={most_stale}: give positive numbers"
            )
        self.clients, self.buffer, self.most_stale = clients, buffer, most_stale
        super().__init__(GlobalModel(model, **settings))
        require_rows(self._global.aggregation, buffer)
        if self._global.shared:
            raise CompositionError(f"{self.terms.method} shares more than the model, which needs rounds: take Server")
        self.steps, self._started = 0, 0
        self._training: dict[int, tuple[int, int]] = {}  # client: serial of its assignment, and steps made by then
        self._waiting = _Buffer()
        self._used: Counter[int] = Counter()
        self._uncounted = 0

    def start(self) -> Assignment:
        """Draw a client that is not training, uniformly; its update is one of round `steps`, as it is now.

        With a private mean nobody starts again before the step that has the last update, so that no client is in one
        step twice.

        Raises:
            FederationError: all clients are training, or wait for that step.
        """
        busy = self._training.keys() | (self._waiting.clients if self.private else [])
        if len(busy) >= self.clients:
            waiting = " or wait for the next step" if len(busy) > len(self._training) else ""
            raise FederationError(f"all {self.clients} clients are training{waiting}: receive or drop one first")
        draw = generator(Key(self.terms.seed, self._started, "federated.start"))
        client = int(draw.integers(self.clients))
        while client in busy:
            client = int(draw.integers(self.clients))
        self._started += 1
        self._training[client] = (self._started, self.steps)
        self._waiting.received_bytes += self._global.bytes_to(client)
        self._global.broadcast.met(client)
        return self._global.assignments([client], self.steps)[0].replace(serial=self._started)

    def receive(self, update: Update) -> BufferedStep | None:
        """Take an update in; make a step where the buffer is full.

        Raises:
            FederationError: an update of a client that is not training or of another assignment than its last, one
                that is too stale, or a bad one as for `Server.receive`. It changes nothing. A mean that is not finite
                empties the buffer and changes nothing else.
        """
        if self._training.get(update.client) != (update.serial, update.round):
            raise FederationError(
                f"client {update.client} sends an update of step {update.round}, which nobody waits for: it is left out"
            )
        stale = self.steps - update.round
        if self.most_stale is not None and stale > self.most_stale:
            raise FederationError(
                f"client {update.client}'s update is {stale} steps old, and {self.most_stale} may be: it is left out"
            )
        rows = _scaled(self._global.rows_of(update), 1 / math.sqrt(1 + stale))
        del self._training[update.client]
        self._waiting.clients.append(update.client)
        self._waiting.rows.append(rows)
        self._waiting.staleness.append(stale)
        return self._step() if len(self._waiting.rows) == self.buffer else None

    def drop(self, client: int, reason: str) -> None:
        """Wait for a client no longer."""
        if self._training.pop(client, None) is not None:
            self._waiting.dropped[client] = reason

    def _step(self) -> BufferedStep:
        full, self._waiting = self._waiting, _Buffer()
        shares = [1 / self.buffer] * self.buffer
        self._global.step(full.rows, shares, self.buffer / self.clients, self.buffer)
        self.steps += 1
        if self.private:
            self._used.update(full.clients)
        return BufferedStep(
            number=self.steps - 1,
            clients=tuple(full.clients),
            staleness=tuple(full.staleness),
            dropped=full.dropped,
            loss=sum(row.loss for row in full.rows) / self.buffer,
            sent_bytes=sum(row.nbytes for row in full.rows),
            received_bytes=full.received_bytes,
        )

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the steps made so far: their models are (epsilon, delta)-private for each client.

        What cannot be told apart are two federations in which one client is another one and all else is alike, also
        which clients begin and when their updates come: data must have no part in that. A step always is of K updates,
        with one of a client at most, so that the mean moves by 2 clip / K. Steps count in which the client took part
        that took part in most. FedBuff draws nobody from all, so sampling gains nothing. Clients that are there in one
        federation alone can be told apart, since without one update all later ones fall into other buffers.

        Args:
            delta: well below 1 / clients.

        Raises:
            CompositionError: no private mean, dp-accounting is not installed, or a delta outside of (0, 1).
        """
        steps = self._uncounted + max(self._used.values(), default=0)
        return epsilon_of_replacing(self._noise(), steps, delta)

    def _settings(self) -> dict[str, object]:
        return {"clients": self.clients, "buffer": self.buffer, "most_stale": self.most_stale}

    def state_dict(self) -> dict[str, Any]:
        """All that the server knows after a step. Clients that are training are not in it: they will start anew.

        Raises:
            StateError: updates wait in the buffer.
        """
        if self._waiting.rows:
            raise StateError(f"{len(self._waiting.rows)} updates wait in the buffer: save after a step")
        saved = self._global.state_dict(self._settings(), {"steps": self.steps, "started": self._started})
        if self.private:
            saved |= {"used": [list(pair) for pair in self._used.items()], "uncounted": self._uncounted}
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, with nobody training.

        Raises:
            StateError: as `Server.load_state_dict`. Nothing is changed.
        """
        used, uncounted = self._saved_use(saved)
        self._global.load_state_dict(saved, self._settings(), ("steps", "started"))
        self.steps, self._started = saved["steps"], saved["started"]
        self._used, self._uncounted = used, uncounted
        self._training, self._waiting = {}, _Buffer()

    def _saved_use(self, saved: Mapping[str, Any]) -> tuple[Counter[int], int]:
        if not self.private:
            return Counter(), 0
        if "used" not in saved:
            # Older versions did not count. There a client could fill a whole buffer, and so move its mean by 2 clip,
            # K times as far as in a step of today, which costs as much as K^2 of these steps.
            return Counter(), int(saved.get("steps", 0)) * self.buffer**2
        return Counter(dict(pairs_of(saved, "used"))), part_of(saved, "uncounted", int)


def _scaled(rows: DecodedUpdate, factor: float) -> DecodedUpdate:
    vectors: dict[str, Tensor] = {name: vector * factor for name, vector in rows.vectors.items()}
    return rows._replace(vectors=vectors, buffers=rows.buffers * factor)
