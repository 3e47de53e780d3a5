"""What travels comes back as it was, and bytes of anything else are one sentence that names what is wrong."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from federations import on_classifier, small_model
from gradwire.adapters.flower.content import NodeAnswer, NodeIdentity, Order, RoundOrder
from gradwire.adapters.flower.memory import KeptAfter
from gradwire.core.errors import RecordError
from gradwire.core.record import Record, pack, unpack
from gradwire.federated import Assignment, Scaffold, Server, Update
from gradwire.federated.client import Done, Kept
from gradwire.federated.engines import ClientJob, LocalTrainer, Lost, Outcome
from gradwire.federated.processes import WorkerReady


@functools.cache
def trained() -> tuple[ClientJob, Done]:
    """A job with memory, and what becomes of it."""
    simulation = on_classifier(sample=12, method=Scaffold(), update="topk:0.2")
    simulation.round()
    server: Server = simulation.server
    trainer = LocalTrainer(small_model(), simulation.federation)
    kept = simulation._kept[3]  # pyright: ignore[reportPrivateUsage]
    job = ClientJob(server.begin()[3], kept, 0.5)
    outcome = trainer.do(server.terms, job)
    assert isinstance(outcome, Done)
    return job, outcome


def records() -> dict[str, tuple[Record, Any]]:
    """One of each kind, and as what it is read."""
    job, done = trained()
    task = job.task
    told = RoundOrder(task, "token", "-5", {"method": "FedAvg()"})
    return {
        "Assignment": (task, Assignment),
        "Update": (done.update, Update),
        "Kept": (done.kept, Kept),
        "ClientJob": (job, ClientJob),
        "Done": (done, Outcome),
        "Lost": (Lost(7, "client 7 raised ValueError: ü"), Outcome),
        "Order": (Order(3, 2), Order),
        "first Order": (Order(3, None), Order),
        "RoundOrder": (told, RoundOrder),
        "NodeAnswer": (NodeAnswer("token", done, forgot=True), NodeAnswer),
        "lost NodeAnswer": (NodeAnswer("", Lost(0, "why")), NodeAnswer),
        "NodeIdentity": (NodeIdentity(4), NodeIdentity | Lost),
        "KeptAfter": (KeptAfter(3, done.kept), KeptAfter),
    }


KINDS = tuple(records())


def bits(value: Any) -> Any:
    """All that a record has, to be compared."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.shape, value.numpy().tobytes()
    if isinstance(value, Record):
        return type(value).__name__, {name: bits(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: bits(part) for name, part in value.items()}
    return value


# What comes back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_records_come_back_bit_for_bit(kind: str) -> None:
    record, wanted = records()[kind]
    for packed in (pack(record), bytearray(pack(record)), torch.frombuffer(bytearray(pack(record)), dtype=torch.uint8)):
        assert bits(unpack(packed, wanted)) == bits(record)


def test_an_update_that_comes_back_has_its_bytes() -> None:
    _, done = trained()
    again = unpack(pack(done), Outcome)
    assert isinstance(again, Done)
    assert again.update.nbytes == done.update.nbytes > 0


def test_what_comes_back_is_a_copy() -> None:
    packed = pack(trained()[0])
    first, second = unpack(packed, ClientJob), unpack(packed, ClientJob)
    first.task.model.zero_()
    assert torch.equal(second.task.model, trained()[0].task.model)


@pytest.mark.parametrize("number", [np.int64(20), np.float64(20), np.float32(20), 20])
def test_numbers_of_numpy_travel(number: Any) -> None:
    back = unpack(pack(trained()[1].update.replace(examples=number)), Update)
    assert back.examples == 20
    assert type(back.examples) is float


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 5e-324, -0.0])
def test_every_double_travels(loss: float) -> None:
    back = unpack(pack(trained()[1].update.replace(loss=loss)), Update).loss
    assert np.float64(back).tobytes() == np.float64(loss).tobytes()


vectors = st.lists(st.floats(width=32), max_size=9).map(torch.tensor).map(lambda values: values.reshape(-1).float())
updates = st.builds(
    Update,
    client=st.integers(0, 2**63),
    round=st.integers(0, 2**63),
    fingerprint=st.text(),
    examples=st.floats(),
    steps=st.integers(0, 10**6),
    wires=st.dictionaries(st.text(), vectors.map(lambda values: values.view(torch.uint8)), max_size=3),
    buffers=vectors.map(lambda values: values.double()),
    loss=st.floats(),
)


@given(updates, st.dictionaries(st.text(), vectors, max_size=3))
@settings(deadline=None, max_examples=60)
def test_any_update_comes_back(update: Update, kept: dict[str, Tensor]) -> None:
    done = Done(update, Kept(kept))
    assert repr(bits(unpack(pack(done), Outcome))) == repr(bits(done))


def test_bytes_are_those_of_a_safetensors_file() -> None:
    packed = pack(KeptAfter(3, Kept({"a": torch.ones(2), "b": torch.zeros(3)})))
    length = int.from_bytes(packed[:8], "little")
    table, body = json.loads(packed[8 : 8 + length]), packed[8 + length :]
    assert (8 + length) % 64 == 0
    assert list(table) == ["0", "1", "fields"]
    assert table["0"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert table["1"] == {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]}
    assert body[:20] == torch.ones(2).numpy().tobytes() + bytes(12)
    told = {"round": 3, "kept": {"vectors": {"a": 0, "b": 1}, "memories": {}}}
    assert table["fields"] == {"dtype": "U8", "shape": [len(body) - 20], "data_offsets": [20, len(body)]}
    assert msgspec.msgpack.decode(body[20:]) == told


# Bytes of something else ----------------------------------------------------------------------------------------------


def with_header(**table: Any) -> bytes:
    header = json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


def entry(dtype: Any = "U8", shape: Any = (16,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "nothing": b"",
    "a length alone": bytes([255] * 8),
    "no JSON": (4).to_bytes(8, "little") + b"abcd",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "nested deeply": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "no fields": with_header(x=entry()),
    "a tensor of another name": with_header(x=entry(shape=[8], offsets=[0, 8]), fields=entry("U8", [8], [8, 16])),
    "another dtype": with_header(fields=entry(dtype="C64", shape=[2])),
    "a negative size": with_header(fields=entry(shape=[-16], offsets=[0, -16])),
    "an enormous size": with_header(fields=entry(shape=[10**30], offsets=[0, 10**30])),
    "a terabyte": with_header(fields=entry(shape=[10**12], offsets=[0, 10**12])),
    "a fraction": with_header(fields=entry(shape=[16.5])),
    "other places": with_header(fields=entry(offsets=[4, 20])),
    "too short": with_header(fields=entry(shape=[20], offsets=[0, 20])),
    "too long": with_header(fields=entry(shape=[12], offsets=[0, 12])),
    "an entry that is none": with_header(fields=3),
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("kind", [Update, ClientJob, Outcome])
def test_damaged_bytes_are_one_sentence(what: str, kind: Any) -> None:
    with pytest.raises(RecordError, match="a record that is damaged or of another program") as raised:
        unpack(DAMAGED[what], kind)
    assert len(str(raised.value)) <= 256


@pytest.mark.parametrize("kind", KINDS)
def test_cut_bytes_are_refused_at_every_length(kind: str) -> None:
    record, wanted = records()[kind]
    packed = pack(record)
    for length in range(len(packed)):
        with pytest.raises(RecordError):
            unpack(packed[:length], wanted)
    with pytest.raises(RecordError):
        unpack(packed + b"\0", wanted)


def fields_at(packed: bytes) -> int:
    """Where the MessagePack of a record begins."""
    length = int.from_bytes(packed[:8], "little")
    return 8 + length + json.loads(packed[8 : 8 + length])["fields"]["data_offsets"][0]


def test_bytes_that_changed_on_the_way_never_crash() -> None:
    """Of the header and the fields; a tensor of other values is for the server to judge."""
    packed = pack(trained()[1])
    at = [*range(8 + int.from_bytes(packed[:8], "little")), *range(fields_at(packed), len(packed))]
    draw = random.Random(3)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(packed[: draw.randrange(len(packed))] if draw.random() < 0.2 else packed)
        place = draw.choice(at)
        if place < len(damaged):
            damaged[place] = draw.randrange(256)
        try:
            unpack(bytes(damaged), Outcome)
        except RecordError:
            refused += 1
    assert refused > 1500


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_bytes_of_anybody_never_crash(data: bytes) -> None:
    fields = msgspec.msgpack.encode({"client": 3, "reason": "why"})
    table = json.dumps({"fields": entry("U8", [len(data)], [0, len(data)])}).encode()
    for wrong in (data, len(table).to_bytes(8, "little") + table + data, data + fields):
        with pytest.raises(RecordError):
            unpack(wrong, Outcome)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_none_of_another_kind(kind: str) -> None:
    record, wanted = records()[kind]
    for other, read_as in records().values():
        if type(other) is not type(record) and read_as != wanted and not isinstance(record, Lost):
            with pytest.raises(RecordError):
                unpack(pack(record), read_as)


def test_a_job_is_no_reply_of_a_worker() -> None:
    with pytest.raises(RecordError, match="no record: it has no 'type'"):
        unpack(pack(trained()[0]), WorkerReady | Outcome)


# Fields ---------------------------------------------------------------------------------------------------------------


def with_fields(packed: bytes, change: Callable[[Any], object]) -> bytes:
    """The record with other fields, whose tensors are the same."""
    length, begin = int.from_bytes(packed[:8], "little"), fields_at(packed)
    table, data = json.loads(packed[8 : 8 + length]), packed[8 + length : begin]
    told = msgspec.msgpack.decode(packed[begin:])
    change(told)
    fields = msgspec.msgpack.encode(told)
    table["fields"] = entry("U8", [len(fields)], [len(data), len(data) + len(fields)])
    header = json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + data + fields


def inside(told: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda part, name: part[name], path, told)


def parts(record: Record, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Record]]:
    """The record and those in it, with where they are."""
    yield path, record
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Record):
            yield from parts(value, (*path, name))


COUNTS, TEXTS, NUMBERS = (
    [-1, True, 1.5, "3", [3], {}, None],
    [3, True, 1.5, ["x"], {}, None, b"x"],
    ["3", True, [1.0], {}, None],
)
GROUPS: list[Any] = [3, "x", [0], None, {"x": "0"}, {"x": -1}, {"x": None}]
RECORDS: list[Any] = [3, "x", [], None]
TENSORS = [-1, 10**6, True, 1.5, "0", [0], {}, None]
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(("client", "round", "steps", "serial"), COUNTS),
    "taken": [value for value in COUNTS if value is not None],
    **dict.fromkeys(("fingerprint", "reason", "token"), TEXTS),
    **dict.fromkeys(("examples", "loss", "share"), NUMBERS),
    **dict.fromkeys(("model", "buffers", "owed"), TENSORS),
    **dict.fromkeys(("shared", "wires", "vectors"), GROUPS),
    "memories": [3, "x", [0], None, {"x": 0}, {"x": {}}, {"x": {"owed": 0, "more": 0}}],
    "settings": [*RECORDS, {"x": 3}],
    "seed": [5, "", "five", "5.0", "5 ", "- 5", "9" * 1001, None],
    "forgot": [0, "yes", None, []],
    **dict.fromkeys(("task", "kept", "update", "outcome"), RECORDS),
}
OPTIONAL = {"share", "forgot", "vectors", "memories", "serial"}
"""Fields that have a default, and have it where they are missing."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_that_is_missing_too_many_or_of_another_form_is_named(kind: str) -> None:
    record, wanted = records()[kind]
    packed = pack(record)
    assert bits(unpack(with_fields(packed, lambda told: None), wanted)) == bits(record)

    def refused(path: tuple[str, ...], change: Callable[[Any], object]) -> str:
        with pytest.raises(RecordError) as raised:
            unpack(with_fields(packed, lambda told: change(inside(told, path))), wanted)
        return str(raised.value)

    for path, part in parts(record):
        at = ".".join(path)
        said = refused(path, lambda told: told.update(more=1))
        assert f"{at} has 'more', which is unknown" in said
        for name in part.__struct_fields__:
            if name not in OPTIONAL:
                assert f"{at} has no {name!r}" in refused(path, lambda told, name=name: told.pop(name))
            for value in WRONG[name]:
                said = refused(path, lambda told, name=name, value=value: told.update({name: value}))
                assert f"its {'.'.join((*path, name))}" in said, (name, value)


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [("ClientJob", {"share": 1.0}), ("Kept", {"vectors": {}, "memories": {}}), ("NodeAnswer", {"forgot": False})],
)
def test_a_field_with_a_default_may_be_missing(kind: str, defaults: dict[str, Any]) -> None:
    record, wanted = records()[kind]
    bare = with_fields(pack(record), lambda told: [told.pop(name) for name in defaults])
    assert bits(unpack(bare, wanted)) == bits(record.replace(**defaults))


TAGGED = {"Done": "$", "Lost": "$", "NodeAnswer": "$.outcome", "NodeIdentity": "$"}


@pytest.mark.parametrize("kind", TAGGED)
def test_which_of_several_records_it_is_has_to_be_said(kind: str) -> None:
    record, wanted = records()[kind]
    path = tuple(TAGGED[kind].split(".")[1:])
    for tag in ("Kept", "", 3, None):
        with pytest.raises(RecordError, match="type"):
            unpack(with_fields(pack(record), lambda told, tag=tag: inside(told, path).update(type=tag)), wanted)
    with pytest.raises(RecordError, match="it has no 'type'" if not path else f"its {path[0]} has no 'type'"):
        unpack(with_fields(pack(record), lambda told: inside(told, path).pop("type")), wanted)


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("buffers", torch.zeros(3)),
        ("buffers", torch.zeros(2, 2, dtype=torch.float64)),
        ("buffers", torch.tensor(1.0, dtype=torch.float64)),
        ("model", torch.zeros(3, dtype=torch.float16)),
        ("model", torch.zeros(3, 1)),
        ("shared", {"control": torch.zeros(3, dtype=torch.uint8)}),
    ],
)
def test_tensors_of_another_form_are_named(field: str, tensor: Any) -> None:
    task = trained()[0].task.replace(**{field: tensor})
    with pytest.raises(
        RecordError, match=rf"no Assignment: its {field}.* should be a vector of torch.*, not a tensor of shape"
    ):
        unpack(pack(task), Assignment)


def test_wires_are_bytes_and_memories_are_float32() -> None:
    _, done = trained()
    with pytest.raises(RecordError, match=r"its wires\[...\] should be a vector of torch.uint8, not a tensor of"):
        unpack(pack(done.update.replace(wires={"model": torch.zeros(3)})), Update)
    memory = done.kept.memories["model"]
    doubled = Kept(memories={"model": memory.replace(owed=memory.owed.double())})
    with pytest.raises(RecordError, match=r"its memories.* should be a vector of torch.float32, not a tensor of"):
        unpack(pack(doubled), Kept)


def test_a_job_is_done_on_the_device_of_the_model() -> None:
    job, _ = trained()
    moved = job.on(torch.device("meta"))
    assert isinstance(moved.task, Assignment)
    tensors = [moved.task.model, moved.task.buffers, *moved.task.shared.values(), *moved.kept.vectors.values()]
    tensors += [memory.owed for memory in moved.kept.memories.values()]
    assert len(tensors) == 6
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert bits(job.on(torch.device("cpu"))) == bits(job)
