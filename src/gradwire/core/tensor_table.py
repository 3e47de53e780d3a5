"""The header of the safetensors format: some text, and a table of where each tensor's bytes are.

8 bytes     length of the header, little-endian
header      JSON: {"__metadata__": {"gradwire": TEXT}, NAME: {"dtype", "shape", "data_offsets"}, ...}
data        the tensors' bytes, one behind the other
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 8  # bytes that say how long the header is


class TableEntry(NamedTuple):
    """A tensor whose bytes are data[begin:end]."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int


def header_of(text: str, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> bytes:
    """Return the header of a text and of tensors of the given dtypes, which the format calls by these names."""
    names = {dtype: name for name, dtype in dtypes.items()}
    table: dict[str, Any] = {"__metadata__": {"gradwire": text}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        table[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return json.dumps(table).encode()


def read_header(header: bytes, nbytes: int, dtypes: Mapping[str, torch.dtype]) -> tuple[str, dict[str, TableEntry]]:
    """Return the text and the entries of a header, in the order of the tensors, which fill `nbytes` without a gap.

    Raises:
        KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError: it is none of `header_of`.

    >>> dtypes = {"F32": torch.float32}
    >>> read_header(header_of("text", {"x": torch.zeros(2, 3)}, dtypes), 24, dtypes)
    ('text', {'x': TableEntry(dtype=torch.float32, shape=torch.Size([2, 3]), begin=0, end=24)})
    """
    table: dict[str, Any] = json.loads(header)
    text = table.pop("__metadata__")["gradwire"]
    entries: dict[str, TableEntry] = {}
    at = 0
    for name, entry in table.items():
        dtype, shape = dtypes[entry["dtype"]], torch.Size(entry["shape"])
        end = at + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [at, end] or not at <= end <= nbytes:
            raise ValueError(f"the place of {name!r}")
        entries[name] = TableEntry(dtype, shape, at, end)
        at = end
    if at != nbytes:
        raise ValueError("bytes of no tensor")
    return text, entries
