"""A server on sockets: an event loop that hands requests of peers to a protocol object."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from gradwire.core.errors import CommunicationError, RecordError
from gradwire.core.record import Record, pieces, unpack
from gradwire.peers import greeting
from gradwire.peers.protocol import Parts, Served
from gradwire.peers.sockets.frames import (
    BEATS,
    HEARTBEAT,
    SILENT_S,
    Address,
    Inbox,
    LengthError,
    RowPair,
    SharedRows,
    framed,
    joined,
    shown,
    tensor_bytes,
)

LOG = logging.getLogger("gradwire.peers")

_GREETING_S = 5.0
"""Seconds that a stranger may take to say who it is."""
_MOST_STRANGERS = 64
"""Connections at a time that have not said who they are."""


class SocketServer:
    """Serves a protocol object to peers over sockets, in the thread that calls `run`, or in one of its own (`start`).

    Args:
        served: all its calls are made in that thread.
        address: where to listen; port 0 is any free one.
        secret: what peers must know.
        silent_s: seconds without a sign of life after which a peer is lost.
        rows: shared memory, where peers are on this machine.

    Attributes:
        address: where peers connect.
        refused: how many were refused, by the reason: "stranger", "version", "secret", "late", "record", "length" or
            "replayed".
        sent_bytes: bytes of tensors that were sent.
        failure: what the protocol object raised, after which nobody is served any more; None before.
        peers: those that are connected, by number.

    Raises:
        CommunicationError: an address where nobody can listen.
    """

    def __init__(
        self,
        served: Served,
        address: Address,
        secret: bytes,
        *,
        silent_s: float = SILENT_S,
        rows: SharedRows | None = None,
    ) -> None:
        self.served, self.secret, self.rows, self.silent_s = served, secret, rows, silent_s
        self.refused: Counter[str] = Counter()
        self.sent_bytes = 0
        self.peers: dict[int, _Peer] = {}
        self.strangers: dict[_Peer, None] = {}
        self._socket = listening(address)
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        found = self._socket.getsockname()
        self.address: Address = found if isinstance(found, str) else found[:2]
        self.failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self.run, name="gradwire-server", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that computes while Python ends would abort the process

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            Exception: whatever the protocol object raised but for what it has against a request.
        """
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
        if self.failure is not None and self._thread is None:
            raise self.failure

    async def _serve(self) -> None:
        create = self._loop.create_unix_server if isinstance(self.address, str) else self._loop.create_server
        listener = await create(lambda: _Peer(self), sock=self._socket)
        self._tick()
        await self._over
        listener.close()
        for peer in (*self.peers.values(), *self.strangers):
            peer.abort()  # what the system has taken is sent nonetheless
        await asyncio.sleep(0)

    def _tick(self) -> None:
        now_s = time.monotonic()
        for peer in (*self.strangers, *self.peers.values()):
            peer.look(now_s)
        self._loop.call_later(min(self.silent_s / BEATS, 0.2), self._tick)
        self.guarded(self.served.tick)

    def guarded(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call the protocol object; serve no more where it fails."""
        try:
            what(*arguments)
        except Exception as error:
            self.failure = self.failure or error
            LOG.exception("a server ends: %s", error)
            self._end()

    def call(self, what: Callable[..., None], *arguments: Any) -> None:
        """Have the protocol object called in the server's thread, soon."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is served any more
            self._loop.call_soon_threadsafe(self.guarded, what, *arguments)

    def refuse(self, kind: str, message: str) -> None:
        """Count one who was refused; the first of each kind is logged."""
        self.refused[kind] += 1
        if self.refused[kind] == 1:
            LOG.warning("refused: %s", message)

    def stop(self) -> None:
        """Serve no more, and cut all connections."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def close(self) -> None:
        """End the thread of `start`; a second call does nothing."""
        atexit.unregister(self.close)
        if self._thread is not None:
            self.stop()
            self._thread.join()

    # Peers -------------------------------------------------------------------------------------------------------

    def welcome(self, peer: _Peer) -> None:
        """A peer has said who it is. One that was here under its number is forgotten, without being lost."""
        del self.strangers[peer]
        before = self.peers.get(peer.number)
        self.peers[peer.number] = peer
        if before is not None:
            before.close()

    def ended(self, peer: _Peer) -> None:
        """A connection has ended."""
        self.strangers.pop(peer, None)
        if self.peers.get(peer.number) is peer:
            del self.peers[peer.number]
            self.guarded(self.served.lost, peer.number)


class _Peer(asyncio.BufferedProtocol):
    """A server's end of one connection."""

    def __init__(self, server: SocketServer) -> None:
        self._server, self.number = server, -1
        self._ours = greeting.greeting()
        self._rows: RowPair | None = None
        self._inbox: Inbox | None = None
        self._answer, self._come, self._last = memoryview(bytearray(greeting.ANSWER)), 0, 0
        self._began_s = self._heard_s = self._spoke_s = time.monotonic()
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        found = transport.get_extra_info("socket")
        if found.family != socket.AF_UNIX:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = self._server.strangers
        if len(strangers) >= _MOST_STRANGERS:
            oldest = next(iter(strangers))
            oldest.refuse("late", "a stranger that did not say who it is")
        strangers[self] = None
        transport.write(self._ours)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._server.ended(self)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._answer[self._come :] if self._inbox is None else self._inbox.space()

    @override
    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._inbox is None:
                self._greet(nbytes)
            else:
                self._heard_s = time.monotonic()
                for number, packed in self._inbox.take(nbytes):
                    self._take(number, packed)
        except greeting.Refusal as refusal:
            self._say(greeting.REFUSED)
            self.refuse(refusal.kind, str(refusal))
        except LengthError as error:
            self.refuse("length", f"peer {self.number} sent {error}")
        except RecordError as error:
            self.refuse("record", f"peer {self.number} sent {error}")

    def _greet(self, nbytes: int) -> None:
        self._come += nbytes
        if self._come < len(self._answer):
            return
        found = greeting.heard(bytes(self._answer), self._ours, self._server.secret)
        self.number, rows = found.peer, self._server.rows
        if rows is not None and 0 <= found.peer < len(rows.up):
            self._rows = RowPair.of(rows.down[found.peer], rows.up[found.peer])
        self._inbox, self._heard_s = Inbox(self._server.served.most_bytes, self._rows), time.monotonic()
        self._server.welcome(self)
        self._say(found.verdict)

    def _take(self, number: int, packed: memoryview) -> None:
        if self._transport is None or self._transport.is_closing():
            return  # it was refused, or has come again
        if number <= self._last:
            self.refuse("replayed", f"peer {self.number} sent request {number} a second time")
        else:
            self._last = number
            self._ask(number, packed)

    def _ask(self, number: int, packed: memoryview) -> None:
        request = unpack(packed, self._server.served.requests)
        self._server.served.require_from(self.number, request)

        def reply(record: Record) -> None:
            self._reply(number, pieces(record))

        self._server.guarded(self._server.served.ask, request, reply)

    def _reply(self, number: int, parts: Parts) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._server.sent_bytes += tensor_bytes(parts)
            self._say(*framed(number, parts, self._rows))

    def _say(self, *parts: bytes | memoryview) -> None:
        self._spoke_s = time.monotonic()
        if self._transport is not None:
            for part in joined(parts):
                self._transport.write(part)

    def look(self, now_s: float) -> None:
        """Give a sign of life where one is due, and cut off who gives none."""
        if self._inbox is None:
            if now_s - self._began_s > _GREETING_S:  # also of one that says it byte by byte
                self.refuse("late", "a stranger that did not say who it is")
        elif now_s - self._heard_s > self._server.silent_s:
            LOG.warning("peer %d was silent for %.1f s: it is taken for lost", self.number, now_s - self._heard_s)
            self.abort()
        elif now_s - self._spoke_s > self._server.silent_s / BEATS:
            self._say(HEARTBEAT)

    def refuse(self, kind: str, message: str) -> None:
        """Count it, and cut the connection."""
        self._server.refuse(kind, message)
        self.close()

    def close(self) -> None:
        """End the connection, once what was written has been sent; what it is told from now on is left out."""
        if self._transport is not None:
            self._transport.close()
        self._server.strangers.pop(self, None)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def listening(address: Address) -> socket.socket:
    """Return a socket that listens.

    Raises:
        CommunicationError: an address where nobody can listen.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise CommunicationError(f"{shown(address)} is in use: give another address") from error
        raise CommunicationError(f"no server can listen at {shown(address)}: {error.strerror or error}") from error
    return made
