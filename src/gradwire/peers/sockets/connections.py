"""A peer's connections to servers on sockets: it sends and waits in its own thread."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from gradwire.core.record import Record, pieces
from gradwire.peers import greeting
from gradwire.peers.protocol import Connections, Parts
from gradwire.peers.sockets.frames import (
    BEATS,
    HEARTBEAT,
    SILENT_S,
    Address,
    Inbox,
    RowPair,
    SharedRows,
    framed,
    shown,
    tensor_bytes,
)
from gradwire.peers.sockets.server import SocketServer

_TIMEVAL = struct.Struct("@ll")

_JOIN_S = 1.0
"""Seconds to wait for a thread that has been told to end, and may be sending."""


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
        self._lines: dict[int, _Line] = {}
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
            line = _Line(_connected(there, self._secret, self.peer, self._connect_s), self.silent_s)
            end = _SocketEnd(line, self._rows[server], self._most)
            self._lines[server] = line
            if self._beating is None:
                what = (self._lines, self.silent_s / BEATS, self._closed)
                self._beating = threading.Thread(target=_beat, args=what, name="gradwire-heartbeat", daemon=True)
                self._beating.start()
        self._ends[server] = end
        self._selector.register(end, selectors.EVENT_READ, server)
        return end

    @override
    def receive(self, timeout_s: float) -> None:
        now_s = time.monotonic()
        end_s = now_s + timeout_s
        while True:
            left_s = max(0.0, min(end_s - now_s, self.silent_s / BEATS))
            for key, _ in self._selector.select(left_s):
                self._read(key.data)
            now_s = time.monotonic()
            if not self._arrived:
                self._miss_silent(now_s)
            if self._arrived or now_s >= end_s:
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

    def _miss_silent(self, now_s: float) -> None:
        """Give up servers that gave no sign of life for too long; what they had sent has just been read."""
        for server, end in list(self._ends.items()):
            if now_s - end.heard_s > self.silent_s:
                self.fail(server, TimeoutError(f"no sign of life for {self.silent_s:g} s"))

    @override
    def fail(self, server: int, error: Exception) -> None:
        end = self._ends.pop(server, None)
        self._lines.pop(server, None)
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
        self._lines.clear()
        self._selector.close()
        if self._beating is not None:  # Python may not end well beside a thread that is about to run
            self._beating.join(_JOIN_S)


class _Line:
    """A socket on which one thread sends requests, and another one signs of life."""

    def __init__(self, line: socket.socket, silent_s: float) -> None:
        self.socket, self._lock = line, threading.Lock()
        line.settimeout(None)  # so that sending takes as long as it must, while the server takes up something
        whole_s, part = divmod(silent_s, 1.0)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole_s), int(1e6 * part)))

    def send(self, parts: Parts) -> None:
        with self._lock:
            for part in parts:
                self.socket.sendall(part)

    def beat(self) -> None:
        if self._lock.acquire(blocking=False):  # who is sending gives a sign of life anyway
            try:
                sent = self.socket.send(HEARTBEAT, socket.MSG_DONTWAIT)  # the other servers must not wait for this one
                self.socket.sendall(HEARTBEAT[sent:])
            finally:
                self._lock.release()


def _beat(lines: dict[int, _Line], seconds: float, closed: threading.Event) -> None:
    """Give signs of life while the peer's own thread computes.

    Nothing that this thread holds has tensors. It could be the last to hold one, and PyTorch's code that lets go of a
    tensor aborts the process where Python ends meanwhile ("terminate called without an active exception").
    """
    while not closed.wait(seconds):
        for line in list(lines.values()):
            with contextlib.suppress(OSError):  # whoever waits for a reply finds out
                line.beat()


class _SocketEnd:
    """A peer's end of a connection over a socket."""

    def __init__(self, line: _Line, rows: RowPair | None, most_bytes: int) -> None:
        self._line, self._rows, self._inbox = line, rows, Inbox(most_bytes, rows)
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        return self._line.socket.fileno()

    def send(self, number: int, request: Any) -> int:
        parts = pieces(request)
        self._line.send(framed(number, parts, self._rows))
        return tensor_bytes(parts)

    def read(self) -> list[tuple[int, Any]]:
        """Return the replies that are here by now."""
        try:
            nbytes = self._line.socket.recv_into(self._inbox.space(), 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not nbytes:
            raise ConnectionResetError("the other side has closed the connection")
        self.heard_s = time.monotonic()
        return self._inbox.take(nbytes)

    def close(self) -> None:
        self._line.socket.close()


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
