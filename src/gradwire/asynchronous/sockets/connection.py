"""A worker's connection to a server on another machine."""

from __future__ import annotations

import socket

from torch import Tensor

from gradwire.asynchronous.sockets.frames import Frame, receive, send
from gradwire.asynchronous.wire import WireMessage


class RemoteConnection:
    """A TCP connection to a `Host`.

    Args:
        address: the host's.
        secret: the run's.
        most: bytes of the parameters, the most that comes with a frame.
        deadline_s: seconds to wait for the connection.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, most: int, deadline_s: float) -> None:
        self._most = most
        self._line = socket.create_connection(address, timeout=deadline_s)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line.sendall(secret)

    def send(self, message: WireMessage, data: Tensor) -> None:
        """From the worker to the host.

        Raises:
            OSError: the connection has ended.
        """
        send(self._line, message, data)

    def receive(self, deadline_s: float) -> Frame:
        """The host's next frame.

        Raises:
            OSError: the connection has ended, or the host was silent for so long.
            CommunicationError: what is no frame.
        """
        self._line.settimeout(deadline_s)
        return receive(self._line, self._most)

    def close(self) -> None:
        """The worker has ended."""
        self._line.close()
