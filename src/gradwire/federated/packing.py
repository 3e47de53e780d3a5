"""Numbers and flat tensors as one run of bytes, and back. Nothing in it can be executed.

The layout is that of the safetensors format (`gradwire.core.tensor_table`). The text in its header is the JSON of the
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import FederationError
from gradwire.core.tensor_table import LENGTH, TableEntry, header_of, read_header

DTYPES = {"F64": torch.float64, "F32": torch.float32, "U8": torch.uint8}
"""Of all tensors that travel."""


class Record(NamedTuple):
    """What is sent or stored.

    Attributes:
        numbers: numbers, strings, None, and lists and mappings of these.
        tensors: 1-d, by name; those of a group have names such as `wires/model`.
    """

    numbers: dict[str, Any]
    tensors: dict[str, Tensor]


def pack(record: Record) -> bytes:
    """Return the bytes of a record."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in record.tensors.items()}
    header = header_of(json.dumps(record.numbers), tensors, DTYPES)
    data = [tensor.view(torch.uint8).numpy().data for tensor in tensors.values()]
    return b"".join([len(header).to_bytes(LENGTH, "little"), header, *data])


def unpack(packed: bytes) -> Record:
    """Return the record of some bytes, whose tensors are copies.

    Raises:
        FederationError: bytes that are damaged, or were made by something else.

    >>> unpack(pack(Record({"round": 3}, {"model": torch.ones(2)})))
    Record(numbers={'round': 3}, tensors={'model': tensor([1., 1.])})
    """
    return checked(_unpack, packed)


def checked(read: Callable[[Any], Record], what: Any) -> Record:
    """Return what `read` makes of `what`; whatever it raises about its form becomes one sentence.

    Raises:
        FederationError: as said.
    """
    try:
        return read(what)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError, OverflowError) as error:
        if isinstance(error, FederationError):
            raise
        told = f"{type(error).__name__}: {error}"[:120]
        raise FederationError(f"a record that is damaged or of another program ({told}): it is left out") from error


def _unpack(packed: bytes) -> Record:
    start = LENGTH + int.from_bytes(packed[:LENGTH], "little")
    if start > len(packed):
        raise ValueError("its header is longer than all of it")
    numbers, entries = read_header(packed[LENGTH:start], len(packed) - start, DTYPES)
    data = memoryview(packed)[start:]
    return Record(dict(json.loads(numbers)), {name: _tensor(data, entry) for name, entry in entries.items()})


def _tensor(data: memoryview, entry: TableEntry) -> Tensor:
    (numel,) = entry.shape
    content = bytearray(data[entry.begin : entry.end])
    return torch.frombuffer(content, dtype=entry.dtype) if numel else torch.empty(0, dtype=entry.dtype)
