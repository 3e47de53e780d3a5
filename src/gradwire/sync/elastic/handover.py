"""The global copy on its way to a newcomer: exact, in fewer bytes, checked.

It has to arrive with all its bits, or newcomers would differ from the others for ever. So it is compressed without
loss: the bytes of numbers are sorted by their significance, and those sorts that have a pattern are deflated. In
float32 that is the one with the sign and the exponent, for a saving of about a sixth; what is still zero, such as a
momentum before its first window, costs next to nothing.

    [bytes of the words: 8] [words: JSON] then of each plane [is deflated: 1] [bytes: 8] [data], and [CRC-32: 4]
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.core.errors import PayloadError
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.drivers.interpreter import ask
from gradwire.drivers.process_group import GroupTransport

_LENGTH, _PLANE, _CHECK = struct.Struct("<Q"), struct.Struct("<BQ"), struct.Struct("<I")
_SAMPLE_BYTES = 1 << 16
_WORTH = 0.95
"""A sample that deflate leaves larger than this share has no pattern: trying the rest would take long for nothing."""
_CHUNK = 1 << 28


def packed(words: Mapping[str, Any], tensors: Iterable[Tensor]) -> Tensor:
    """Return words and tensors as one payload of bytes.

    >>> payload = packed({"windows": 3}, [torch.zeros(1000)])
    >>> payload.numel() < 200, unpacked(payload, [torch.empty(1000)])[0]
    (True, {'windows': 3})
    """
    said = json.dumps(dict(words)).encode()
    parts = [_LENGTH.pack(len(said)), said]
    for tensor in tensors:
        for plane in _planes(tensor):
            data = _deflated(plane)
            parts += [_PLANE.pack(data is not None, len(data or plane)), data or plane]
    body = b"".join(parts)
    return torch.frombuffer(bytearray(body + _CHECK.pack(zlib.crc32(body))), dtype=torch.uint8)


def _planes(tensor: Tensor) -> list[bytes]:
    """The first bytes of all elements, then the second ones, and so on."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    rows = flat.view(torch.uint8).numpy().reshape(-1, flat.element_size())
    return [np.ascontiguousarray(rows[:, i]).tobytes() for i in range(rows.shape[1])]


def _deflated(plane: bytes) -> bytes | None:
    """None where that would not pay."""
    sample = plane[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) > _WORTH * len(sample):
        return None
    return zlib.compress(plane, 1)


def unpacked(payload: Tensor, like: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the words of a payload, and its tensors, of the shapes and dtypes of `like`.

    Raises:
        PayloadError: it is damaged, or of other tensors.
    """
    whole = payload.numpy().tobytes()
    body, check = whole[: -_CHECK.size], whole[-_CHECK.size :]
    if len(check) < _CHECK.size or _CHECK.unpack(check)[0] != zlib.crc32(body):
        raise PayloadError("the global copy that was handed over is damaged: its checksum differs")
    try:
        return _read(memoryview(body), like)
    except (struct.error, ValueError, zlib.error) as error:
        raise PayloadError(f"the global copy that was handed over is of another model: {error}") from error


def _read(body: memoryview, like: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    (length,) = _LENGTH.unpack_from(body)
    place = _LENGTH.size + length
    words, tensors = json.loads(bytes(body[_LENGTH.size : place])), list[Tensor]()
    for tensor in like:
        rows = np.empty((tensor.numel(), tensor.element_size()), np.uint8)
        for i in range(rows.shape[1]):
            is_deflated, length = _PLANE.unpack_from(body, place)
            place += _PLANE.size
            rows[:, i] = np.frombuffer(_inflated(body[place : place + length], is_deflated, len(rows)), np.uint8)
            place += length
        tensors.append(torch.from_numpy(rows.reshape(-1)).view(tensor.dtype).view(tensor.shape))
    if place != len(body):
        raise ValueError("it is longer than expected")
    return words, tensors


def _inflated(data: memoryview, is_deflated: int, length: int) -> bytes | memoryview:
    """So many bytes, and never more, whatever the data promise."""
    inflater = zlib.decompressobj()
    found = inflater.decompress(data, length + 1) if is_deflated else data
    if len(found) != length or (is_deflated and not inflater.eof):
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
