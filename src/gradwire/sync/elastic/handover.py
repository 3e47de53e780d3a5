"""The global copy on its way to a newcomer: exact, in fewer bytes, checked.

It has to arrive with all its bits, or newcomers would differ from the others for ever. So it is compressed without
loss: the bytes of numbers are sorted by their significance, and those sorts that have a pattern are deflated. In
float32 that is the one with the sign and the exponent, for a saving of about a sixth; what is still zero, such as a
momentum before its first window, costs next to nothing.

A payload is a record (`gradwire.core.record`), `PackedCopy`, and behind it a CRC-32 of 4 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire.core.errors import PayloadError, RecordError
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.core.record import Bytes, Record, memory, pack, unpack
from gradwire.drivers.interpreter import ask
from gradwire.drivers.process_group import GroupTransport

_CHECK_BYTES = 4
_SAMPLE_BYTES = 1 << 16
_WORTH = 0.95
"""A sample that deflate leaves larger than this share has no pattern: trying the rest would take long for nothing."""
_CHUNK = 1 << 28


class Plane(Record, frozen=True):
    """The bytes of one significance of a tensor's elements, deflated or as they are."""

    deflated: bool
    data: Bytes


class PackedCopy(Record, frozen=True):
    """Words, and the planes of all tensors, in order."""

    words: dict[str, int]
    planes: list[Plane]


def packed(words: Mapping[str, int], tensors: Iterable[Tensor]) -> Tensor:
    """Return words and tensors as one payload of bytes.

    >>> payload = packed({"windows": 3}, [torch.zeros(1000)])
    >>> payload.numel() < 1000, unpacked(payload, [torch.empty(1000)])[0]
    (True, {'windows': 3})
    """
    body = pack(PackedCopy(dict(words), [plane for tensor in tensors for plane in _planes(tensor)]))
    return torch.frombuffer(bytearray(body + _check(body)), dtype=torch.uint8)


def _check(body: bytes | memoryview) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECK_BYTES, "little")


def _planes(tensor: Tensor) -> list[Plane]:
    """The first bytes of all elements, then the second ones, and so on."""
    rows = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())
    return [_plane(column.contiguous()) for column in rows.unbind(1)]


def _plane(data: Tensor) -> Plane:
    """Deflated, where that pays."""
    sample = memory(data[:_SAMPLE_BYTES])
    if len(zlib.compress(sample, 1)) > _WORTH * len(sample):
        return Plane(deflated=False, data=data)
    return Plane(deflated=True, data=torch.frombuffer(bytearray(zlib.compress(memory(data), 1)), dtype=torch.uint8))


def unpacked(payload: Tensor, like: Sequence[Tensor]) -> tuple[dict[str, int], list[Tensor]]:
    """Return the words of a payload, and its tensors, of the shapes and dtypes of `like`.

    Raises:
        PayloadError: it is damaged, or of other tensors.
    """
    whole = memory(payload)
    body, check = whole[:-_CHECK_BYTES], whole[-_CHECK_BYTES:]
    if bytes(check) != _check(body):
        raise PayloadError("the global copy that was handed over is damaged: its checksum differs")
    try:
        found: PackedCopy = unpack(body, PackedCopy)
        if len(found.planes) != sum(tensor.element_size() for tensor in like):
            raise ValueError("it has another number of planes")
        planes = iter(found.planes)
        return found.words, [_tensor([next(planes) for _ in range(own.element_size())], own) for own in like]
    except (RecordError, ValueError, zlib.error) as error:
        raise PayloadError(f"the global copy that was handed over is of another model: {error}") from error


def _tensor(planes: Sequence[Plane], like: Tensor) -> Tensor:
    rows = np.empty((like.numel(), len(planes)), np.uint8)
    for place, plane in enumerate(planes):
        rows[:, place] = np.frombuffer(_inflated(plane, len(rows)), np.uint8)
    return torch.from_numpy(rows.reshape(-1)).view(like.dtype).view(like.shape)


def _inflated(plane: Plane, length: int) -> bytes | memoryview:
    """So many bytes, and never more, whatever the data promise."""
    data, inflater = memory(plane.data), zlib.decompressobj()
    found = inflater.decompress(data, length + 1) if plane.deflated else data
    if len(found) != length or (plane.deflated and not inflater.eof):
        raise ValueError("a tensor has another size")
    return found


# Messages of any length ---------------------------------------------------------------------------------------------


def send(payload: Tensor, transport: GroupTransport, to: int) -> None:
    """Send to one rank, and wait until it says that all has come: a connection that is closed early loses the end."""
    for chunk in payload.split(_CHUNK):
        ask(SendRecv(chunk, sends=(Message(to, chunk),)), transport)
    ask(SendRecv(torch.empty(0, dtype=torch.uint8), receives=(Expected(to, 1),)), transport)


def receive(like: Tensor, numel: int, transport: GroupTransport, source: int) -> Tensor:
    """Return what a rank sends: so many elements of the dtype of `like`."""
    sizes = [min(_CHUNK, numel - begin) for begin in range(0, numel, _CHUNK)]
    chunks = [ask(SendRecv(like, receives=(Expected(source, size),)), transport) for size in sizes]
    thanks = torch.ones(1, dtype=torch.uint8)
    ask(SendRecv(thanks, sends=(Message(source, thanks),)), transport)
    return torch.cat(chunks) if chunks else like.new_empty(0)
