"""The server's side on Flower: a strategy that is a `Server` of ours between Flower's messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from gradwire.adapters.flower.content import (
    MESSAGE,
    ROUND,
    NodeAnswer,
    Order,
    RoundOrder,
    plain,
    read,
    settings_of,
    written,
)
from gradwire.adapters.flower.nodes import LOG, Nodes
from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.federated.engines import Lost, Outcome
from gradwire.federated.server import Round, Server
from gradwire.federated.simulation import take_up


class FederatedStrategy(Strategy):
    """Runs the rounds of a `Server` on Flower's nodes, with the results that `Simulation` has in one process.

    A round begins with the clients that the server draws. Those of which no node is here, whose node fails, answers
    with something else or does not answer in time are dropped, with the reason; an answer counts once, and only to the
    message of this round and from the node that was asked. A round below its quorum is given up: nothing of it is
    applied and the run goes on with the next one.

    Args:
        server: with its settings; `client_app` gets the same.
        nodes: clients that have to be here before the first round; all by default.
        wait_s: how long to wait for them. Then the run goes on with those that are here.

    Attributes:
        server: as given.
        rounds: what became of the rounds that held.
        given_up: why others did not.

    Raises:
        CompositionError: more nodes than the server has clients, or less than one.

    Example:
        ```python
        @app.main()
        def main(grid, context):
            strategy = FederatedStrategy(Server(model(), clients=10, sample=5, local=SGD(lr=0.1)))
            result = strategy.start(grid, num_rounds=20)
            model = strategy.server.model
        ```
    """

    def __init__(self, server: Server, *, nodes: int | None = None, wait_s: float = 600.0) -> None:
        self.server = server
        self.rounds: list[Round] = []
        self.given_up: list[str] = []
        self._expected = server.clients if nodes is None else nodes
        if not 1 <= self._expected <= server.clients:
            raise CompositionError(f"{nodes} nodes for {server.clients} clients: wait for 1 to {server.clients}")
        self._wait_s = wait_s
        self._nodes = Nodes(server.clients)
        self._taken: dict[int, int] = {}  # by client, the last round whose update was taken up
        self._token = ""
        self._asked: dict[int, int] = {}  # client by node, of the open round

    def arrays(self) -> ArrayRecord:
        """The global model as Flower has models: a state dict."""
        return ArrayRecord(dict(self.server.model.state_dict()))

    def summary(self) -> None:
        """Log what clients and server agree on."""
        for name, text in settings_of(self.server.terms).items():
            LOG.info("\t├── %s: %s", name, text)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Make rounds as Flower's strategies do; `server` goes on from where it is.

        Args:
            grid: of the ServerApp.
            initial_arrays: leave it out; the model is the server's, and arrays that differ from it are refused.
            num_rounds: how many, those that are given up included.
            timeout: seconds that the clients of a round may take.
            train_config: goes along with each message, for Flower's mods.
            evaluate_config, evaluate_fn: as Flower has them.

        Raises:
            FederationError: arrays of another model.
        """
        arrays = self.arrays()
        if initial_arrays is not None and dict(initial_arrays) != dict(arrays):
            raise FederationError("initial_arrays are not the server's model: leave them out, or make Server with them")
        return super().start(grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    # One round ---------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round and return a message for each drawn client whose node is here.

        A round that this strategy has begun and not ended, since Flower stopped it, is given up first.
        """
        if self._token:
            self.server.abandon()
        self._nodes.wait(grid, self._expected, self._wait_s)
        self._expected = 0  # from the second round on, with whoever is here
        tasks = self.server.begin()
        self._token, self._asked = secrets.token_hex(8), {}
        messages: list[Message] = []
        round_order = ArrayRecord()
        for task in tasks:
            node = self._nodes.node_of(task.client)
            if node is None:
                self.server.drop(task.client, f"client {task.client} has no node that is connected")
                continue
            self._asked[node] = task.client
            if not round_order:  # the same bytes go to all
                terms = self.server.terms
                round_order = written(
                    RoundOrder(task.replace(client=0), self._token, str(terms.seed), settings_of(terms))
                )
            order = written(Order(task.client, self._taken.get(task.client)))
            content = RecordDict({"config": config, MESSAGE: order, ROUND: round_order})
            messages.append(Message(content, node, MessageType.TRAIN, group_id=str(server_round)))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End the round with the replies that are good; nothing where it is given up."""
        answered = {self._take(reply) for reply in replies}
        for client in self._asked.values():
            if client not in answered:
                self.server.drop(client, f"client {client} did not answer in time")
        self._token = ""
        try:
            done = self.server.end()
        except FederationError as error:
            LOG.warning("round %d is given up: %s", server_round, error)
            self.given_up.append(str(error))
            return None, None
        self._taken.update(dict.fromkeys(done.clients, done.number))
        self.rounds.append(done)
        for client, reason in done.dropped.items():
            LOG.warning("round %d without client %d: %s", server_round, client, reason)
        return self.arrays(), _metrics(done)

    def _take(self, reply: Message) -> int | None:
        """Have the server receive an update; return whose reply it was."""
        node = reply.metadata.src_node_id
        client = self._asked.get(node)
        if client is None:
            LOG.warning("node %d was not asked in this round: its reply is left out", node)
            return None
        try:
            outcome = self._outcome(reply, client)
        except FederationError as error:
            outcome = Lost(client, str(error))
        take_up(self.server, outcome, {})  # what clients keep is theirs
        return client

    def _outcome(self, reply: Message, client: int) -> Outcome:
        """What a reply brings of the client that was asked."""
        if reply.has_error():
            raise FederationError(f"client {client}'s node failed: {plain(reply.error.reason)}")
        answer: NodeAnswer = read(reply.content, MESSAGE, NodeAnswer, f"client {client}'s answer")
        outcome = answer.outcome
        if isinstance(outcome, Lost):
            return Lost(client, plain(outcome.reason))
        if answer.token != self._token:
            raise FederationError(f"client {client} answers to a message of another round: it is left out")
        if outcome.update.client != client:
            raise FederationError(f"client {client} sends an update as client {outcome.update.client}: it is left out")
        if answer.forgot:
            LOG.warning("client %d has lost what it owed the server: it begins anew", client)
        return outcome

    # What this strategy leaves out -------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: clients do not evaluate. `start(evaluate_fn=...)` evaluates at the server."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing is aggregated of evaluations."""
        return None

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The server's state, and whose updates were taken up; what clients keep is theirs.

        Raises:
            StateError: a round is open.
        """
        return {"server": self.server.state_dict(), "taken": dict(self._taken)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            StateError: as `Server.load_state_dict`. Nothing is changed.
        """
        server, taken = saved.get("server"), saved.get("taken")
        if not isinstance(server, Mapping) or not isinstance(taken, Mapping):
            raise StateError("this is no state of a strategy, which has 'server' and 'taken'")
        found = {int(client): int(number) for client, number in taken.items()}
        self.server.load_state_dict(server)
        self._taken = found


def _metrics(done: Round) -> MetricRecord:
    return MetricRecord(
        {
            "loss": float(done.loss),
            "clients": len(done.clients),
            "dropped": len(done.dropped),
            "sent-bytes": sum(done.sent_bytes.values()),
            "received-bytes": sum(done.received_bytes.values()),
        }
    )
