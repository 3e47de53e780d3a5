"""A simulated process: its lives, and its connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gradwire.peers.protocol import Served


class Process:
    """A process of the network, over all its lives.

    Attributes:
        number: among the servers, or of the peer.
        start: begins a life.
        lives: how many there were.
    """

    def __init__(self, number: int, start: Callable[[Life], None]) -> None:
        self.number, self.start, self.lives = number, start, 0
        self.life = Life(self)

    @property
    def is_up(self) -> bool:
        """Whether it runs, or is stopped."""
        return self.life.is_up


class Life:
    """One life of a process.

    Attributes:
        is_up, is_stopped: what the process is.
        stops: how often it was stopped.
        free_s: it computes until then.
        outbox: what it sends once it has computed.
        inbox: what has come while it was stopped or computed.
        lines: the connections that it uses, by the other end's number.
        open: all connections whose end it has not found out.
        served: the protocol object of a server.
    """

    served: Served

    def __init__(self, process: Process) -> None:
        self.process = process
        self.is_up, self.is_stopped, self.stops, self.free_s = False, False, 0, 0.0
        self.outbox: deque[Callable[[], None]] = deque()
        self.inbox: deque[Callable[[], None]] = deque()
        self.lines: dict[int, Line] = {}
        self.open: dict[Line, None] = {}

    def other_ends(self) -> list[tuple[Line, Life]]:
        """Its connections, and who is there."""
        return [(line, line.peer if self is line.server else line.server) for line in self.open]


class PeerEnd(Protocol):
    """The end of a connection at which a peer asks."""

    def taken(self, number: int, packed: Any) -> None:
        """A reply has arrived, as record or as bytes."""
        ...

    def missed(self, line: Line, error: Exception) -> None:
        """A connection has ended."""
        ...


@dataclass(eq=False)
class Line:
    """A connection.

    Attributes:
        last_s: when the latest message arrives, to the server and to the peer.
    """

    server: Life
    peer: Life
    connections: PeerEnd
    is_cut: bool = False
    last_s: tuple[float, float] = (0.0, 0.0)

    def missed_by(self, life: Life, error: Exception) -> None:
        """One end finds that the connection has ended."""
        life.open.pop(self, None)
        if life is self.peer:
            self.connections.missed(self, error)
        elif life.lines.get(self.peer.process.number) is self:  # else the peer has connected again
            del life.lines[self.peer.process.number]
            life.served.lost(self.peer.process.number)
