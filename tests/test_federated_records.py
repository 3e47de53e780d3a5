"""What travels comes back as it was, and bytes of anything else are one sentence."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from federations import on_classifier, small_model
from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import FederationError
from gradwire.federated import Assignment, Scaffold, Server
from gradwire.federated.client import Done, Kept
from gradwire.federated.engines import ClientJob, LocalTrainer, Lost
from gradwire.federated.packing import Record, pack, unpack
from gradwire.federated.records import (
    job_of,
    of_job,
    of_outcome,
    of_update,
    outcome_of,
    update_of,
)


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


def bits(value: Any) -> Any:
    """All that a job or an outcome has, to be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, value.numpy().tobytes()
    if isinstance(value, ErrorMemory):
        return bits(value.owed)
    if isinstance(value, Kept):
        return bits(value.vectors), bits(value.memories)
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [bits(part) for part in value]
    return value


def test_jobs_and_outcomes_come_back_bit_for_bit() -> None:
    job, done = trained()
    assert bits(job_of(unpack(pack(of_job(job))))) == bits(job)
    again = outcome_of(unpack(pack(of_outcome(done))))
    assert bits(again) == bits(done)
    assert isinstance(again, Done)
    assert again.update.nbytes == done.update.nbytes
    lost = Lost(7, "client 7 raised ValueError: ü")
    assert outcome_of(unpack(pack(of_outcome(lost)))) == lost


def test_what_comes_back_is_a_copy() -> None:
    packed = pack(Record({}, {"model": torch.ones(3)}))
    first, second = unpack(packed), unpack(packed)
    first.tensors["model"].zero_()
    assert second.tensors["model"].tolist() == [1, 1, 1]


def test_numbers_of_numpy_and_a_loss_that_is_not_finite_travel() -> None:
    update = trained()[1].update._replace(examples=np.int64(20), loss=math.nan)
    back = update_of(unpack(pack(of_update(update))))
    assert back.examples == 20
    assert type(back.examples) is float
    assert math.isnan(back.loss)


def test_bytes_are_those_of_a_safetensors_file() -> None:
    packed = pack(Record({"round": 3}, {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.uint8)}))
    length = int.from_bytes(packed[:8], "little")
    assert json.loads(packed[8 : 8 + length]) == {
        "__metadata__": {"gradwire": '{"round": 3}'},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
    }
    assert packed[8 + length :] == torch.ones(2).numpy().tobytes() + bytes(3)


def with_header(**table: Any) -> bytes:
    header = json.dumps({"__metadata__": {"gradwire": "{}"}, **table}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "nothing": b"",
    "a length alone": bytes([255] * 8),
    "no JSON": (4).to_bytes(8, "little") + b"abcd",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "no tensor": with_header(),
    "nested deeply": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "a matrix": with_header(x=entry(shape=[2, 2])),
    "another dtype": with_header(x=entry(dtype="I64", shape=[2])),
    "a negative size": with_header(x=entry(shape=[-4], offsets=[0, -16])),
    "an enormous size": with_header(x=entry(shape=[10**30], offsets=[0, 4 * 10**30])),
    "a fraction": with_header(x=entry(shape=[4.0])),
    "other places": with_header(x=entry(offsets=[4, 20])),
    "too short": with_header(x=entry(shape=[5], offsets=[0, 20])),
    "too long": with_header(x=entry(shape=[3], offsets=[0, 12])),
    "an entry that is none": with_header(x=3),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_bytes_are_one_sentence(kind: str) -> None:
    with pytest.raises(FederationError, match="a record that is damaged or of another program") as raised:
        unpack(DAMAGED[kind])
    assert len(str(raised.value)) <= 256


def test_bytes_that_changed_on_the_way_never_crash() -> None:
    packed = pack(of_outcome(trained()[1]))
    length = int.from_bytes(packed[:8], "little")
    draw = random.Random(3)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(packed[: draw.randrange(len(packed))] if draw.random() < 0.2 else packed)
        if damaged:
            damaged[draw.randrange(min(len(damaged), 8 + length))] = draw.randrange(256)
        try:
            outcome_of(unpack(bytes(damaged)))
        except FederationError:
            refused += 1
    assert refused > 1000


WRONG: dict[str, dict[str, Any]] = {
    "client": {"client": -1},
    "round": {"round": True},
    "fingerprint": {"fingerprint": 3},
    "examples": {"examples": "many"},
    "steps": {"steps": 1.5},
    "loss": {"loss": 10**400},
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_of_another_form_are_named(name: str) -> None:
    record = of_update(trained()[1].update)
    with pytest.raises(FederationError, match=f"an update has .* of another form as '{name}'"):
        update_of(Record({**record.numbers, **WRONG[name]}, record.tensors))
    with pytest.raises(FederationError, match=f"an update has nothing as '{name}'"):
        update_of(Record({key: value for key, value in record.numbers.items() if key != name}, record.tensors))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("buffers", torch.zeros(3)),
        ("buffers", torch.zeros(2, 2, dtype=torch.float64)),
        ("wires/model", torch.zeros(3)),
    ],
)
def test_tensors_of_another_form_are_named(name: str, tensor: torch.Tensor) -> None:
    record = of_update(trained()[1].update)
    with pytest.raises(FederationError, match=f"a Tensor of another form as '{name}'"):
        update_of(Record(record.numbers, {**record.tensors, name: tensor}))


def test_a_job_or_an_outcome_without_its_parts_is_refused() -> None:
    job, done = trained()
    for record, read in ((of_job(job), job_of), (of_outcome(done), outcome_of)):
        for name in record.numbers:
            with pytest.raises(FederationError):
                read(Record({**record.numbers, name: None}, record.tensors))


def test_a_job_is_done_on_the_device_of_the_model() -> None:
    job, _ = trained()
    moved = job.on(torch.device("meta"))
    assert isinstance(moved.task, Assignment)
    tensors = [moved.task.model, moved.task.buffers, *moved.task.shared.values(), *moved.kept.vectors.values()]
    tensors += [memory.owed for memory in moved.kept.memories.values()]
    assert len(tensors) == 6
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert bits(job.on(torch.device("cpu"))) == bits(job)
