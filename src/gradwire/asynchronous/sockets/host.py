"""A server that lives in a thread of its own and is reached over TCP, or from its own process without."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import queue
import threading
from typing import Any

from torch import Tensor

from gradwire.asynchronous.reception import Reception, WorkerChannel
from gradwire.asynchronous.server import ParameterServer
from gradwire.asynchronous.sockets.frames import SECRET, Frame, head_of, read, view_of
from gradwire.asynchronous.wire import WireMessage
from gradwire.core.errors import CommunicationError


class Host:
    """Serves a core to workers until it is closed. All of the core's calls are made in the one thread of this host.

    Args:
        server: the core; nobody else may call it from now on.
        address: an IP address of this machine.
        secret: what those who connect say first.

    Attributes:
        address: host and port where workers connect.

    Raises:
        CommunicationError: an address where nobody can listen.
    """

    def __init__(self, server: ParameterServer, address: str, secret: bytes) -> None:
        self._reception, self._secret = Reception(server), secret
        self._most = server.sending.nbytes(server.values)
        self._lines: set[_Remote] = set()
        self._sent = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gradwire-server", daemon=True)
        self._thread.start()
        try:
            self._listener = self._call(asyncio.start_server(self._serve, address, 0))
        except OSError as error:
            self._end()
            raise CommunicationError(f"no server can listen at {address}: {error.strerror or error}") from error
        self.address: tuple[str, int] = self._listener.sockets[0].getsockname()[:2]
        atexit.register(self.close)  # a thread that computes while Python ends would abort the process

    @property
    def sent_bytes(self) -> int:
        """Parameters that were sent to other processes so far."""
        return self._sent

    def local_connection(self) -> LocalConnection:
        """A line for a worker of this process."""
        return LocalConnection(self)

    def receive(self, line: WorkerChannel, frame: Frame) -> None:
        """Hand a frame to the core's thread."""
        self._loop.call_soon_threadsafe(self._reception.receive, line, frame.message, frame.data)

    def disconnect(self, line: WorkerChannel) -> None:
        """Tell the core's thread that a line has ended."""
        self._loop.call_soon_threadsafe(self._reception.disconnect, line)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Remote(self, writer)
        self._lines.add(line)
        with contextlib.suppress(CommunicationError, OSError, EOFError):  # who sends what is no message is cut off
            if hmac.compare_digest(await reader.readexactly(SECRET), self._secret):
                while True:
                    frame = await read(reader, self._most)
                    self._reception.receive(line, frame.message, frame.data)
        self._reception.disconnect(line)
        self._lines.discard(line)
        writer.close()

    def count(self, nbytes: int) -> None:
        """Note what was sent to another process."""
        self._sent += nbytes

    def close(self) -> None:
        """Cut all lines; a second call does nothing."""
        atexit.unregister(self.close)
        if not self._loop.is_closed():
            self._call(self._cut())
            self._end()

    async def _cut(self) -> None:
        self._listener.close()
        for line in list(self._lines):
            line.cut()
        while self._lines:  # each line's coroutine ends as soon as its stream has
            await asyncio.sleep(0.001)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Remote:
    """A worker in another process, as the core's thread reaches it."""

    def __init__(self, host: Host, writer: asyncio.StreamWriter) -> None:
        self._host, self._writer = host, writer

    def reply(self, message: WireMessage, data: Tensor) -> None:
        """Write; what the network does not take at once waits here, at most one frame a worker."""
        self._writer.write(head_of(message, data.nbytes))
        self._writer.write(view_of(data))
        self._host.count(data.nbytes)

    def cut(self) -> None:
        """End the connection without waiting for what was not sent."""
        self._writer.transport.abort()


class LocalConnection:
    """Both ends of the line between a host and a worker of the same process; see `RemoteConnection`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._come: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def reply(self, message: WireMessage, data: Tensor) -> None:
        """From the host to the worker."""
        self._come.put(Frame(message, data))

    def send(self, message: WireMessage, data: Tensor) -> None:
        """From the worker to the host, which may look at `data` until it has answered."""
        self._host.receive(self, Frame(message, data))

    def receive(self, deadline_s: float) -> Frame:
        """The host's next frame.

        Raises:
            TimeoutError: none within the deadline.
        """
        try:
            return self._come.get(timeout=deadline_s)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """The worker has ended."""
        self._host.disconnect(self)
