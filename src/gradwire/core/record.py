"""Typed records: what travels between processes and what is kept, as numbers, texts and tensors.

A record is a subclass of `Record` whose annotations say what each field holds. `pack` turns it into bytes in the layout
of safetensors (`gradwire.core.tensor_table`), so that any reader of that format shows its tensors:

    8 bytes     length of the header, little-endian
    header      JSON: {NAME: {"dtype", "shape", "data_offsets"}, ...}, filled up with spaces
    data        the tensors "0", "1", ... in the order of the fields; last the tensor "fields", MessagePack of all else

`unpack` checks everything before it returns: lengths, the table, and each field against its annotation. Nothing that
came from outside is executed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Number
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from gradwire.core.checked import sentence, shown, thread_safe
from gradwire.core.errors import RecordError
from gradwire.core.tensor_table import LENGTH, TableEntry, header_of, read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Of tensors in records."""

ALIGNMENT = 64
"""Bytes. A tensor in a record is aligned as a new one is, since matrix products round by where a tensor lies."""

_FIELDS = "fields"
_LAYOUTS = 256
"""Headers that are remembered, each way."""
_LONGEST_KEPT = 1024
"""Bytes of a header that is remembered once it was read, so that a peer cannot fill the memory with them."""

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number of 0 or more."""

R = TypeVar("R")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What travels or is kept. A subclass names its fields with their types.

    Fields hold numbers, texts, lists and mappings of these, other records, and tensors (`Floats`, `Singles`, `Doubles`,
    `Bytes`).

    >>> class Step(Record, frozen=True):
    ...     number: Count
    ...     change: Floats
    >>> unpack(pack(Step(3, torch.ones(2))), Step)
    Step(number=3, change=tensor([1., 1.]))
    >>> unpack(pack(Step(-1, torch.ones(2))), Step)
    Traceback (most recent call last):
        ...
    gradwire.core.errors.RecordError: no Step: its number should be a whole number from 0
    """

    def replace(self, **changes: Any) -> Self:
        """Return the same record with other values in some fields."""
        return msgspec.structs.replace(self, **changes)

    def on(self, device: torch.device) -> Self:
        """Return the same record with its tensors on a device."""
        return _on(self, device)

    _replace = replace  # as named tuples have it, which some of these records were


class _Vector(type):
    """The types of a record's tensors: an instance is a tensor of one dimension and of one of the type's dtypes."""

    dtypes: tuple[torch.dtype, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and instance.dim() == 1 and instance.dtype in cls.dtypes


if TYPE_CHECKING:
    Floats = Singles = Doubles = Bytes = Tensor
else:

    class Floats(metaclass=_Vector):
        """A vector of float32 or float64."""

        dtypes = (torch.float32, torch.float64)

    class Singles(metaclass=_Vector):
        """A vector of float32."""

        dtypes = (torch.float32,)

    class Doubles(metaclass=_Vector):
        """A vector of float64."""

        dtypes = (torch.float64,)

    class Bytes(metaclass=_Vector):
        """A vector of uint8."""

        dtypes = (torch.uint8,)


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Record):
        return value.replace(**{name: _on(getattr(value, name), device) for name in value.__struct_fields__})
    if isinstance(value, Mapping):
        return {name: _on(part, device) for name, part in cast("Mapping[str, Any]", value).items()}
    return [_on(part, device) for part in cast("list[Any]", value)] if isinstance(value, list) else value


# Writing --------------------------------------------------------------------------------------------------------------


def pack(record: object) -> bytes:
    """Return a record as bytes, for `unpack`."""
    return b"".join(pieces(record))


def pieces(record: object) -> list[bytes | memoryview]:
    """Return what `pack` joins, without copying the tensors: for those who write into a socket or a file."""
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            is_plain = value.is_cpu and not value.requires_grad and value.is_contiguous()
            tensors.append(value if is_plain else value.detach().cpu().contiguous())
            return len(tensors) - 1
        if isinstance(value, Number):  # of numpy
            return cast("Any", value).item()
        raise NotImplementedError(f"a record holds no {type(value).__name__}")

    fields = msgspec.msgpack.encode(record, enc_hook=plain)
    header = _header(tuple([(tensor.dtype, tensor.shape) for tensor in tensors]), len(fields))
    return [header, *map(memory, tensors), fields]


@lru_cache(maxsize=_LAYOUTS)
def _header(layout: tuple[tuple[torch.dtype, torch.Size], ...], fields: int) -> bytes:
    """The header of tensors like these and so many bytes of fields, behind its length; few layouts are in use."""
    alike = {
        str(number): torch.empty(shape, dtype=dtype, device="meta") for number, (dtype, shape) in enumerate(layout)
    }
    header = header_of(alike, DTYPES, raw={_FIELDS: fields})
    header += b" " * (-(LENGTH + len(header)) % ALIGNMENT)
    return len(header).to_bytes(LENGTH, "little") + header


def memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return (flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)).numpy().data


# Reading --------------------------------------------------------------------------------------------------------------


def unpack(packed: bytes | bytearray | memoryview | Tensor, kind: type[R] | Any) -> R:
    """Return the record of some bytes. Its tensors may share their memory.

    Args:
        packed: what `pack` returned.
        kind: the class of the record, or a union of such classes.

    Raises:
        RecordError: bytes that are damaged, or of another record. A field at fault is named.
    """
    what = kind.__name__ if isinstance(kind, type) else "record"
    try:
        fields, tensors = _opened(packed)
        return _DECODERS.of(kind).decode(fields, tensors)
    except msgspec.ValidationError as error:
        raise RecordError(f"no {what}: {sentence(error)}") from error
    except (
        msgspec.MsgspecError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        RecursionError,
    ) as error:
        told = f"{type(error).__name__}: {error}"[:120]
        raise RecordError(f"a record that is damaged or of another program ({told})") from error


class _Decoder:
    """Reads the fields of one kind of record; it refers to the tensors of the one that is read just now."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(thread_safe(kind), dec_hook=self._tensor)
        self._tensors: Sequence[Tensor] = ()

    def decode(self, fields: memoryview, tensors: Sequence[Tensor]) -> Any:
        self._tensors = tensors
        try:
            return self._decoder.decode(fields)
        finally:
            self._tensors = ()

    def _tensor(self, wanted: Any, value: object) -> Tensor:
        """The tensor that a field refers to; msgspec checks afterwards that it is one of those wanted."""
        found = self._tensors[value] if type(value) is int and 0 <= value < len(self._tensors) else None
        if found is not None and isinstance(found, wanted):
            return found
        dtypes = " or ".join(map(str, wanted.dtypes))
        raise ValueError(f"Expected a vector of {dtypes}, not {'something else' if found is None else shown(found)}")


class _Decoders(threading.local):
    """Those of each thread: making one for a union of many classes takes longer than reading a record."""

    def __init__(self) -> None:
        self._found: dict[Any, _Decoder] = {}

    def of(self, kind: Any) -> _Decoder:
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = _Decoder(kind)
        return found


_DECODERS = _Decoders()


def _opened(packed: bytes | bytearray | memoryview | Tensor) -> tuple[memoryview, Sequence[Tensor]]:
    """The MessagePack of a record, and its tensors."""
    data = memory(packed) if isinstance(packed, Tensor) else memoryview(packed)
    start = LENGTH + int.from_bytes(data[:LENGTH], "little")
    if start > len(data):
        raise ValueError("its header is longer than all of it")
    read = _table if start <= _LONGEST_KEPT else _table.__wrapped__
    entries, fields = read(bytes(data[LENGTH:start]), len(data) - start)
    tensors = [_read(data[start + entry.begin : start + entry.end], entry) for entry in entries]
    return data[start + fields.begin : start + fields.end], tensors


@lru_cache(maxsize=_LAYOUTS)
def _table(header: bytes, nbytes: int) -> tuple[tuple[TableEntry, ...], TableEntry]:
    """The places of a record's tensors, and of its fields."""
    _, entries = read_header(header, nbytes, DTYPES)
    fields = entries.pop(_FIELDS)
    if any(name != str(number) for number, name in enumerate(entries)):
        raise ValueError("its tensors have other names")
    return tuple(entries.values()), fields


def _read(content: memoryview, entry: TableEntry) -> Tensor:
    """The tensor of these bytes: in their place where that is aligned and may be written to, else a copy."""
    if not len(content):
        return torch.empty(entry.shape, dtype=entry.dtype)
    if content.readonly:
        return torch.frombuffer(bytearray(content), dtype=entry.dtype).view(entry.shape)
    found = torch.frombuffer(content, dtype=entry.dtype)
    if len(entry.shape) != 1:
        found = found.view(entry.shape)
    return found if found.data_ptr() % ALIGNMENT == 0 else found.clone()
