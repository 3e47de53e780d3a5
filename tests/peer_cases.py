"""What tests of carriers share: a protocol object with foreseeable replies, servers in threads, raw connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any

import torch

from gradwire.asynchronous.several.messages import ServerReply
from gradwire.core.record import Bytes, Count, Floats, Record
from gradwire.peers import greeting
from gradwire.peers.protocol import Connections, Reply, Served
from gradwire.peers.sockets import Address, SocketConnections, SocketServer

SECRET = bytes(range(greeting.SECRET_BYTES))
DEADLINE_S = 60.0


class Double(Record, frozen=True, tag=True):
    """What is twice this? `Doubled` is the reply, at once."""

    name: str
    values: Floats


class Keep(Record, frozen=True, tag=True):
    """Reply to this once somebody asks for it with `Release`; the reply is `Said`."""

    number: Count


class Release(Record, frozen=True, tag=True):
    """Reply to what was kept, the last first, and then to this, by `Said`."""


class Fail(Record, frozen=True, tag=True):
    """Break."""


class Doubled(Record, frozen=True, tag=True):
    name: str
    values: Floats
    raw: Bytes


class Said(Record, frozen=True, tag=True):
    number: Count


Asked = Double | Keep | Release | Fail
Replied = Doubled | Said


class Doubler(Served):
    """Replies at once, or later and in another order; remembers whom it lost.

    Attributes:
        lost_peers: in order.
    """

    requests = Asked
    most_bytes = 1 << 28

    def __init__(self) -> None:
        self.kept: list[tuple[int, Reply]] = []
        self.lost_peers: list[int] = []

    def ask(self, request: Asked, reply: Reply) -> None:
        match request:
            case Double(name, values):
                reply(Doubled(name, 2 * values, torch.arange(3, dtype=torch.uint8)))
            case Keep(number):
                self.kept.append((number, reply))
            case Release():
                while self.kept:
                    number, older = self.kept.pop()
                    older(Said(number))
                reply(Said(0))
            case Fail():
                raise ZeroDivisionError("this server breaks")

    def lost(self, peer: int) -> None:
        self.lost_peers.append(peer)


def asked(connections: Connections, request: Any, server: int = 0) -> Any:
    """The reply to a request, before anything else that arrives."""
    connections.ask(server, request)
    arrived = connections.wait(DEADLINE_S)
    assert arrived is not None, "nothing arrives"
    assert arrived.error is None, arrived.error
    assert (arrived.server, arrived.request) == (server, request)
    return arrived.reply


def error_of(connections: Connections, request: Any, server: int = 0) -> Exception:
    """Why there is no reply to a request."""
    connections.ask(server, request)
    arrived = connections.wait(DEADLINE_S)
    assert arrived is not None, "nothing arrives"
    assert arrived.error is not None, arrived.reply
    return arrived.error


@contextmanager
def serving(server: SocketServer) -> Generator[SocketServer]:
    """Serve in a thread; it has ended afterwards, and raised nothing."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            server.run()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


def connected(server: SocketServer, peer: int = 0, replies: Any = ServerReply, **settings: Any) -> SocketConnections:
    """A peer's connections to one server."""
    settings = {"most_bytes": 1 << 28, "secret": SECRET, **settings}
    return SocketConnections(replies, [server.address], peer=peer, **settings)


# Raw connections ----------------------------------------------------------------------------------------------------


def raw(address: Address) -> socket.socket:
    """A connection that has said nothing yet."""
    if isinstance(address, str):
        line = socket.socket(socket.AF_UNIX)
        line.connect(address)
    else:
        line = socket.create_connection(address)
    line.settimeout(DEADLINE_S)
    return line


def greeted(address: Address, peer: int = 0, secret: bytes = SECRET) -> socket.socket:
    """A connection on which both ends have said who they are."""
    line = raw(address)
    theirs, ours = read(line, greeting.GREETING), greeting.greeting()
    line.sendall(greeting.answer(theirs, ours, peer, secret))
    assert read(line, greeting.VERDICT) == greeting.verdict_of(theirs, ours, secret)
    return line


def read(line: socket.socket, nbytes: int) -> bytes:
    return line.recv(nbytes, socket.MSG_WAITALL)


def is_cut_off(line: socket.socket) -> bool:
    """Whether the other end closes a connection, whatever it sends before."""
    with closing(line):
        try:
            while line.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True


def frame(number: int, packed: bytes, length: int | None = None) -> bytes:
    """A frame as the wire has it, written here once more."""
    head = (len(packed) if length is None else length).to_bytes(8, "little") + number.to_bytes(8, "little")
    return head + packed
