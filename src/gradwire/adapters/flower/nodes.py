"""Which of Flower's nodes is which client, learned from the nodes themselves."""

from __future__ import annotations

import logging
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from gradwire.adapters.flower.content import MESSAGE, WHO, NodeIdentity, plain, read
from gradwire.core.errors import FederationError
from gradwire.federated.engines import Lost

LOG = logging.getLogger("flwr")
_LOOK_S = 0.1
"""Between two looks at who is here, while too few are."""


class Nodes:
    """Asks each node once, and waits for no single one of them.

    Where several nodes claim to be one client, it is the one that answered first, for as long as it is connected.
    Whether a node may claim what it claims is for Flower's authentication of nodes to say.

    Args:
        clients: of the federation.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._asked: set[int] = set()
        self._questions: set[str] = set()  # ids of messages without an answer
        self._claims: dict[int, int] = {}  # client by node, in the order of answers
        self._node: dict[int, int] = {}  # node by client, of those that are connected

    def node_of(self, client: int) -> int | None:
        """The node that is a client, None where none is here."""
        return self._node.get(client)

    def wait(self, grid: Grid, count: int, seconds: float) -> None:
        """Look around until so many clients are here, or for so long."""
        end = time.monotonic() + seconds
        self.refresh(grid)
        while len(self._node) < count and time.monotonic() < end:
            time.sleep(_LOOK_S)
            self.refresh(grid)
        if len(self._node) < count:
            LOG.warning("after %g s %d of %d clients are here: the run goes on", seconds, len(self._node), count)

    def refresh(self, grid: Grid) -> None:
        """Ask who has come, take the answers that are here, and forget who has gone."""
        here = set(grid.get_node_ids())
        new = sorted(here - self._asked)
        self._asked |= set(new)
        if new:
            self._questions |= set(grid.push_messages([Message(RecordDict(), node, WHO) for node in new]))
        for reply in list(grid.pull_messages(self._questions)) if self._questions else []:
            self._questions.discard(reply.metadata.reply_to_message_id)
            self._note(reply)
        self._node = {}
        for node, client in self._claims.items():
            if node in here:
                self._node.setdefault(client, node)

    def _note(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        try:
            client = self._client_in(reply)
        except FederationError as error:
            LOG.warning("node %d takes no part: %s", node, error)
            return
        if client in self._claims.values():
            LOG.warning("node %d says that it is client %d, as another node did before", node, client)
        self._claims.setdefault(node, client)

    def _client_in(self, reply: Message) -> int:
        if reply.has_error():
            raise FederationError(f"it failed: {plain(reply.error.reason)}")
        member: NodeIdentity | Lost = read(reply.content, MESSAGE, NodeIdentity | Lost, "its answer")
        if isinstance(member, Lost):
            raise FederationError(plain(member.reason))
        if member.client >= self._clients:
            raise FederationError(f"it says that it is client {member.client} of a federation of {self._clients}")
        return member.client
