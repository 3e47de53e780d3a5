"""A worker's process: pulls, computes, pushes, and finds its server again after that was restarted."""

from __future__ import annotations

import contextlib
import socket
import time

import torch

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.messages import Grant
from gradwire.asynchronous.processes.job import SharedTensors
from gradwire.asynchronous.wire import LONGEST, MessageKind, WireMessage, pack, plain, unpack
from gradwire.asynchronous.worker import Worker
from gradwire.core.errors import CommunicationError

_AGAIN_S = 0.1


class Remote:
    """A worker and its line to the server.

    Args:
        job: what to do.
        shared: where tensors lie.
        path: of the server's socket.
        worker: this one's number.
    """

    def __init__(self, job: Job, shared: SharedTensors, path: str, worker: int) -> None:
        self.job, self.shared, self.path, self.number = job, shared, path, worker
        self.worker = Worker(job.work(worker), job.parameters, sending=job.sending, seed=job.seed)

    def run(self) -> None:
        """Work until the server says that all is done.

        Raises:
            CommunicationError: a server that is not there.
            PushError: pushes that are refused one after the other, with the server's reason.
        """
        while True:
            with self._connected() as line:
                if self._serve(line):
                    return

    def _connected(self) -> socket.socket:
        began_s = time.monotonic()
        while time.monotonic() - began_s < self.job.patience_s:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                line.connect(self.path)
                line.send(pack(plain(MessageKind.JOIN, self.number)))
                return line
            except OSError:
                line.close()
                time.sleep(_AGAIN_S)
        raise CommunicationError(
            f"worker {self.number} finds no server at {self.path} after {self.job.patience_s:g} s: start it again"
        )

    def _serve(self, line: socket.socket) -> bool:
        """Answer the server until it is done, which gives True, or the line breaks."""
        while (message := _received(line)) is not None:
            if message.kind is MessageKind.STOP:
                return True
            _send(line, self._answer(message))
        return False

    def _answer(self, message: WireMessage) -> bytes | None:
        if message.kind is MessageKind.GRANT:
            return pack(self._pushed(message.grant))
        again = self.worker.refused(message.grant, message.text)
        return pack(plain(MessageKind.JOIN, self.number)) if again else None

    def _pushed(self, grant: Grant) -> WireMessage:
        values = self.shared.down[self.number].clone()
        push = self.worker.compute(grant, values)
        self.shared.up[self.number].copy_(push.wire)
        return WireMessage(MessageKind.PUSH, grant, push.fingerprint, push.loss, push.seconds)


def _received(line: socket.socket) -> WireMessage | None:
    """The next message, None where the line broke."""
    try:
        packet = line.recv(LONGEST)
    except OSError:
        return None
    return unpack(packet) if packet else None


def _send(line: socket.socket, packet: bytes | None) -> None:
    if packet is not None:
        with contextlib.suppress(OSError):  # a server that has gone: that is read next
            line.send(packet)


def work(job: Job, shared: SharedTensors, path: str, worker: int) -> None:
    """The process of one worker."""
    torch.set_num_threads(1)
    Remote(job, shared, path, worker).run()
