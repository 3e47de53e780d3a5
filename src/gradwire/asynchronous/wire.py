"""Messages of a fixed form between a server and its workers: numbers, and a sentence where a push was refused.

On one machine each is one packet of a Unix socket, and tensors lie in shared memory beside it; between machines tensors
follow their message (`sockets.frames`). Nothing is unpickled.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from gradwire.asynchronous.messages import Grant
from gradwire.core.errors import CommunicationError

_FORM = struct.Struct("<B6qdd")
LONGEST = 4096
"""Bytes of a packet."""


class MessageKind(IntEnum):
    """What a message says."""

    JOIN = 1
    """worker to server: I am here."""
    PUSH = 2
    """worker to server, with the payload."""
    GRANT = 3
    """server to worker, with the parameters as they are now."""
    REFUSED = 4
    """server to worker, with the reason."""
    STOP = 5
    """server to worker: all is done."""
    READ = 6
    """worker to server: what are the parameters now? It is no request to compute."""
    VALUES = 7
    """server to worker, after LOOK."""
    LEAVE = 8
    """worker to server: I compute no more, so nobody need wait for me; I may still LOOK."""


class WireMessage(NamedTuple):
    """One message; fields that its kind does not need are 0."""

    kind: MessageKind
    grant: Grant
    fingerprint: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    text: str = ""


def plain(kind: MessageKind, worker: int, text: str = "") -> WireMessage:
    """A message that is about no push."""
    return WireMessage(kind, Grant(worker, 0, 0, 0, 0), text=text)


def pack(message: WireMessage) -> bytes:
    """Return the packet of a message."""
    head = _FORM.pack(message.kind, *message.grant, message.fingerprint, message.loss, message.seconds)
    return head + message.text.encode()[: LONGEST - len(head)]


def unpack(packet: bytes) -> WireMessage:
    """Return the message of a packet.

    Raises:
        CommunicationError: a packet of another form.

    >>> unpack(pack(plain(MessageKind.JOIN, 3))).grant.worker
    3
    """
    try:
        kind, worker, number, version, life, steps, fingerprint, loss, seconds = _FORM.unpack_from(packet)
        grant = Grant(worker, number, version, life, steps)
        return WireMessage(
            MessageKind(kind), grant, fingerprint, loss, seconds, packet[_FORM.size :].decode(errors="replace")
        )
    except (struct.error, ValueError) as error:
        raise CommunicationError(f"a packet of {len(packet)} bytes that is no message: {error}") from error
