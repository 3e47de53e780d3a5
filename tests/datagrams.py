"""A carrier over Unix datagrams, to show how little one is: a datagram is the request's number and a record."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.core.errors import RecordError
from gradwire.core.record import pack
from gradwire.peers.protocol import Connections, Parts, Served, receive

_MOST = 1 << 16
_NUMBER = 8


class DatagramServer:
    """Serves a protocol object at a path, in the thread that calls `run`."""

    def __init__(self, served: Served, path: Path) -> None:
        self.served, self._socket = served, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.1)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._receive(*self._socket.recvfrom(_MOST))
            except TimeoutError:
                self.served.tick()

    def _receive(self, datagram: bytes, sender: str) -> None:
        def send(parts: Parts) -> None:
            self._socket.sendto(b"".join((datagram[:_NUMBER], *parts)), sender)

        try:
            receive(self.served, datagram[_NUMBER:], send)
        except RecordError:
            self.served.lost(-1)  # whoever it was

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._socket.close()


class DatagramConnections(Connections):
    """A peer's connections to servers at paths; it has a path itself, for replies."""

    def __init__(self, replies: Any, paths: Sequence[Path], own: Path) -> None:
        super().__init__(replies, len(paths))
        self._paths, self._socket = list(paths), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(own))

    def send(self, server: int, number: int, request: Any) -> None:
        self._socket.sendto(number.to_bytes(_NUMBER, "little") + pack(request), str(self._paths[server]))

    def receive(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            datagram = self._socket.recv(_MOST)
        except TimeoutError:
            return
        self.arrive_packed(int.from_bytes(datagram[:_NUMBER], "little"), datagram[_NUMBER:])

    def close(self) -> None:
        self._socket.close()
