"""Flower without a network: nodes in this process, joined by a grid whose messages are lost, late or wrong as told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from federations import Classifier, small_model
from gradwire.adapters.flower import FederatedStrategy, client_app
from gradwire.adapters.flower.content import MESSAGE, NodeAnswer, read, written
from gradwire.federated import SGD, Federation, Server

FIRST = 1000
"""The number of the node that is client 0."""
Fault = Callable[[int, Message, Message | None], list[Message]]
"""What arrives instead of a reply: by node, the message and its reply (None for one that was lost on the way)."""


def context(node: int, config: dict[str, Any] | None = None) -> Context:
    """What Flower holds for a node in a run."""
    own = UserConfig({"partition-id": node - FIRST, "num-partitions": 12}) if config is None else UserConfig(config)
    return Context(run_id=1, node_id=node, node_config=own, state=RecordDict(), run_config=UserConfig())


def sent(content: RecordDict) -> RecordDict:
    """What arrives of a message: the bytes of its protobuf are all that is left of it."""
    return recorddict_from_proto(ProtoRecordDict.FromString(recorddict_to_proto(content).SerializeToString()))


class LocalGrid(Grid):
    """Has ClientApps answer at once. `fault` sees every reply to a training message."""

    def __init__(self, app: ClientApp, nodes: Iterable[int]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as a ServerApp's process has them
        self.app = app
        self.contexts = {node: context(node) for node in nodes}
        self.fault: Fault = lambda node, message, reply: [reply] if reply else []
        self._replies: list[Message] = []
        self._numbers = itertools.count()

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *given: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        name = f"message {next(self._numbers)}"
        vars(message.metadata)["_message_id"] = name
        node = message.metadata.dst_node_id
        reply = self._answer(node, message)
        trains = message.metadata.message_type == "train"
        self._replies += self.fault(node, message, reply) if trains else [reply]
        return name

    def _answer(self, node: int, message: Message) -> Message:
        arrived = Message(sent(message.content), reply_to=message)
        vars(arrived)["_metadata"] = message.metadata
        try:
            reply = self.app(arrived, self.contexts[node])
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        reply.content = sent(reply.content)
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found, self._replies = self._replies, []
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def on_flower(
    clients: int = 12, federation: Federation | None = None, **settings: Any
) -> tuple[FederatedStrategy, LocalGrid]:
    """What `federations.on_classifier` is, on Flower."""
    settings = {"sample": 4, "local": SGD(lr=0.1, steps=5), "seed": 5, **settings}
    both = {name: settings[name] for name in ("local", "method", "update") if name in settings}
    app = client_app(small_model, federation or Federation(clients, Classifier(clients)), **both)
    strategy = FederatedStrategy(Server(small_model(), clients, **settings), wait_s=0.3)
    return strategy, LocalGrid(app, range(FIRST, FIRST + clients))


def altered(reply: Message, change: Callable[[NodeAnswer], NodeAnswer]) -> Message:
    """A reply with another answer."""
    answer: NodeAnswer = read(reply.content, MESSAGE, NodeAnswer, "a reply")
    reply.content[MESSAGE] = written(change(answer))
    return reply
