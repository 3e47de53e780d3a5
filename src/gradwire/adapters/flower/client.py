"""The client's side on Flower: a ClientApp that trains what a `FederatedStrategy` asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from gradwire.adapters.flower.content import (
    MESSAGE,
    ROUND,
    WHO,
    NodeAnswer,
    NodeIdentity,
    Order,
    RoundOrder,
    read,
    settings_of,
    written,
)
from gradwire.adapters.flower.memory import propose, recall
from gradwire.core.errors import FederationError, GradwireError
from gradwire.core.record import Record
from gradwire.federated.client import Client, Done, Federation, Kept, Terms
from gradwire.federated.engines import ClientJob, LocalTrainer, Lost, Outcome
from gradwire.federated.local import SGD
from gradwire.federated.methods import FedAvg, FederatedMethod
from gradwire.sending import Sending

Number = Callable[[Context], int]


def partition_id(context: Context) -> int:
    """Return which client a node is: the `partition-id` of its configuration.

    Raises:
        FederationError: it has none, or one that is no whole number of 0 or more.
    """
    found = context.node_config.get("partition-id")
    try:
        number = int(found) if isinstance(found, int | str) else -1
    except ValueError:
        number = -1
    if number < 0:
        raise FederationError(
            f"a node with partition-id {found!r} does not know which client it is: start it by "
            "flower-supernode --node-config 'partition-id=0', with a number from 0 of its own"
        )
    return number


@dataclass(frozen=True)
class _Node:
    """What a node does with messages. It holds nothing between them: Flower's state does."""

    model: Callable[[], nn.Module]
    clients: Federation | Callable[[Context], Client]
    local: SGD
    method: FederatedMethod
    update: Sending
    number: Number

    def who(self, message: Message, context: Context) -> Message:
        """Answer which client this is."""
        try:
            return _reply(message, NodeIdentity(self.number(context)))
        except GradwireError as error:
            return _reply(message, Lost(0, str(error)))

    def train(self, message: Message, context: Context) -> Message:
        """Do what an order asks for, and answer with an update or with why there is none."""
        token = ""
        try:
            round_order: RoundOrder = read(message.content, ROUND, RoundOrder, "an order")
            token = round_order.token
            order: Order = read(message.content, MESSAGE, Order, "an order")
            return _reply(message, self._answer(order, round_order, context))
        except GradwireError as error:
            return _reply(message, NodeAnswer(token, Lost(0, str(error))))

    def _answer(self, order: Order, round_order: RoundOrder, context: Context) -> NodeAnswer:
        """Train; what the client keeps of it stays in the node's state and is in no answer."""
        client, task = order.client, round_order.task.replace(client=order.client)
        if client != self.number(context):
            raise FederationError(f"an order for client {client} came to client {self.number(context)}")
        trainer = LocalTrainer(self.model(), self._federation(context, client))
        terms = Terms(self.method, self.local, self.update, int(round_order.seed), trainer.fingerprint)
        _require_agreement(terms, round_order, client)
        kept = recall(context.state, order.taken)
        if kept is None and task.shared:
            raise FederationError(
                f"client {client} has lost what it kept in round {order.taken}, which {self.method} cannot do "
                "without: begin a new federation"
            )
        outcome: Outcome = trainer.do(terms, ClientJob(task, kept or Kept()))
        if isinstance(outcome, Done):
            propose(context.state, task.round, outcome.kept)
            outcome = outcome.replace(kept=Kept())
        return NodeAnswer(round_order.token, outcome, forgot=kept is None and self.update.decay is not None)

    def _federation(self, context: Context, client: int) -> Federation:
        if isinstance(self.clients, Federation):
            if client >= self.clients.clients:
                raise FederationError(f"client {client} is none of this federation's {self.clients.clients}")
            return self.clients
        own = self.clients
        return Federation(client + 1, lambda _: own(context))


def _reply(message: Message, record: Record) -> Message:
    return Message(RecordDict({MESSAGE: written(record)}), reply_to=message)


def _require_agreement(terms: Terms, round_order: RoundOrder, client: int) -> None:
    for name, here in settings_of(terms).items():
        there = round_order.settings.get(name)
        if there != here:
            raise FederationError(
                f"the server has {name} {there} and client {client} has {here}: give both the same settings"
            )


def client_app(
    model: Callable[[], nn.Module],
    clients: Federation | Callable[[Context], Client],
    *,
    local: SGD,
    method: FederatedMethod | None = None,
    update: str | Sending = "none",
    number: Number = partition_id,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return a ClientApp that trains by `gradwire.federated.train`, for a `FederatedStrategy`.

    What a client keeps (error memory, a control variate) lies in the state that Flower holds for its node, in two
    versions: an update that was refused or lost, or whose round was given up, costs nothing of it. Flower gives a node
    new state in every run. Where a run goes on from a saved server, error memory therefore begins anew, which the
    strategy warns of, and clients with control variates refuse to go on.

    Args:
        model: makes a model with the structure of the server's.
        clients: all clients by number; or what makes this node's own one, where a node has no other's data.
        local, method, update: as the `Server` has them. The strategy sends along what it has, and clients that have
            something else take no part.
        number: which client a node is; its `partition-id` by default.
        mods: of Flower, around the training.

    Raises:
        SpecError, CompositionError: an `update` that cannot be read.

    >>> import torch
    >>> app = client_app(lambda: torch.nn.Linear(1, 1), Federation(2, lambda i: Client(1, loss)), local=SGD(lr=0.1))
    >>> type(app).__name__
    'ClientApp'
    """
    node = _Node(model, clients, local, method or FedAvg(), Sending.of(update), number)
    app = ClientApp()
    app.train(mods=list(mods))(node.train)
    app.query(WHO.partition(".")[2])(node.who)
    return app
