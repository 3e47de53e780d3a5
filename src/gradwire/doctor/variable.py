"""An environment variable that a library reads, and the tables of them by name."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.doctor.kinds import PLAIN, Kind

Version = tuple[int, ...]


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: of it.
        kind: how its value is read.
        purpose: what it is for, in a few words.
        since: the version of its library that reads it first; None where that is long ago or unknown.
        removed: the version from which on nothing reads it.
        instead: what to do in its place, where it is old.
        alike: whether all ranks must have the same value: they choose algorithms by it, and wait for each other.
        source: the document that tells of it.
    """

    name: str
    kind: Kind = PLAIN
    purpose: str = ""
    since: str | None = None
    removed: str | None = None
    instead: str | None = None
    alike: bool = False
    source: str = ""


def version_of(text: str | None) -> Version | None:
    """The numbers of a version; None where there are none.

    >>> version_of("2.13.0+cpu"), version_of("2.4rc1"), version_of(None)
    ((2, 13, 0), (2, 4), None)
    """
    numbers: list[int] = []
    for part in (text or "").partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers) or None
