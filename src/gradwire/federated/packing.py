"""Numbers and flat tensors as one run of bytes, and back. Nothing in it can be executed.

The layout is that of the safetensors format:

    8 bytes     length of the header, little-endian
    header      JSON: {"__metadata__": {"gradwire": NUMBERS}, NAME: {"dtype", "shape", "data_offsets"}, ...}
    data        the tensors' bytes, one behind the other
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import FederationError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "U8": torch.uint8}
"""Of all tensors that travel."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = 8  # bytes that say how long the header is


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
    table: dict[str, Any] = {"__metadata__": {"gradwire": json.dumps(record.numbers)}}
    at = 0
    for name, tensor in tensors.items():
        span = [at, at + tensor.nbytes]
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    header = json.dumps(table).encode()
    data = [tensor.view(torch.uint8).numpy().data for tensor in tensors.values()]
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *data])


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
    start = _LENGTH + int.from_bytes(packed[:_LENGTH], "little")
    if start > len(packed):
        raise ValueError("its header is longer than all of it")
    table: dict[str, Any] = json.loads(packed[_LENGTH:start])
    numbers: dict[str, Any] = dict(json.loads(table.pop("__metadata__")["gradwire"]))
    tensors: dict[str, Tensor] = {}
    at = start
    for name, entry in table.items():
        tensors[name] = _tensor(packed, start, at, entry)
        at += tensors[name].nbytes
    if at != len(packed):
        raise ValueError("bytes of no tensor")
    return Record(numbers, tensors)


def _tensor(packed: bytes, start: int, at: int, entry: Mapping[str, Any]) -> Tensor:
    """The tensor of an entry, whose bytes are to begin at `at`; those of the first one begin at `start`."""
    dtype, (numel,) = DTYPES[entry["dtype"]], entry["shape"]
    end = at + numel * dtype.itemsize
    if entry["data_offsets"] != [at - start, end - start] or not at <= end <= len(packed):
        raise ValueError("the place of a tensor")
    return torch.frombuffer(bytearray(packed[at:end]), dtype=dtype) if numel else torch.empty(0, dtype=dtype)
