"""The carrier over TCP and Unix sockets: a server in an event loop, and peers that send and wait in their own thread.

Behind the greeting (`greeting`) both ends send frames:

    8 bytes     length of the record, little-endian; its highest bit says that the record lies in shared memory
    8 bytes     number of the request, which its reply repeats; a peer's numbers rise
    data        the record (`gradwire.core.record`)

A frame of length 0 is a heartbeat. Who has sent nothing for `silent_s` is taken for lost, as is who closes the
connection. On one machine, long records lie in shared memory (`SharedRows`), so that they are not copied by the kernel.
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
_JOIN_S = 1.0
"""Seconds to wait for a thread that has been told to end, and may be sending."""
_GREETING_S = 5.0
"""Seconds that a stranger may take to say who it is."""
_MOST_STRANGERS = 64
"""Connections at a time that have not said who they are."""

_HEAD = struct.Struct("<QQ")
_IN_ROW = 1 << 63
_SMALL = 1 << 16
"""Bytes up to which copying takes less long than a call of the system."""
_INBOX = 1 << 16
"""Bytes of frames that are received at a time."""
_LEAST_IN_ROW = 1 << 14
"""Bytes of a record for which shared memory is faster than the socket."""
_TIMEVAL = struct.Struct("@ll")


class SharedRows(NamedTuple):
    """Memory that a server and its peers share, one row each way for each peer. A row holds one long record at a time.

    So neither end may send a second long record before it has heard again from the other, and what has come in a row is
    there until then. Short records go through the socket, and may come at any time.

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

    out: memoryview
    into: memoryview

    @classmethod
    def of(cls, out: Tensor, into: Tensor) -> RowPair:
        """Return the memory of two rows."""
        return cls(memory(out), memory(into))


def framed(number: int, parts: Parts, rows: RowPair | None = None) -> Parts:
    """Return a record with its head; a long one that fits into a row is written there, and its head is returned."""
    length = sum(map(len, parts))
    if rows is None or not _LEAST_IN_ROW <= length <= len(rows.out):
        return (_HEAD.pack(length, number), *parts)
    at = 0
    for part in parts:
        rows.out[at : at + len(part)] = part
        at += len(part)
    return (_HEAD.pack(length | _IN_ROW, number),)


class LengthError(CommunicationError):
    """A frame that is longer than any can be; nothing was allocated for it."""


class Inbox:
    """Cuts what comes on a connection into frames: short ones many at a time, and long ones where they are to stay.

    Args:
        most_bytes: the longest record.
        rows: shared memory.
    """

    def __init__(self, most_bytes: int, rows: RowPair | None) -> None:
        self._most, self._rows = most_bytes, rows
        self._short = _allocated(_INBOX)
        self._come = 0
        self._long: memoryview | None = None
        self._long_come = self._long_number = 0

    def space(self) -> memoryview:
        """Where the next bytes are to be written."""
        return self._short[self._come :] if self._long is None else self._long[self._long_come :]

    def take(self, nbytes: int) -> list[tuple[int, memoryview]]:
        """So many bytes have come; return the records that are complete, with the numbers of their requests.

        Raises:
            LengthError: as it says.
        """
        if self._long is None:
            self._come += nbytes
            return self._cut()
        self._long_come += nbytes
        if self._long_come < len(self._long):
            return []
        found, self._long = self._long, None
        return [(self._long_number, found)]

    def _cut(self) -> list[tuple[int, memoryview]]:
        found: list[tuple[int, memoryview]] = []
        at = 0
        while self._long is None and self._come - at >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._short, at)
            at += _HEAD.size
            if length & _IN_ROW:
                found.append((number, self._in_row(length & ~_IN_ROW)))
            elif length > self._most:
                raise self._too_long(length)
            elif length:  # a heartbeat has none
                record, here = _allocated(length), min(length, self._come - at)
                record[:here] = self._short[at : at + here]
                at += here
                if here == length:
                    found.append((number, record))
                else:
                    self._long, self._long_come, self._long_number = record, here, number
        self._come -= at
        self._short[: self._come] = bytes(self._short[at : at + self._come])
        return found

    def _in_row(self, length: int) -> memoryview:
        if self._rows is None or length > len(self._rows.into):
            raise self._too_long(length)
        return self._rows.into[:length]

    def _too_long(self, length: int) -> LengthError:
        return LengthError(f"a frame of {length} bytes, where {self._most} are the most")


def _allocated(nbytes: int) -> memoryview:
    """Memory as tensors have it: aligned, and not filled with zeros before it is filled."""
    return memory(torch.empty(nbytes, dtype=torch.uint8))


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
        self._loop.call_later(min(self.silent_s / _BEATS, 0.2), self._tick)
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
        self._rows = [RowPair.of(pair.up[peer], pair.down[peer]) for pair in rows] or [None] * len(addresses)
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
            line = _connected(there, self._secret, self.peer, self._connect_s)
            end = _SocketEnd(line, self._rows[server], self._most, self.silent_s)
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
            for number, reply in end.read():
                if isinstance(reply, memoryview):
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
        if self._beating is not None:  # Python may not end well beside a thread that is about to run
            self._beating.join(_JOIN_S)


class _SocketEnd:
    """A peer's end of a connection over a socket."""

    def __init__(self, line: socket.socket, rows: RowPair | None, most_bytes: int, silent_s: float) -> None:
        self._line, self._rows, self._inbox = line, rows, Inbox(most_bytes, rows)
        self._lock, self.heard_s = threading.Lock(), time.monotonic()
        line.settimeout(None)  # so that sending takes as long as it must, while the server takes up something
        whole_s, part = divmod(silent_s, 1.0)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole_s), int(1e6 * part)))

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

    def read(self) -> list[tuple[int, Any]]:
        """Return the replies that are here by now."""
        try:
            nbytes = self._line.recv_into(self._inbox.space(), 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not nbytes:
            raise ConnectionResetError("the other side has closed the connection")
        self.heard_s = time.monotonic()
        return self._inbox.take(nbytes)

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

    def read(self) -> list[tuple[int, Any]]:
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
        theirs, ours = _exactly(line, greeting.GREETING), greeting.greeting()
        line.sendall(greeting.answer(theirs, ours, peer, secret))
        greeting.require_alike(theirs, ours, "server")  # which has heard our version by now, and says both too
        verdict = _exactly(line, greeting.VERDICT)
        if verdict != greeting.verdict_of(theirs, ours, secret):
            raise greeting.Refusal("secret", f"the server at {shown(address)} is of another run: its secret differs")
    except BaseException:
        line.close()
        raise
    return line


def _exactly(line: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = line.recv(nbytes - len(found))
        if not more:
            raise ConnectionResetError("the other side has closed the connection")
        found += more
    return found
