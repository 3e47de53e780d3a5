"""The carrier over TCP and Unix sockets: a server in an event loop, and peers that send and wait in their own thread.

Behind the greeting (`greeting`) both ends send frames:

    8 bytes     length of the record, little-endian; its highest bit says that the record lies in shared memory
    8 bytes     number of the request, which its reply repeats; a peer's numbers rise
    data        the record (`gradwire.core.record`)

A frame of length 0 is a heartbeat. Who has sent nothing for `silent_s` is taken for lost, as is who closes the
connection. On one machine, records may lie in shared memory (`SharedRows`), so that they are not copied by the kernel.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CommunicationError, RecordError
from gradwire.core.record import Record, memory, pieces, unpack
from gradwire.peers import greeting
from gradwire.peers.protocol import Connections, Parts, Served

LOG = logging.getLogger("gradwire.peers")

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

SILENT_S = 30.0
"""Seconds without a sign of life after which the other end is taken for lost."""
_BEATS = 4
"""Heartbeats in that time."""
_GREETING_S = 5.0
"""Seconds that a stranger may take to say who it is."""
_MOST_STRANGERS = 64
"""Connections at a time that have not said who they are."""

_HEAD = struct.Struct("<QQ")
_IN_ROW = 1 << 63
_SMALL = 1 << 16
"""Bytes up to which copying takes less long than a call of the system."""


class SharedRows(NamedTuple):
    """Memory that a server and its peers share, one row each way for each peer. A row holds one record at a time.

    So a peer may not send a second large record before the first one was replied to. Small ones go through the socket,
    and may come whenever they like.

    Attributes:
        up: (n, b) uint8, from the peers.
        down: (n, b) uint8, to the peers.
    """

    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, peers: int, up: int, down: int) -> SharedRows:
        """Allocate for so many peers, with so many bytes for a record each way."""
        return cls(*(torch.zeros(peers, size, dtype=torch.uint8).share_memory_() for size in (up, down)))


class RowPair(NamedTuple):
    """One end's rows: to write to, and to read from."""

    out: Tensor
    into: Tensor


def framed(number: int, parts: Parts, rows: RowPair | None = None) -> Parts:
    """Return a record with its head; a large one that fits into a row is written there, and its head is returned."""
    length = sum(map(len, parts))
    if rows is None or not _SMALL < length <= rows.out.numel():
        return (_HEAD.pack(length, number), *parts)
    row, at = memory(rows.out), 0
    for part in parts:
        row[at : at + len(part)] = part
        at += len(part)
    return (_HEAD.pack(length | _IN_ROW, number),)


def tensor_bytes(parts: Parts) -> int:
    """Bytes of a record's tensors, which lie between its header and its other fields."""
    return sum(map(len, parts[2:-1]))


def joined(parts: Parts) -> Parts:
    """Return pieces as one where they are small: a call of the system takes longer than copying them."""
    return parts if sum(map(len, parts)) > _SMALL else (b"".join(parts),)


HEARTBEAT = _HEAD.pack(0, 0)


def shown(address: Address) -> str:
    """An address, for a sentence."""
    return address if isinstance(address, str) else f"port {address[1]} of {address[0]}"


# The server -----------------------------------------------------------------------------------------------------------


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
        self._loop.run_until_complete(self._begin())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()
        if self.failure is not None and self._thread is None:
            raise self.failure

    async def _begin(self) -> None:
        create = self._loop.create_unix_server if isinstance(self.address, str) else self._loop.create_server
        self._listener = await create(lambda: _Peer(self), sock=self._socket)
        self._tick()

    async def _end(self) -> None:
        self._listener.close()
        for peer in (*self.peers.values(), *self.strangers):
            peer.abort()  # what the system has taken is sent nonetheless
        await asyncio.sleep(0)

    def _tick(self) -> None:
        now_s = time.monotonic()
        for peer in (*self.strangers, *self.peers.values()):
            peer.look(now_s)
        self._loop.call_later(min(self.silent_s / _BEATS, 0.2), self._tick)
        self.guarded(self.served.tick)

    def guarded(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call the protocol object; serve no more where it fails."""
        try:
            what(*arguments)
        except Exception as error:
            self.failure = self.failure or error
            LOG.exception("a server ends: %s", error)
            self._loop.stop()

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
            self._loop.call_soon_threadsafe(self._loop.stop)

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
        self._is_known, self._last, self._length = False, 0, -1
        self._began_s = self._heard_s = self._spoke_s = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._expect(torch.empty(greeting.ANSWER, dtype=torch.uint8))

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
        return self._view[self._come :]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self._heard_s = time.monotonic()
        self._come += nbytes
        if self._come < len(self._view):
            return
        try:
            self._take()
        except greeting.Refusal as refusal:
            self._say(greeting.REFUSED)
            self.refuse(refusal.kind, str(refusal))
        except RecordError as error:
            self.refuse("record", f"peer {self.number} sent {error}")

    def _expect(self, buffer: Tensor) -> None:
        self._buffer, self._view, self._come = buffer, memory(buffer), 0

    def _expect_head(self) -> None:
        self._length = -1
        self._expect(torch.empty(_HEAD.size, dtype=torch.uint8))

    def _take(self) -> None:
        """What was expected is here."""
        if not self._is_known:
            self._greet()
        elif self._length < 0:
            self._take_head(*_HEAD.unpack(self._view))
        else:
            buffer, number = self._buffer, self._last
            self._expect_head()
            self._ask(number, buffer)

    def _greet(self) -> None:
        found = greeting.heard(bytes(self._view), self._ours, self._server.secret)
        self.number, self._is_known = found.peer, True
        rows = self._server.rows
        if rows is not None and 0 <= found.peer < len(rows.up):
            self._rows = RowPair(rows.down[found.peer], rows.up[found.peer])
        self._server.welcome(self)
        self._say(found.verdict)
        self._expect_head()

    def _take_head(self, length: int, number: int) -> None:
        self._expect_head()
        if not length:
            return None  # a heartbeat
        in_row, length = bool(length & _IN_ROW), length & ~_IN_ROW
        most = self._server.served.most_bytes
        if length > most or (in_row and (self._rows is None or length > self._rows.into.numel())):
            return self.refuse(
                "length", f"peer {self.number} sent a frame of {length} bytes, where {most} are the most"
            )
        if number <= self._last:
            return self.refuse("replayed", f"peer {self.number} sent request {number} a second time")
        self._last = number
        if in_row and self._rows is not None:
            return self._ask(number, self._rows.into[:length].clone())
        self._length = length
        return self._expect(torch.empty(length, dtype=torch.uint8))

    def _ask(self, number: int, packed: Tensor) -> None:
        request = unpack(packed, self._server.served.requests)

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
        if not self._is_known:
            if now_s - self._began_s > _GREETING_S:  # also of one that says it byte by byte
                self.refuse("late", "a stranger that did not say who it is")
        elif now_s - self._heard_s > self._server.silent_s:
            LOG.warning("peer %d was silent for %.1f s: it is taken for lost", self.number, now_s - self._heard_s)
            self.abort()
        elif now_s - self._spoke_s > self._server.silent_s / _BEATS:
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


# A peer ---------------------------------------------------------------------------------------------------------------


class SocketConnections(Connections):
    """A peer's connections to servers on sockets, and to one of its own process without a socket.

    A connection is made with the first request to its server, and again after it was lost.

    Args:
        replies: as `Connections`.
        addresses: of the servers; in place of one, a `SocketServer` of this process.
        secret: of the run.
        peer: this one's number.
        most_bytes: the longest reply.
        connect_s: seconds to wait for a connection.
        silent_s: seconds without a sign of life after which a server is lost.
        rows: shared memory with each server, where they are on this machine.

    Attributes:
        sent_bytes: bytes of tensors that were sent, by server.
    """

    def __init__(
        self,
        replies: Any,
        addresses: Sequence[Address | SocketServer],
        secret: bytes,
        peer: int,
        *,
        most_bytes: int,
        connect_s: float = 10.0,
        silent_s: float = SILENT_S,
        rows: Sequence[SharedRows] = (),
    ) -> None:
        super().__init__(replies, len(addresses))
        self.addresses, self.peer, self.silent_s = list(addresses), peer, silent_s
        self.sent_bytes = [0] * len(addresses)
        self._secret, self._most, self._connect_s = secret, most_bytes, connect_s
        self._rows = [RowPair(pair.up[peer], pair.down[peer]) for pair in rows] or [None] * len(addresses)
        self._selector = selectors.DefaultSelector()
        self._ends: dict[int, _SocketEnd | _LocalEnd] = {}
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None

    @override
    def send(self, server: int, number: int, request: Any) -> None:
        end = self._ends.get(server) or self._connect(server)
        self.sent_bytes[server] += end.send(number, request)

    def _connect(self, server: int) -> _SocketEnd | _LocalEnd:
        there = self.addresses[server]
        if isinstance(there, SocketServer):
            end = _LocalEnd(there, self.peer)
        else:
            end = _SocketEnd(
                _connected(there, self._secret, self.peer, self._connect_s), self._rows[server], self._most
            )
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, name="gradwire-heartbeat", daemon=True)
                self._beating.start()
        self._ends[server] = end
        self._selector.register(end, selectors.EVENT_READ, server)
        return end

    def _beat(self) -> None:
        """Give signs of life while the peer's own thread computes."""
        while not self._closed.wait(self.silent_s / _BEATS):
            for end in list(self._ends.values()):
                with contextlib.suppress(OSError):  # whoever waits for a reply finds out
                    end.beat()

    @override
    def receive(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not self._arrived:
            left_s = max(0.0, min(end_s - time.monotonic(), self.silent_s / _BEATS))
            for key, _ in self._selector.select(left_s):
                self._read(key.data)
            self._miss_silent()
            if time.monotonic() >= end_s:
                return

    def _read(self, server: int) -> None:
        end = self._ends[server]
        try:
            for number, reply in end.read(self.silent_s):
                if isinstance(reply, Tensor):
                    self.arrive_packed(number, reply)
                else:
                    self.arrive(number, reply)
        except OSError as error:
            self.fail(server, error)

    def _miss_silent(self) -> None:
        """Give up servers that gave no sign of life for too long; what they had sent has just been read."""
        now_s = time.monotonic()
        for server, end in list(self._ends.items()):
            if now_s - end.heard_s > self.silent_s:
                self.fail(server, TimeoutError(f"no sign of life for {self.silent_s:g} s"))

    @override
    def fail(self, server: int, error: Exception) -> None:
        end = self._ends.pop(server, None)
        if end is not None:
            self._selector.unregister(end)
            end.close()
        super().fail(server, error)

    @override
    def close(self) -> None:
        self._closed.set()
        for end in self._ends.values():
            self._selector.unregister(end)
            end.close()
        self._ends.clear()
        self._selector.close()


class _SocketEnd:
    """A peer's end of a connection over a socket."""

    def __init__(self, line: socket.socket, rows: RowPair | None, most_bytes: int) -> None:
        self._line, self._rows, self._most = line, rows, most_bytes
        self._lock, self.heard_s = threading.Lock(), time.monotonic()

    def fileno(self) -> int:
        return self._line.fileno()

    def send(self, number: int, request: Any) -> int:
        parts = pieces(request)
        with self._lock:
            for part in joined(framed(number, parts, self._rows)):
                self._line.sendall(part)
        return tensor_bytes(parts)

    def beat(self) -> None:
        if self._lock.acquire(blocking=False):  # who is sending gives a sign of life anyway
            try:
                self._line.sendall(HEARTBEAT)
            finally:
                self._lock.release()

    def read(self, silent_s: float) -> list[tuple[int, Any]]:
        """Read the next frame, whose first bytes are here."""
        self._line.settimeout(silent_s)
        length, number = _HEAD.unpack(_exactly(self._line, _HEAD.size).numpy().data)
        self.heard_s = time.monotonic()
        if not length:
            return []
        if length & _IN_ROW and self._rows is not None:
            return [(number, self._rows.into[: length & ~_IN_ROW].clone())]
        if length > self._most:
            raise CommunicationError(f"a server sent a frame of {length} bytes, where {self._most} are the most")
        packed = _exactly(self._line, length)
        self.heard_s = time.monotonic()
        return [(number, packed)]

    def close(self) -> None:
        self._line.close()


class _LocalEnd:
    """A peer's end of a connection to a server of its own process: records are handed over, and nothing is copied."""

    def __init__(self, server: SocketServer, peer: int) -> None:
        self._server, self._peer = server, peer
        self._come: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def heard_s(self) -> float:
        return time.monotonic()  # it lives as long as this process does

    def fileno(self) -> int:
        return self._bell

    def send(self, number: int, request: Any) -> int:
        def reply(record: Record) -> None:
            self._come.put((number, record))
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)

        self._server.call(self._server.served.ask, request, reply)
        return 0

    def beat(self) -> None:
        return

    def read(self, silent_s: float) -> list[tuple[int, Any]]:
        os.eventfd_read(self._bell)
        return [self._come.get() for _ in range(self._come.qsize())]

    def close(self) -> None:
        bell, self._bell = self._bell, -1  # no reply that comes now is to ring it
        os.close(bell)
        self._server.call(self._server.served.lost, self._peer)


def _connected(address: Address, secret: bytes, peer: int, connect_s: float) -> socket.socket:
    """A connection on which both ends have said who they are.

    Raises:
        OSError: nobody listens there, or does not answer in time.
        Refusal: a server of another version or another run.
    """
    if isinstance(address, str):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        line = socket.create_connection(address, timeout=connect_s)
    try:
        line.settimeout(connect_s)
        if isinstance(address, str):
            line.connect(address)
        else:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs, ours = bytes(_exactly(line, greeting.GREETING).numpy().data), greeting.greeting()
        line.sendall(greeting.answer(theirs, ours, peer, secret))
        greeting.require_alike(theirs, ours, "server")  # which has heard our version by now, and says both too
        verdict = bytes(_exactly(line, greeting.VERDICT).numpy().data)
        if verdict != greeting.verdict_of(theirs, ours, secret):
            raise greeting.Refusal("secret", f"the server at {shown(address)} is of another run: its secret differs")
    except BaseException:
        line.close()
        raise
    return line


def _exactly(line: socket.socket, nbytes: int) -> Tensor:
    buffer = torch.empty(nbytes, dtype=torch.uint8)  # not filled with zeros before it is filled
    view, come = memory(buffer), 0
    while come < nbytes:
        more = line.recv_into(view[come:])
        if not more:
            raise ConnectionResetError("the other side has closed the connection")
        come += more
    return buffer
