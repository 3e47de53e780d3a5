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
from gradwire.core.record import ALIGNMENT, memory
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
"""Bytes of a block of memory that frames are received in."""
_ALIGNED = ALIGNMENT - _HEAD.size
"""Where a frame begins in a block of memory whose record is to be aligned."""
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
    """Return the pieces to send for a record: one for a short record, and only a head for one that fits into a row."""
    length = sum(map(len, parts))
    if rows is not None and _LEAST_IN_ROW <= length <= len(rows.out):
        at = 0
        for part in parts:
            rows.out[at : at + len(part)] = part
            at += len(part)
        return (_HEAD.pack(length | _IN_ROW, number),)
    whole = (_HEAD.pack(length, number), *parts)
    return whole if length > _SMALL else (b"".join(whole),)


class LengthError(CommunicationError):
    """A frame that is longer than any can be; nothing was allocated for it."""


class Inbox:
    """Cuts what comes on a connection into frames, whose records stay where they were received.

    Blocks of memory are written to once, front to back, so nothing has to be copied out of them; who keeps a short
    record keeps the block that it is in.

    Args:
        most_bytes: the longest record.
        rows: shared memory.
    """

    def __init__(self, most_bytes: int, rows: RowPair | None) -> None:
        self._most, self._rows = most_bytes, rows
        self._block = _allocated(_INBOX)
        self._begin = self._end = _ALIGNED

    def space(self) -> memoryview:
        """Where the next bytes are to be written."""
        return self._block[self._end :]

    def take(self, nbytes: int) -> list[tuple[int, memoryview]]:
        """So many bytes have come; return the records that are complete, with the numbers of their requests.

        Raises:
            LengthError: as it says.
        """
        self._end += nbytes
        found: list[tuple[int, memoryview]] = []
        needed = _HEAD.size
        while (at := self._begin + _HEAD.size) <= self._end:
            length, number = _HEAD.unpack_from(self._block, self._begin)
            if length & _IN_ROW:
                found.append((number, self._in_row(length & ~_IN_ROW)))
                length = 0
            elif length > self._most:
                raise self._too_long(length)
            elif length > self._end - at:
                needed = _HEAD.size + length
                break
            elif length:  # a heartbeat has none
                found.append((number, self._block[at : at + length]))
            self._begin = at + length
        self._make_room(needed)
        return found

    def _make_room(self, nbytes: int) -> None:
        """Have a frame of so many bytes come, of which some may be there: where its record is aligned, if it can be."""
        here = self._end - self._begin
        if not here:
            self._begin = self._end = self._end + (_ALIGNED - self._end) % ALIGNMENT
        if len(self._block) - self._begin < nbytes:
            block = _allocated(max(_INBOX, _ALIGNED + nbytes))
            block[_ALIGNED : _ALIGNED + here] = self._block[self._begin : self._end]
            self._block, self._begin, self._end = block, _ALIGNED, _ALIGNED + here

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
    return sum(map(len, parts[1:-1]))


HEARTBEAT = _HEAD.pack(0, 0)


def shown(address: Address) -> str:
    """An address, for a sentence."""
    return address if isinstance(address, str) else f"port {address[1]} of {address[0]}"
