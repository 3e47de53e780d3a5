"""Readers of plain data: each turns a value into what it should be, or says where it stands and what it should be.

A file that was cut short, edited by hand or written by another program is so refused before anything is computed from
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from gradwire.bench.results import ResultsError

LARGEST = 1e100
"""No figure of a training is beyond it, and sums of smaller ones do not overflow."""

Read = Callable[[Any, str], Any]
"""Turns a plain value into what it should be; told where it stands, for the sentence that refuses it."""


def refuse(where: str, wanted: str, value: object) -> ResultsError:
    """The error of a value that is not what it should be."""
    shown = repr(value)
    return ResultsError(f"{where} should be {wanted}, not {shown if len(shown) <= 40 else shown[:40] + '...'}")


def text(value: Any, where: str) -> str:
    """Read a text, or refuse."""
    if not isinstance(value, str):
        raise refuse(where, "a text", value)
    return value.encode(errors="replace").decode()  # half a surrogate pair could not be written again


def flag(value: Any, where: str) -> bool:
    """Read true or false, or refuse."""
    if not isinstance(value, bool):
        raise refuse(where, "true or false", value)
    return value


def number(value: Any, where: str) -> float:
    """A number of a sensible size."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise refuse(where, "a number", value)
    return float(value)


def amount(value: Any, where: str) -> float:
    """A number that is not negative."""
    if number(value, where) < 0:
        raise refuse(where, "a number that is not negative", value)
    return float(value)


def measured(value: Any, where: str) -> float:
    """A loss or a metric: None stands for what was not finite, and what is beyond all reason counts as infinite."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, int | float) and abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return number(value, where)


def whole(least: int) -> Read:
    """A whole number, of `least` or more."""

    def read(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise refuse(where, f"a whole number from {least}", value)
        return value

    return read


def optional(read: Read) -> Read:
    """None, or what `read` reads."""
    return lambda value, where: None if value is None else read(value, where)


def listed(read: Read) -> Read:
    """A list of what `read` reads."""

    def read_all(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise refuse(where, "a list", value)
        return [read(item, f"{where}[{i}]") for i, item in enumerate(cast(list[Any], value))]

    return read_all


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Read a mapping, or refuse."""
    if not isinstance(value, dict):
        raise refuse(where, "a mapping", value)
    return cast(dict[str, Any], value)


def fields(
    value: Any, where: str, readers: Mapping[str, Read], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Read the named fields of a mapping; those that may be left out are left out."""
    data = mapping(value, where)
    missing = [name for name in readers if name not in data and name not in optional]
    if missing:
        raise ResultsError(f"{where} has no {missing[0]!r}")
    return {name: read(data[name], f"{where}.{name}") for name, read in readers.items() if name in data}


def facts(readers: Mapping[str, Read], optional: frozenset[str] = frozenset()) -> Read:
    """A mapping of which the report needs some fields; the others are kept as they are."""
    return lambda value, where: mapping(value, where) | fields(value, where, readers, optional)
