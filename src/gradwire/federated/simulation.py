"""A federation on one machine: rounds of a server with clients that an engine trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.core.key import Key
from gradwire.core.saved_schema import tensors_like
from gradwire.federated.buffered import BufferedServer, BufferedStep
from gradwire.federated.client import Assignment, Done, Federation, Kept
from gradwire.federated.engines import ClientEngine, ClientJob, InProcess, Lost, Outcome
from gradwire.federated.sampling import generator
from gradwire.federated.server import Round, Server


@dataclass(frozen=True)
class Conditions:
    """What goes wrong with clients, drawn anew for each client and round.

    Args:
        drop: the probability that a client is lost after it got the model, in [0, 1].
        slow: the probability that it is a straggler, in [0, 1].
        least: the share of its local steps that a straggler makes at least, in (0, 1]; at most it makes all.

    Raises:
        CompositionError: a number out of range.
    """

    drop: float = 0.0
    slow: float = 0.0
    least: float = 0.1

    def __post_init__(self) -> None:
        for name in ("drop", "slow"):
            if not 0 <= getattr(self, name) <= 1:
                raise CompositionError(f"{name}={getattr(self, name)}: a probability lies in [0, 1]")
        if not 0 < self.least <= 1:
            raise CompositionError(f"least={self.least}: a straggler makes a share in (0, 1] of its steps")

    def share(self, key: Key) -> float:
        """The share of its steps that the client of a key comes to; 0 where it is lost."""
        if not (self.drop or self.slow):
            return 1.0
        lost, slow, share = generator(key).random(3).tolist()
        if lost < self.drop:
            return 0.0
        return self.least + (1 - self.least) * share if slow < self.slow else 1.0


def take_up(
    server: Server | BufferedServer, outcome: Outcome, kept: dict[int, Kept]
) -> tuple[BufferedStep | None, str]:
    """Return the step that a server makes of an outcome, if any, and why the outcome does not count, "" where it does.

    Where it counts, what its client keeps is noted in `kept`; where it does not, the client is dropped.
    """
    if isinstance(outcome, Done):
        try:
            step = server.receive(outcome.update)
        except FederationError as error:
            outcome = Lost(outcome.update.client, str(error))
        else:
            if outcome.kept:
                kept[outcome.update.client] = outcome.kept
            return step, ""
    server.drop(outcome.client, outcome.reason)
    return None, outcome.reason


class Simulation:
    """Runs rounds. What clients keep is held here, for those alone that ever took part.

    With `FedAvg`, `FedProx` and `FedNova` and without error memory clients keep nothing, so memory depends on neither
    the size of the federation nor the number of rounds. SCAFFOLD keeps a vector as long as the model, and error memory
    one (with SCAFFOLD two), for every client that was ever taken up.

    Args:
        server: with its settings.
        federation: as many clients as the server expects.
        engine: where clients train; in this process by default.
        conditions: what goes wrong.

    Raises:
        CompositionError: a federation of another size than the server's.

    >>> import torch
    >>> from gradwire.federated import SGD, Client
    >>> def client(i):
    ...     return Client(1 + i, lambda model, key: (model.weight - i).square().sum())
    >>> server = Server(torch.nn.Linear(1, 1, bias=False), 1000, sample=10, local=SGD(lr=0.1, steps=5))
    >>> simulation = Simulation(server, Federation(1000, client))
    >>> [len(done.clients) for done in simulation.run(3)]
    [10, 10, 10]
    """

    def __init__(
        self,
        server: Server,
        federation: Federation,
        *,
        engine: ClientEngine | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        if federation.clients != server.clients:
            raise CompositionError(
                f"a federation of {federation.clients} clients, and a server of {server.clients}: give both one number"
            )
        self.server, self.federation = server, federation
        self.engine = engine or InProcess(server.model, federation)
        self.conditions = conditions or Conditions()
        self._kept: dict[int, Kept] = {}

    def run(self, rounds: int) -> Iterator[Round]:
        """Make so many rounds; yield each as it ends.

        Raises:
            FederationError: a round below its quorum. Nothing of it was applied, and the next `run` draws anew.
        """
        for _ in range(rounds):
            yield self.round()

    def round(self) -> Round:
        """Make one round.

        Raises:
            FederationError: as `run`.
        """
        tasks = self.server.begin()
        try:
            kept = self._trained(tasks)
        except BaseException:
            self.server.abandon()
            raise
        done = self.server.end()
        self._kept.update(sorted(kept.items()))
        return done

    def _trained(self, tasks: list[Assignment]) -> dict[int, Kept]:
        """Have the clients train and the server receive; return what they will keep if the round holds."""
        kept: dict[int, Kept] = {}
        for outcome in self.engine.run(self.server.terms, self._jobs(tasks)):
            take_up(self.server, outcome, kept)
        return kept

    def _jobs(self, tasks: list[Assignment]) -> list[ClientJob]:
        jobs: list[ClientJob] = []
        for task in tasks:
            share = self.conditions.share(
                Key(self.server.terms.seed, task.round, "federated.weather", rank=task.client)
            )
            if share:
                jobs.append(ClientJob(task, self._kept.get(task.client, Kept()), share))
            else:
                self.server.drop(task.client, f"client {task.client} was lost in round {task.round}")
        return jobs

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next round depends on: the server's state and what clients keep; tensors are copies.

        Raises:
            StateError: a round is open.
        """
        clients = {
            client: {
                "vectors": {name: vector.clone() for name, vector in kept.vectors.items()},
                "memories": {name: memory.state_dict() for name, memory in kept.memories.items()},
            }
            for client, kept in self._kept.items()
        }
        return {"server": self.server.state_dict(), "clients": clients}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            StateError: as `Server.load_state_dict`. Nothing is changed.
        """
        if not isinstance(saved.get("server"), Mapping) or not isinstance(saved.get("clients"), Mapping):
            raise StateError("this is no state of a simulation, which has 'server' and 'clients'")
        kept = {int(client): self._kept_of(own, client) for client, own in saved["clients"].items()}
        self.server.load_state_dict(saved["server"])
        self._kept = kept

    def _kept_of(self, saved: Mapping[str, Any], client: object) -> Kept:
        if not isinstance(saved, Mapping) or set(saved) != {"vectors", "memories"}:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise StateError(f"the saved state of client {client} is none of a simulation's")
        like = self.server.shared if saved["vectors"] else {}
        vectors = tensors_like(saved["vectors"], like, f"client {client}")
        memories = {name: ErrorMemory.from_state_dict(memory) for name, memory in saved["memories"].items()}
        return Kept(vectors, memories)
