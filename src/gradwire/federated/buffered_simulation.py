"""FedBuff on one machine: clients that train at once, on a clock that is computed and not waited for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gradwire.core.errors import CompositionError, FederationError
from gradwire.core.key import Key
from gradwire.federated.buffered import BufferedServer, BufferedStep
from gradwire.federated.client import Federation, Kept
from gradwire.federated.engines import ClientJob, LocalTrainer, Lost, Outcome
from gradwire.federated.sampling import generator
from gradwire.federated.simulation import Conditions, take_up
from gradwire.peers.clock import EventClock

MOST_LOST = 100
"""Clients lost in a row, for each that trains at once, after which a simulation is given up."""

Duration = Callable[[int, Key], float]


def exponential(client: int, key: Key) -> float:
    """Seconds that a client takes: exponential with mean 1."""
    return float(generator(key).exponential())


class BufferedSimulation:
    """Clients that train at once, on a clock that is computed and not waited for.

    A client's update is computed when it starts and arrives when its time is over, so memory is that of the updates
    that are under way. The same settings give the same run.

    Args:
        server: with its settings.
        federation: as many clients as the server expects.
        concurrency: how many clients train at once.
        duration: seconds that a client takes, `duration(client, key)`; draw from the key alone.
        conditions: what goes wrong with clients.

    Raises:
        CompositionError: a federation of another size, or a concurrency beyond it; with a private mean one beyond
            those whose updates do not wait in the buffer.

    >>> import torch
    >>> from gradwire.federated import SGD, Client
    >>> def client(i):
    ...     return Client(1, lambda model, key: (model.weight - i).square().sum())
    >>> server = BufferedServer(torch.nn.Linear(1, 1, bias=False), 1000, buffer=4, local=SGD(lr=0.1, steps=5))
    >>> simulation = BufferedSimulation(server, Federation(1000, client), concurrency=8)
    >>> [step.number for step in simulation.run(3)]
    [0, 1, 2]
    """

    def __init__(
        self,
        server: BufferedServer,
        federation: Federation,
        *,
        concurrency: int,
        duration: Duration = exponential,
        conditions: Conditions | None = None,
    ) -> None:
        if federation.clients != server.clients or not 1 <= concurrency <= server.clients:
            raise CompositionError(
                f"a federation of {federation.clients} clients, a server of {server.clients} and {concurrency} clients "
                "at once: give both one number, and train no more at once than that"
            )
        if server.private and concurrency + server.buffer > server.clients + 1:
            raise CompositionError(
                f"{concurrency} clients at once and a buffer of {server.buffer} of a federation of {server.clients}: "
                "with a private mean those whose updates wait begin nothing, so have fewer at once, or a smaller buffer"
            )
        self.server, self.concurrency = server, concurrency
        self._duration, self._conditions = duration, conditions or Conditions()
        self._trainer = LocalTrainer(server.model, federation)
        self._kept: dict[int, Kept] = {}
        self._arrivals = EventClock[Outcome]()
        self._started = 0

    @property
    def now_s(self) -> float:
        """Simulated seconds since the beginning."""
        return self._arrivals.now_s

    def run(self, steps: int) -> Iterator[BufferedStep]:
        """Go on until the server has made so many steps more; yield each.

        Raises:
            FederationError: so many clients in a row were lost that there is no going on.
        """
        lost = 0
        while steps > 0:
            while len(self._arrivals) < self.concurrency:
                self._start()
            step, reason = take_up(self.server, self._arrivals.next_event(), self._kept)
            lost = lost + 1 if reason else 0
            if lost >= MOST_LOST * self.concurrency:
                raise FederationError(f"{lost} clients in a row were lost, the last one since {reason}")
            if step is not None:
                steps -= 1
                yield step

    def _start(self) -> None:
        task = self.server.start()
        self._started += 1
        key = Key(self.server.terms.seed, self._started, "federated.weather", rank=task.client)
        share = self._conditions.share(key)
        takes_s = self._duration(task.client, key.with_(stage="duration"))
        if not 0 <= takes_s < math.inf:
            raise FederationError(f"client {task.client} would take {takes_s} s: give a duration of 0 or more")
        if share:
            outcome = self._trainer.do(self.server.terms, ClientJob(task, self._kept.get(task.client, Kept()), share))
        else:
            outcome = Lost(task.client, f"client {task.client} was lost")
        self._arrivals.plan(self.now_s + takes_s, outcome)
