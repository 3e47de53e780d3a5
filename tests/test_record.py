"""Records: what was packed is unpacked, and whatever else is refused, with the name of the field at fault."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.core.errors import RecordError
from gradwire.core.record import ALIGNMENT, Bytes, Count, Doubles, Floats, Record, memory, pack, pieces, unpack


class Inner(Record, frozen=True):
    number: Count
    raw: Bytes


class Whole(Record, frozen=True, tag=True):
    number: Count
    share: float
    name: str
    counts: list[Count]
    table: dict[str, float]
    inner: Inner
    values: Floats
    exact: Doubles
    maybe: Floats | None = None


class Other(Record, frozen=True, tag=True):
    number: Count


class Third(Record, frozen=True, tag=True):
    raw: Bytes


def vectors(dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    return st.lists(st.floats(width=32), max_size=9).map(lambda values: torch.tensor(values, dtype=dtype))


RAW = st.binary(max_size=9).map(lambda content: torch.tensor(list(content), dtype=torch.uint8))
NUMBERS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    Whole,
    NUMBERS,
    st.floats(),
    st.text(),
    st.lists(NUMBERS),
    st.dictionaries(st.text(), st.floats()),
    st.builds(Inner, NUMBERS, RAW),
    vectors(torch.float32) | vectors(torch.float64),
    vectors(torch.float64),
    st.none() | vectors(torch.float32),
)
SIMPLE = Whole(
    3,
    0.5,
    "name",
    [1, 2],
    {"x": 1.5},
    Inner(4, torch.arange(5, dtype=torch.uint8)),
    torch.tensor([1.0, float("nan"), float("-inf")]),
    torch.tensor([0.1, -0.0], dtype=torch.float64),
)
PACKED = pack(SIMPLE)


def rewritten(packed: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same record with other plain fields, in which tensors are numbers."""
    start = 8 + int.from_bytes(packed[:8], "little")
    header = json.loads(packed[8:start])
    begin, end = header["fields"]["data_offsets"]
    fields = msgspec.msgpack.decode(packed[start + begin : start + end])
    change(fields)
    plain = msgspec.msgpack.encode(fields)
    header["fields"] = {"dtype": "U8", "shape": [len(plain)], "data_offsets": [begin, begin + len(plain)]}
    table = json.dumps(header).encode()
    return len(table).to_bytes(8, "little") + table + packed[start : start + begin] + plain


def tensor_of(packed: bytes | memoryview) -> Tensor:
    """Its bytes, in their place where they may be written to."""
    writable = bytearray(packed) if isinstance(packed, bytes) else packed
    return torch.frombuffer(writable, dtype=torch.uint8)


# What was packed ----------------------------------------------------------------------------------------------------


@given(RECORDS)
def test_what_was_packed_is_unpacked(record: Whole) -> None:
    """Bit by bit: also NaN, infinities and zeros of either sign."""
    packed = pack(record)
    for kind in (Whole, Other | Whole):
        for form in (packed, bytearray(packed), memoryview(packed), tensor_of(packed)):
            assert pack(unpack(form, kind)) == packed


@given(RECORDS)
def test_pieces_are_what_is_packed_and_tensors_are_not_copied(record: Whole) -> None:
    parts = pieces(record)
    assert b"".join(parts) == pack(record)
    if record.values.numel():
        assert memory(record.values) in parts
        places = [tensor_of(part).data_ptr() for part in parts if isinstance(part, memoryview) and len(part)]
        assert record.values.data_ptr() in places


@given(RECORDS)
def test_tensors_are_aligned(record: Whole) -> None:
    found = unpack(bytearray(pack(record)), Whole)
    for tensor in (found.values, found.exact, found.inner.raw, *([] if found.maybe is None else [found.maybe])):
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0


def test_the_first_tensor_of_a_received_record_lies_where_it_came() -> None:
    buffer = tensor_of(PACKED).clone()
    found = unpack(buffer, Whole)
    assert buffer.data_ptr() < found.inner.raw.data_ptr() < buffer.data_ptr() + len(PACKED)


def test_tensors_may_lie_in_any_way() -> None:
    grid = torch.arange(12.0, requires_grad=True).view(3, 4)
    found = unpack(pack(msgspec.structs.replace(SIMPLE, values=grid[:, 1])), Whole)
    assert found.values.tolist() == [1, 5, 9]


def test_a_record_is_a_file_of_safetensors(tmp_path: Path) -> None:
    safetensors: Any = pytest.importorskip("safetensors.torch")
    found = safetensors.load(PACKED)
    assert found.keys() == {"0", "1", "2", "fields"}
    assert torch.equal(found["0"], SIMPLE.inner.raw)
    assert torch.equal(found["2"], SIMPLE.exact)


def test_what_is_no_record_is_not_packed() -> None:
    with pytest.raises(NotImplementedError, match="a record holds no set_iterator"):
        pack(msgspec.structs.replace(SIMPLE, name=iter({1})))


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [name for name in Whole.__struct_fields__ if name != "maybe"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    with pytest.raises(RecordError, match=f"no Whole: it.* has no '{field}'"):
        unpack(rewritten(PACKED, lambda fields: fields.pop(field)), Whole)


def test_a_field_too_many_is_named() -> None:
    with pytest.raises(RecordError, match=r"no Whole: it has 'more', which is unknown"):
        unpack(rewritten(PACKED, lambda fields: fields.update(more=1)), Whole)
    with pytest.raises(RecordError, match=r"no Whole: its inner has 'more', which is unknown"):
        unpack(rewritten(PACKED, lambda fields: fields["inner"].update(more=1)), Whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", -1),
        ("number", 1.5),
        ("number", True),
        ("number", None),
        ("share", "0.5"),
        ("name", 3),
        ("name", b"name"),
        ("counts", [1, -2]),
        ("counts", {}),
        ("table", {"x": None}),
        ("inner", 4),
        ("inner", {"number": "4", "raw": 0}),
        ("inner", {"number": 4, "raw": 1}),  # the tensor of `values`
        ("values", "1.0"),
        ("values", [1.0]),
        ("values", True),
        ("values", -1),
        ("values", 99),
        ("values", 0),  # of uint8
        ("exact", 1),  # of float32
        ("maybe", 0),
        ("type", "Another"),
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: object) -> None:
    with pytest.raises(RecordError, match=rf"no Whole: its {field}.* (should be|is) "):
        unpack(rewritten(PACKED, lambda fields: fields.update({field: value})), Whole)


def test_a_tensor_of_another_shape_is_refused() -> None:
    packed = pack(msgspec.structs.replace(SIMPLE, values=torch.zeros(2, 2)))
    with pytest.raises(
        RecordError, match=r"its values should be a vector of .*, not a tensor of shape \(2, 2\) and torch.float32"
    ):
        unpack(packed, Whole)


def test_another_record_is_refused() -> None:
    with pytest.raises(RecordError, match="no Whole: its type is 'Other', which is unknown"):
        unpack(pack(Other(1)), Whole)
    with pytest.raises(RecordError, match="no record: its type is 'Whole', which is unknown"):
        unpack(PACKED, Other | Third)


def test_what_was_cut_off_is_refused() -> None:
    for length in range(len(PACKED)):
        for form in (PACKED[:length], bytearray(PACKED[:length])):
            with pytest.raises(RecordError):
                unpack(form, Whole)


def test_what_is_longer_is_refused() -> None:
    with pytest.raises(RecordError):
        unpack(PACKED + b" ", Whole)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 8 * len(PACKED) - 1), min_size=1, max_size=4))
def test_flipped_bits_are_refused_or_change_a_value(bits: list[int]) -> None:
    damaged = bytearray(PACKED)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(RecordError):
        assert isinstance(unpack(damaged, Whole), Whole)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RecordError):
        unpack(noise, Whole)


def test_a_header_of_any_depth_and_any_length_is_refused() -> None:
    deep = b'{"0":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for length, header in ((len(deep), deep), (2**64 - 1, b"{}"), (2**63, b"{}"), (0, b"")):
        with pytest.raises(RecordError):
            unpack(length.to_bytes(8, "little") + header, Whole)


def test_fields_of_any_depth_are_refused() -> None:
    plain = b"\x91" * 100_000 + b"\x90"  # lists of one list
    table = json.dumps({"fields": {"dtype": "U8", "shape": [len(plain)], "data_offsets": [0, len(plain)]}}).encode()
    for kind in (Whole, list[Any]):
        with pytest.raises(RecordError):
            unpack(len(table).to_bytes(8, "little") + table + plain, kind)


class Executed:
    """Would be executed by whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickled = pickle.dumps(Executed(mark))
    table = json.dumps({"fields": {"dtype": "U8", "shape": [len(pickled)], "data_offsets": [0, len(pickled)]}}).encode()
    for packed in (pickled, len(table).to_bytes(8, "little") + table + pickled):
        with pytest.raises(RecordError):
            unpack(packed, Whole)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists()
