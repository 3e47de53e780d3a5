"""What workers write into the store: heads of rounds, and lines of their logs. JSON, checked, never executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gradwire.core.errors import CommunicationError

NO_COPY = -1


@dataclass(frozen=True)
class Came:
    """What a worker says of itself when it comes to a round.

    Attributes:
        worker: its number, which no other worker ever had.
        name: what people call it.
        copy: the round that gave the global copy it has, or `NO_COPY`.
        windows: how many windows its model has been trained for: of those who found a run, the first in this counts.
        steps: those of its window.
        samples: likewise.
        leaving: whether this is its last window.
    """

    worker: int
    name: str
    copy: int = NO_COPY
    windows: int = 0
    steps: int = 0
    samples: int = 0
    leaving: bool = False


class ExpectedWorker(NamedTuple):
    """A worker that is expected: its name, and the norm of what it owes of the mean."""

    name: str
    owed: float = 0.0


Members = Mapping[int, ExpectedWorker]
"""By number."""


@dataclass(frozen=True)
class Head:
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
    expected: Members = field(default_factory=dict[int, ExpectedWorker])
    lost: Members = field(default_factory=dict[int, ExpectedWorker])
    voids: int = 0

    def to_json(self) -> str:
        """The same text on every worker."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, raw: bytes | str) -> Head:
        """Read a head.

        Raises:
            CommunicationError: it is none.
        """
        try:
            found: dict[str, Any] = json.loads(raw)
            expected, lost = _members(found["expected"]), _members(found["lost"])
            head = cls(found["round"], found["copy"], expected, lost, found["voids"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged() from error
        if not all(type(number) is int for number in (head.round, head.copy, head.voids)):
            raise damaged()
        return head


def _members(found: Mapping[str, Any]) -> dict[int, ExpectedWorker]:
    return {int(number): ExpectedWorker(str(name), float(owed)) for number, (name, owed) in found.items()}


def came_line(came: Came) -> str:
    """A worker is here."""
    return _line(came.worker, "came", **asdict(came))


def closed_line(worker: int) -> str:
    """The list is closed."""
    return _line(worker, "closed")


def has_line(worker: int, digest: str, owed: float) -> str:
    """A trainer holds the mean that has this digest, and owes so much of the mean from then on."""
    return _line(worker, "has", digest=digest, owed=float(owed))


def void_line(worker: int, why: str) -> str:
    """A worker gives the round up."""
    return _line(worker, "void", why=why[:500])


def bytes_line(worker: int, nbytes: int) -> str:
    """The source hands so many bytes to each newcomer."""
    return _line(worker, "hands", bytes=nbytes)


def _line(by: int, says: str, /, **more: Any) -> str:
    return json.dumps({"by": by, "says": says, **more}) + "\n"


def parsed(line: str) -> Mapping[str, Any]:
    """Read a line: who says what.

    Raises:
        CommunicationError: it is none.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged() from error
    if not isinstance(found, dict):
        raise damaged()
    for key, kind in (("by", int), ("says", str)):
        typed(found, key, kind)
    return found


def came_of(line: Mapping[str, Any]) -> Came:
    """What a worker says that is here."""
    kinds = {"worker": int, "name": str, "copy": int, "windows": int, "steps": int, "samples": int, "leaving": bool}
    return Came(**{key: typed(line, key, kind) for key, kind in kinds.items()})


def typed(line: Mapping[str, Any], key: str, kind: type) -> Any:
    """A value of a line.

    Raises:
        CommunicationError: it is missing, or of another kind.
    """
    value = line.get(key)
    if type(value) is not kind:
        raise damaged()
    return value


def damaged() -> CommunicationError:
    """What to raise where the store holds something else than gradwire writes."""
    return CommunicationError(
        "what the store holds is no message of gradwire's: versions differ between workers, or somebody else writes to "
        "the store (docs/trust.md says how to keep others out)"
    )
