"""What travels on a socket behind the greeting: frames, and records that lie in shared memory beside it.

    8 bytes     length of the record, little-endian; its highest bit says that the record lies in shared memory
    8 bytes     number of the request, which its reply repeats; a peer's numbers rise
    data        the record (`gradwire.core.record`)

A frame of length 0 is a heartbeat.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import CommunicationError
from gradwire.core.record import memory
from gradwire.peers.protocol import Parts

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

SILENT_S = 30.0
"""Seconds without a sign of life after which the other end is taken for lost."""
BEATS = 4
"""Heartbeats in that time."""

_HEAD = struct.Struct("<QQ")
_IN_ROW = 1 << 63
_SMALL = 1 << 16
"""Bytes up to which copying takes less long than a call of the system."""
_INBOX = 1 << 16
"""Bytes of frames that are received at a time."""
_LEAST_IN_ROW = 1 << 14
"""Bytes of a record for which shared memory is faster than the socket."""


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
