"""The header of the safetensors format: a table of where each tensor's bytes are, and in files some text.

8 bytes     length of the header, little-endian
header      JSON: {"__metadata__": {"gradwire": TEXT}, NAME: {"dtype", "shape", "data_offsets"}, ...}
data        the tensors' bytes, one behind the other
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

LENGTH = 8  # bytes that say how long the header is

_METADATA = "__metadata__"
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PLACE = msgspec.json.Decoder(_Place)
_TEXTS = msgspec.json.Decoder(dict[str, str])


class TableEntry(NamedTuple):
    """A tensor whose bytes are data[begin:end]."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int


def header_of(
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    text: str | None = None,
    *,
    raw: Mapping[str, int] = MappingProxyType({}),
) -> bytes:
    """Return the header of tensors of the given dtypes, which the format calls by these names.

    Args:
        tensors: by name, in the order of their bytes.
        dtypes: by the format's names.
        text: to go with them.
        raw: names and lengths of runs of bytes behind the tensors; the format has them as tensors of uint8.
    """
    names = {dtype: name for name, dtype in dtypes.items()}
    table: dict[str, Any] = {} if text is None else {_METADATA: {"gradwire": text}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        table[name] = _Place(names[tensor.dtype], list(tensor.shape), (at, end))
        at = end
    for name, nbytes in raw.items():
        table[name] = _Place("U8", [nbytes], (at, at + nbytes))
        at += nbytes
    return msgspec.json.encode(table)


def read_header(header: bytes, nbytes: int, dtypes: Mapping[str, torch.dtype]) -> tuple[str, dict[str, TableEntry]]:
    """Return the text of a header, "" where it has none, and the entries of its tensors in the order of their bytes.

    The tensors fill `nbytes` without a gap.

    Raises:
        KeyError, ValueError, RuntimeError, RecursionError: it is none of `header_of`.

    >>> dtypes = {"F32": torch.float32}
    >>> read_header(header_of({"x": torch.zeros(2, 3)}, dtypes, "text"), 24, dtypes)
    ('text', {'x': TableEntry(dtype=torch.float32, shape=torch.Size([2, 3]), begin=0, end=24)})
    """
    try:
        table = _TABLE.decode(header)
        metadata = table.pop(_METADATA, None)
        text = "" if metadata is None else _TEXTS.decode(metadata)["gradwire"]
        places = {name: _PLACE.decode(raw) for name, raw in table.items()}
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    entries: dict[str, TableEntry] = {}
    at = 0
    for name, place in places.items():
        dtype = dtypes[place.dtype]
        end = at + math.prod(place.shape) * dtype.itemsize
        if place.data_offsets != (at, end) or end > nbytes:
            raise ValueError(f"the place of {name!r}")
        entries[name] = TableEntry(dtype, torch.Size(place.shape), at, end)
        at = end
    if at != nbytes:
        raise ValueError("bytes of no tensor")
    return text, entries
