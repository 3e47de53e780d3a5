"""Messages on a stream: two lengths, the message in its fixed form, and the bytes of one tensor behind it.

A message is at most `LONGEST` bytes, so 4 bytes say its length; a part of the parameters may be of any size, so 8 bytes
say that of the data. Both ends must have the same `VERSION`, which ranks compare before they connect.

Who connects first says a secret that the ranks of a run share, so that strangers are not heard. Lengths are checked
before anything is allocated, and what arrives is numbers: nothing is unpickled or executed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gradwire.asynchronous.wire import LONGEST, WireMessage, pack, unpack
from gradwire.core.errors import CommunicationError

VERSION = 2
"""Of this form; 1 had 4 bytes for the length of the data."""

_LENGTHS = struct.Struct("<IQ")
HEAD = _LENGTHS.size
SECRET = 16
"""Bytes of the secret."""


class Frame(NamedTuple):
    """A message and what comes with it.

    Attributes:
        message: numbers and text.
        data: (b,) uint8, empty where nothing comes with it.
    """

    message: WireMessage
    data: Tensor


def head_of(message: WireMessage, nbytes: int) -> bytes:
    """Everything of a frame but its `nbytes` of data."""
    packed = pack(message)
    return _LENGTHS.pack(len(packed), nbytes) + packed


def view_of(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes."""
    return memoryview(cast("memoryview", data.view(torch.uint8).numpy())).cast("B")


def lengths_of(head: bytes, most: int) -> tuple[int, int]:
    """Lengths of a message and of its data.

    Raises:
        CommunicationError: longer than they can be.
    """
    message, data = _LENGTHS.unpack(head)
    if message > LONGEST or data > most:
        raise CommunicationError(f"a frame of {message} and {data} bytes, where {LONGEST} and {most} are the most")
    return message, data


async def read(reader: asyncio.StreamReader, most: int) -> Frame:
    """Read the next frame, with at most `most` bytes of data.

    Raises:
        CommunicationError: what is no frame.
        asyncio.IncompleteReadError: the stream has ended.
    """
    message, data = lengths_of(await reader.readexactly(HEAD), most)
    packed = await reader.readexactly(message)
    return Frame(unpack(packed), _tensor(bytearray(await reader.readexactly(data))))


def receive(line: socket.socket, most: int) -> Frame:
    """Read the next frame from a blocking socket.

    Raises:
        CommunicationError: what is no frame.
        OSError: the connection has ended, or was silent for longer than its timeout.
    """
    message, data = lengths_of(bytes(view_of(_exactly(line, HEAD))), most)
    packed = bytes(view_of(_exactly(line, message)))
    return Frame(unpack(packed), _exactly(line, data))


def send(line: socket.socket, message: WireMessage, data: Tensor) -> None:
    """Write a frame to a blocking socket.

    Raises:
        OSError: the connection has ended.
    """
    line.sendall(head_of(message, data.nbytes))
    line.sendall(view_of(data))


def _exactly(line: socket.socket, nbytes: int) -> Tensor:
    buffer = torch.empty(nbytes, dtype=torch.uint8)  # not filled with zeros before it is filled
    view, come = view_of(buffer), 0
    while come < nbytes:
        more = line.recv_into(view[come:])
        if not more:
            raise ConnectionResetError("the other side has closed the connection")
        come += more
    return buffer


def _tensor(buffer: bytearray) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
