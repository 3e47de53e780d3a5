"""The server's process: hands messages between sockets and the core."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from typing import cast

import torch

from gradwire.asynchronous import snapshots
from gradwire.asynchronous.clocks import Phase
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.processes.job import SharedTensors
from gradwire.asynchronous.wire import LONGEST, MessageKind, WireMessage, pack, plain, unpack
from gradwire.core.errors import CommunicationError, PushError

_TICK_S = 0.2
_LINGER_S = 10.0


class JobServer:
    """Serves a job until its last push.

    Args:
        job: what to serve.
        shared: where tensors lie.
        listener: a socket that workers connect to.
        gone: workers that are known to be dead.
    """

    def __init__(self, job: Job, shared: SharedTensors, listener: socket.socket, gone: Sequence[int] = ()) -> None:
        self.job, self.shared, self.server = job, shared, job.server()
        if job.folder is not None and not snapshots.restore(self.server, job.folder):
            snapshots.save(self.server, job.folder)
        for worker in gone:
            self.server.leave(worker)
        self._lines: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener, self._began_s = listener, time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether all pushes were applied."""
        return self.server.version >= self.job.pushes

    def run(self) -> None:
        """Serve until all is done, and let workers know."""
        while not self.is_done:
            self._turn()
            self._miss()
        self._finish()
        end_s = time.monotonic() + _LINGER_S
        while self._lines and time.monotonic() < end_s:  # what workers still send must be read, or they miss the end
            self._turn()
        self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_TICK_S):
            self._listen(cast(socket.socket, key.fileobj))

    def _finish(self) -> None:
        self.shared.values.copy_(self.server.values)
        if self.job.folder is not None:
            snapshots.save(self.server, self.job.folder)
        self.shared.version.fill_(self.server.version)  # last: it says that the parameters are there
        for worker, line in self._lines.items():
            self._send(line, plain(MessageKind.STOP, worker))

    def _listen(self, line: socket.socket) -> None:
        if line is self._listener:
            fresh, _ = self._listener.accept()
            self._selector.register(fresh, selectors.EVENT_READ)
            return
        try:
            packet = line.recv(LONGEST)
            message = unpack(packet) if packet else None
        except (OSError, CommunicationError):
            message = None  # who sends what is no message is cut off, and its worker joins again
        if message is None:
            self._disconnect(line)
        else:
            self._answer(line, message)

    def _answer(self, line: socket.socket, message: WireMessage) -> None:
        try:
            if message.kind is MessageKind.JOIN:
                self._join(line, message.grant.worker)
            elif message.kind is MessageKind.PUSH:
                self._receive(message)
        except PushError as error:
            self._send(line, message._replace(kind=MessageKind.REFUSED, text=str(error)))

    def _join(self, line: socket.socket, worker: int) -> None:
        grants = self.server.join(worker)
        known = self._lines.get(worker)
        if known is not None and known is not line:
            self._close(known)
        self._lines[worker] = line
        self._grant(grants)

    def _receive(self, message: WireMessage) -> None:
        if self.is_done:
            return
        worker, version = message.grant.worker, self.server.version
        wire = self.shared.up[worker : worker + 1].flatten().clone()  # nothing of an unknown worker, which is refused
        receipt = self.server.receive(Push(message.grant, wire, message.fingerprint, message.loss, message.seconds))
        row = (time.monotonic(), worker, message.grant.number, version, receipt.staleness, message.loss)
        self.shared.log[version] = torch.tensor(row, dtype=torch.float64)
        if not self.is_done:
            self.shared.version.fill_(self.server.version)
            self._keep()
            self._grant(receipt.grants)

    def _keep(self) -> None:
        if self.job.folder is not None and self.server.version % self.job.snapshot_every == 0:
            snapshots.save(self.server, self.job.folder)

    def _grant(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self.shared.down[grant.worker].copy_(self.server.values)
            self._send(self._lines[grant.worker], WireMessage(MessageKind.GRANT, grant))

    def _send(self, line: socket.socket, message: WireMessage) -> None:
        with contextlib.suppress(OSError):  # a worker that has just died: its end is read next
            line.send(pack(message))

    def _disconnect(self, line: socket.socket) -> None:
        """A worker's process has ended: it counts no more, and those who waited for it go on."""
        workers = [worker for worker, known in self._lines.items() if known is line]
        self._close(line)
        for worker in workers:
            del self._lines[worker]
            self._grant(self.server.leave(worker))

    def _close(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        line.close()

    def _miss(self) -> None:
        """Go on without workers that never came."""
        if time.monotonic() - self._began_s < self.job.patience_s:
            return
        for worker, phase in enumerate(self.server.clocks.phases):
            if phase is Phase.EXPECTED:
                self._grant(self.server.leave(worker))


def serve(job: Job, shared: SharedTensors, path: str, gone: Sequence[int]) -> None:
    """Run the server, as the main function of its process."""
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(job.workers + 1)
        JobServer(job, shared, listener, gone).run()
