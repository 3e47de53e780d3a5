"""What workers write into the store: heads of rounds, and lines of their logs. JSON, checked, never executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gradwire.core.checked import sentence, thread_safe
from gradwire.core.errors import CommunicationError

NO_COPY = -1

T = TypeVar("T")


class LogLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="says", tag=str.lower):
    """What a worker says in a log.

    Attributes:
        worker: its number, which no other worker ever had.
    """

    worker: int


class Came(LogLine, frozen=True):
    """What a worker says of itself when it comes to a round.

    Attributes:
        name: what people call it.
        copy: the round that gave the global copy it has, or `NO_COPY`.
        windows: how many windows its model has been trained for: of those who found a run, the first in this counts.
        steps: those of its window.
        samples: likewise.
        leaving: whether this is its last window.
    """

    name: str
    copy: int = NO_COPY
    windows: int = 0
    steps: int = 0
    samples: int = 0
    leaving: bool = False


class Closed(LogLine, frozen=True):
    """A worker closes the list."""


class Has(LogLine, frozen=True):
    """A trainer holds the mean that has this digest, and owes so much of the mean from then on."""

    digest: str
    owed: float


class Void(LogLine, frozen=True):
    """A worker gives the round up."""

    why: str


class Hands(LogLine, frozen=True):
    """The source hands so many bytes to each newcomer."""

    bytes: int


AnyLine = Came | Closed | Has | Void | Hands
"""What a log consists of."""


class ExpectedWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that is expected: its name, and the norm of what it owes of the mean."""

    name: str
    owed: float = 0.0


Members = Mapping[int, ExpectedWorker]
"""By number."""


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known as a round opens, alike to all who know the round before.

    Attributes:
        round: its number.
        copy: the round that gave the newest global copy; `NO_COPY` before the run is founded.
        expected: those who are waited for.
        lost: those who were lost since the last committed round.
        voids: how many rounds in a row were void.
    """

    round: int = 0
    copy: int = NO_COPY
    expected: Members = {}
    lost: Members = {}
    voids: int = 0


def written(record: Any) -> str:
    """Return a record as JSON, the same text on every worker."""
    return msgspec.json.encode(msgspec.to_builtins(record, str_keys=True), order="deterministic").decode()


def line_of(said: LogLine) -> str:
    """Return what a worker says as a line of a log."""
    return f"{written(said)}\n"


def parsed(raw: bytes | str, kind: type[T] | Any) -> T:
    """Return the record that JSON holds, whole and of the types that its class names.

    Args:
        raw: what `written` returned, or something else.
        kind: a class of records, or a union of some.

    Raises:
        CommunicationError: a field is missing, unknown or of another type; it is named. Or this is no JSON at all.

    >>> parsed('{"says": "closed", "worker": true}', AnyLine)
    Traceback (most recent call last):
        ...
    gradwire.core.errors.CommunicationError: what the store holds is no message of gradwire's (its worker should be \
a whole number, not true or false): versions differ between workers, or somebody else writes to the store \
(docs/trust.md says how to keep others out)
    """
    try:
        found = msgspec.json.decode(raw)
        record: T = msgspec.convert(found, thread_safe(kind), str_keys=True)
        _require_whole(found, msgspec.to_builtins(record, str_keys=True))
    except (ValueError, RecursionError) as error:  # msgspec's errors are among them
        raise CommunicationError(
            f"what the store holds is no message of gradwire's ({sentence(error)}): versions differ between workers, "
            "or somebody else writes to the store (docs/trust.md says how to keep others out)"
        ) from error
    return record


def _require_whole(found: Any, whole: Any, path: str = "$") -> None:
    """Refuse what leaves a field to its default: workers write all of them."""
    if not isinstance(whole, dict):
        return
    for key, value in whole.items():  # pyright: ignore[reportUnknownVariableType]
        if key not in found:
            raise ValueError(f"Object missing required field `{key}` - at `{path}`")
        _require_whole(found[key], value, f"{path}.{key}")
