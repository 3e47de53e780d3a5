"""Our records as Flower's: tensors as an `ArrayRecord`, numbers as JSON in a `ConfigRecord`. Nothing is unpickled.

Flower keeps an array as the bytes of a `.npy` file. They are read here by hand and not by numpy's `load`, which would
first allocate whatever size their header claims.
"""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from gradwire.core.errors import FederationError
from gradwire.federated.client import Assignment, Terms
from gradwire.federated.packing import Record, checked
from gradwire.federated.records import Look, assignment_of, joined, of_assignment, part

MESSAGE = "gradwire"
"""The name of our part of a message."""
WHO = "query.gradwire"
"""The type of the message that asks a node which client it is."""
LONGEST = 256
"""Letters of what others have written that a sentence of ours repeats."""


def write(content: RecordDict, name: str, record: Record, made: dict[int, Array] | None = None) -> RecordDict:
    """Write a record into a message or a state; return that.

    Args:
        content: where to; what it has of that name is overwritten.
        name: of the record.
        record: what.
        made: arrays by `id` of their tensors. Those that are there are used, and others added, so that a model that
            goes to many is turned into bytes once.
    """
    made = {} if made is None else made
    for tensor in record.tensors.values():
        if id(tensor) not in made:
            made[id(tensor)] = Array(tensor.detach().cpu().numpy())
    content[f"{name}.arrays"] = ArrayRecord({key: made[id(tensor)] for key, tensor in record.tensors.items()})
    content[f"{name}.numbers"] = ConfigRecord({"json": json.dumps(record.numbers)})
    return content


def read(content: RecordDict, name: str) -> Record:
    """Return the record of a name.

    Raises:
        FederationError: there is none, or it is damaged.
    """

    def both(content: RecordDict) -> Record:
        numbers: dict[str, Any] = dict(json.loads(str(content.config_records[f"{name}.numbers"]["json"])))
        arrays = content.array_records[f"{name}.arrays"]
        return Record(numbers, {key: _tensor(array) for key, array in arrays.items()})

    return checked(both, content)


def _tensor(array: Array) -> Tensor:
    if array.stype != "numpy.ndarray":
        raise ValueError(f"an array in the form {array.stype[:80]!r}")
    file = io.BytesIO(array.data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version of numpy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    values = np.frombuffer(array.data, dtype, offset=file.tell())
    if values.shape != shape:
        raise ValueError("an array that is no vector, or was cut")
    return torch.from_numpy(values.copy())


# Messages ------------------------------------------------------------------------------------------------------------


class Order(NamedTuple):
    """What the strategy sends to one client.

    Attributes:
        task: what the server asks.
        token: of the round; the answer has to repeat it.
        taken: the last round whose update of this client was taken up, None where none ever was.
        seed: of the run.
        settings: of the terms, as text, which have to be the client's own.
    """

    task: Assignment
    token: str
    taken: int | None
    seed: int
    settings: dict[str, str]


def settings_of(terms: Terms) -> dict[str, str]:
    """What server and clients have to agree on, as text."""
    parts = {"method": terms.method, "local": terms.local, "update": terms.update}
    return {**{name: repr(part) for name, part in parts.items()}, "model": terms.fingerprint}


def of_order(order: Order) -> Record:
    """The record of an order."""
    numbers = {"token": order.token, "taken": order.taken, "seed": order.seed, "settings": order.settings}
    return joined(numbers, task=of_assignment(order.task))


def order_of(record: Record) -> Order:
    """The order that `of_order` was given.

    Raises:
        FederationError: a record of something else.
    """
    look, settings = Look(record, "an order"), record.numbers.get("settings")
    taken = None if record.numbers.get("taken") is None else look.count("taken")
    if not isinstance(settings, dict) or not isinstance(record.numbers.get("seed"), int):
        raise FederationError("an order without settings or seed: the server is no gradwire strategy of this version")
    told = {str(name): str(text) for name, text in settings.items()}
    return Order(assignment_of(part(record, "task")), look.text("token"), taken, record.numbers["seed"], told)


def plain(text: object) -> str:
    """What somebody else has written: one line without control characters, and not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(text))
    return " ".join(line.split())[:LONGEST]
