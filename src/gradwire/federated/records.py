"""What travels in a federation as plain numbers and flat tensors by name, so that nobody has to unpickle anything.

A `Record` has numbers, strings and lists that JSON can hold, and tensors by name. What is read back is looked at first:
a record of another form gives a `FederationError`. Sizes are not looked at here but where a model is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import FederationError
from gradwire.federated.client import Assignment, Done, Kept, Update
from gradwire.federated.engines import ClientJob, Lost, Outcome
from gradwire.federated.packing import Record

_FLOATS = (torch.float32, torch.float64)


# What travels --------------------------------------------------------------------------------------------------------


def of_assignment(task: Assignment) -> Record:
    """What the server asks of a client."""
    tensors = {"model": task.model, "buffers": task.buffers, **_grouped("shared", task.shared)}
    return Record({"client": task.client, "round": task.round}, tensors)


def assignment_of(record: Record) -> Assignment:
    """The assignment that `of_assignment` was given.

    Raises:
        FederationError: a record of something else.
    """
    look = Look(record, "an assignment")
    return Assignment(
        client=look.count("client"),
        round=look.count("round"),
        model=look.tensor("model", *_FLOATS),
        buffers=look.tensor("buffers", torch.float64),
        shared=look.group("shared", *_FLOATS),
    )


def of_update(update: Update) -> Record:
    """What a client sends back."""
    numbers = {name: getattr(update, name) for name in ("client", "round", "fingerprint", "steps")}
    numbers |= {"examples": float(update.examples), "loss": float(update.loss)}  # from numpy's numbers too
    return Record(numbers, {"buffers": update.buffers, **_grouped("wires", update.wires)})


def update_of(record: Record) -> Update:
    """The update that `of_update` was given. A server still has to look whether it may count.

    Raises:
        FederationError: a record of something else.
    """
    look = Look(record, "an update")
    return Update(
        client=look.count("client"),
        round=look.count("round"),
        fingerprint=look.text("fingerprint"),
        examples=look.number("examples"),
        steps=look.count("steps"),
        wires=look.group("wires", torch.uint8),
        buffers=look.tensor("buffers", torch.float64),
        loss=look.number("loss"),
    )


def of_kept(kept: Kept) -> Record:
    """What a client keeps between its rounds."""
    owed = {name: memory.owed for name, memory in kept.memories.items()}
    return Record({}, {**_grouped("vectors", kept.vectors), **_grouped("memories", owed)})


def kept_of(record: Record) -> Kept:
    """What `of_kept` was given.

    Raises:
        FederationError: a record of something else.
    """
    look = Look(record, "what a client keeps")
    memories = look.group("memories", torch.float32)
    return Kept(look.group("vectors", *_FLOATS), {name: ErrorMemory(owed) for name, owed in memories.items()})


def of_job(job: ClientJob) -> Record:
    """A client's part of a round, with what it kept."""
    return joined({"share": float(job.share)}, task=of_assignment(job.task), kept=of_kept(job.kept))


def job_of(record: Record) -> ClientJob:
    """The job that `of_job` was given.

    Raises:
        FederationError: a record of something else.
    """
    share = Look(record, "a job").number("share")
    return ClientJob(assignment_of(part(record, "task")), kept_of(part(record, "kept")), share)


def of_outcome(outcome: Outcome) -> Record:
    """What became of a job: an update with what its client keeps, or why there is none."""
    if isinstance(outcome, Lost):
        return Record({"client": outcome.client, "lost": outcome.reason}, {})
    return joined({}, update=of_update(outcome.update), kept=of_kept(outcome.kept))


def outcome_of(record: Record) -> Outcome:
    """The outcome that `of_outcome` was given.

    Raises:
        FederationError: a record of something else.
    """
    if "lost" in record.numbers:
        look = Look(record, "an outcome")
        return Lost(look.count("client"), look.text("lost"))
    return Done(update_of(part(record, "update")), kept_of(part(record, "kept")))


# Groups and parts ----------------------------------------------------------------------------------------------------


def _grouped(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for name, tensor in tensors.items()}


def joined(numbers: dict[str, Any], **parts: Record) -> Record:
    """One record of several and of some numbers; `part` takes each out again."""
    tensors = {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in part.tensors.items()}
    return Record({**numbers, **{name: part.numbers for name, part in parts.items()}}, tensors)


def part(record: Record, name: str) -> Record:
    """One of the records that `joined` was given.

    Raises:
        FederationError: there is none of that name.
    """
    numbers = record.numbers.get(name)
    if not isinstance(numbers, dict):
        raise FederationError(f"a record without {name!r}: it was cut, or made by another version")
    return Record(cast(dict[str, Any], numbers), _inside(record, name))


def _inside(record: Record, group: str) -> dict[str, Tensor]:
    before = f"{group}/"
    return {name.removeprefix(before): t for name, t in record.tensors.items() if name.startswith(before)}


class Look:
    """Takes from a record what has to be there; all of it raises a `FederationError` where it is not.

    Args:
        record: from elsewhere.
        what: it should be, for the error.
    """

    def __init__(self, record: Record, what: str) -> None:
        self._record, self._what = record, what

    def count(self, name: str) -> int:
        """A whole number of 0 or more."""
        found = self._record.numbers.get(name)
        return self._good(name, found, isinstance(found, int) and not isinstance(found, bool) and found >= 0)

    def number(self, name: str) -> float:
        """Any number that a double can hold, also one that is not finite."""
        found = self._record.numbers.get(name)
        return self._good(name, found, isinstance(found, int | float) and _is_double(found))

    def text(self, name: str) -> str:
        """Return the string of that name."""
        found = self._record.numbers.get(name)
        return self._good(name, found, isinstance(found, str))

    def tensor(self, name: str, *dtypes: torch.dtype) -> Tensor:
        """A vector of one of some dtypes."""
        found = self._record.tensors.get(name)
        return self._good(name, found, found is not None and found.dim() == 1 and found.dtype in dtypes)

    def group(self, group: str, *dtypes: torch.dtype) -> dict[str, Tensor]:
        """The vectors of a group by name, each of one of some dtypes."""
        return {name: self.tensor(f"{group}/{name}", *dtypes) for name in _inside(self._record, group)}

    def _good(self, name: str, found: Any, good: bool) -> Any:
        if not good:
            kind = "nothing" if found is None else f"a {type(found).__name__} of another form"
            raise FederationError(f"{self._what} has {kind} as {name[:80]!r}: it was cut, or made by another version")
        return found


def _is_double(number: float) -> bool:
    try:
        return isinstance(number, float) or (not isinstance(number, bool) and math.isfinite(float(number)))
    except OverflowError:  # a whole number beyond all doubles
        return False
