"""What a protocol object is, and what every carrier does with its requests and replies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from gradwire.core.record import Record, pieces, unpack

ANY_LENGTH = 1 << 62
"""As the longest record, for those whose peers are trusted to allocate what they need."""

Reply = Callable[[Record], None]
"""Takes the reply to one request; called once, in any later call of the protocol object."""

Parts = Sequence[bytes | memoryview]
"""The bytes of a record in pieces, so that tensors need not be copied to be sent."""


class Served(ABC):
    """A protocol object: replies to each request once, at once or later, and does no I/O.

    Whoever carries requests calls its methods one after the other, and sends replies in the order in which they come.
    A request may come twice, late, or after its sender was taken for dead; what that means the object decides.

    Attributes:
        requests: the class of its requests, or the union of the classes.
        most_bytes: the longest request, as bytes; longer ones are refused before memory is allocated.
    """

    requests: ClassVar[Any]
    most_bytes: int = 1 << 20

    @abstractmethod
    def ask(self, request: Any, reply: Reply) -> None:
        """Reply to a request, or keep `reply` until there is one."""

    def require_from(self, peer: int, request: Any) -> None:  # noqa: B027 - most objects reply alike to all
        """Refuse what a peer of this number may not ask; called before `ask` where a carrier knows who asks.

        Raises:
            RecordError: it may not. Its connection is ended then, as that of one whose bytes are no request.
        """

    def lost(self, peer: int) -> None:  # noqa: B027 - most objects need not know
        """Hear that the connection of a peer has ended, or that the peer has been silent for too long."""

    def tick(self) -> None:  # noqa: B027
        """Look at the clock: called several times a second by carriers that run by themselves."""


def receive(served: Served, packed: Any, send: Callable[[Parts], None]) -> None:
    """Hand the bytes of a request to a protocol object, which sends the bytes of its reply at once or later.

    Raises:
        RecordError: bytes that are no request of this object.
    """
    served.ask(unpack(packed, served.requests), lambda reply: send(pieces(reply)))


class Arrived(NamedTuple):
    """What has become of a request.

    Attributes:
        server: which one was asked.
        request: as it was asked.
        reply: what the server said; None where it could not be reached, or was lost meanwhile.
        error: why there is no reply; None where there is one.
    """

    server: int
    request: Any
    reply: Any
    error: Exception | None = None


class Connections(ABC):
    """The connections of one peer to its servers, as a carrier makes them.

        connections.ask(server, request)
        arrived = connections.wait(timeout_s)

    One thread asks and waits. A carrier says how bytes are sent (`send`) and how the next ones are received
    (`receive`). What it cannot send, and what was asked of a server that was lost, arrives as an error, and may be
    asked again.

    Args:
        replies: the class of the servers' replies, or the union of the classes.
        servers: how many there are.
    """

    def __init__(self, replies: Any, servers: int) -> None:
        self._replies, self.servers = replies, servers
        self._asked: dict[int, tuple[int, Any]] = {}
        self._arrived: deque[Arrived] = deque()
        self._count = 0

    def ask(self, server: int, request: Any) -> None:
        """Send a request to a server."""
        self._count += 1
        self._asked[self._count] = (server, request)
        try:
            self.send(server, self._count, request)
        except OSError as error:
            self.fail(server, error)

    def wait(self, timeout_s: float) -> Arrived | None:
        """Return what arrives next; None where nothing does for so long.

        Raises:
            RecordError: a server replied with something that is no reply.
            CommunicationError: a server of another version of gradwire, or of another run.
        """
        if not self._arrived:
            self.receive(timeout_s)
        return self._arrived.popleft() if self._arrived else None

    def arrive(self, number: int, reply: Any) -> None:
        """Take the reply to the request of that number; one that nobody waits for any more is left out."""
        server, request = self._asked.pop(number, (-1, None))
        if request is not None:
            self._arrived.append(Arrived(server, request, reply))

    def arrive_packed(self, number: int, packed: Any) -> None:
        """Take the bytes of a reply."""
        if number in self._asked:
            self.arrive(number, unpack(packed, self._replies))

    def fail(self, server: int, error: Exception) -> None:
        """Say of all requests to a server that no reply will come."""
        for number in [number for number, (asked, _) in self._asked.items() if asked == server]:
            self._arrived.append(Arrived(server, self._asked.pop(number)[1], None, error))

    @abstractmethod
    def send(self, server: int, number: int, request: Any) -> None:
        """Send a request of that number.

        Raises:
            OSError: the server cannot be reached.
        """

    @abstractmethod
    def receive(self, timeout_s: float) -> None:
        """Wait for something, at most so long, and call `arrive`, `arrive_packed` or `fail` with it."""

    def now_s(self) -> float:
        """Seconds since some moment, as this carrier counts them."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long."""
        time.sleep(seconds)

    def close(self) -> None:  # noqa: B027
        """End all connections; what was asked and has no reply is lost."""
