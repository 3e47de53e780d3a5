"""Reads a configuration from a TOML file, and says on which line something is wrong."""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant
from gradwire.training.configuration import ConfigurationError, TrainingConfiguration


def read_configuration(path: str | Path) -> TrainingConfiguration:
    """Read a TOML file.

    Raises:
        SpecError: it cannot be read, an unknown table or key, a value of another kind, or values that cannot be; with
            the line, and the nearest name or value.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is no text: {error}") from error
    try:
        return configuration_of(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is no TOML: {error}") from error
    except ConfigurationError as error:
        line = line_of(text, error.table, error.key)
        raise SpecError(f"{path}{f', line {line}' if line else ''}: {error}") from error


def configuration_of(data: Mapping[str, Any]) -> TrainingConfiguration:
    """Make a configuration of tables of keys.

    Raises:
        ConfigurationError: unknown tables and keys, and values that cannot be.

    >>> configuration_of({"dp": {"ranks": 2, "method": "int8"}}).dp
    DataAxis(ranks=2, method='int8')
    >>> configuration_of({"dp": {"rank": 2}})
    Traceback (most recent call last):
    gradwire.training.configuration.ConfigurationError: [dp] rank: there is no such key: did you mean 'ranks'?
    """
    kinds: dict[str, Any] = typing.get_type_hints(TrainingConfiguration)
    made: dict[str, Any] = {}
    for table, keys in data.items():
        if table not in kinds:
            raise ConfigurationError(table, "", f"there is no such table: {meant(table, kinds)}")
        if not isinstance(keys, Mapping):
            raise ConfigurationError(table, "", f"{keys!r} is no table: write [{table}] and its keys below it")
        made[table] = _table(table, kinds[table], typing.cast("Mapping[str, Any]", keys))
    return TrainingConfiguration(**made)


def _table(table: str, kind: Any, keys: Mapping[str, Any]) -> Any:
    hints: dict[str, Any] = typing.get_type_hints(kind)
    for key, value in keys.items():
        if key not in hints:
            raise ConfigurationError(table, key, f"there is no such key: {meant(key, hints)}")
        _require_kind(table, key, value, hints[key])
    return kind(**keys)


def _require_kind(table: str, key: str, value: object, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        if value not in words:
            raise ConfigurationError(table, key, f"{value!r} is unknown: {meant(str(value), words)}")
        return
    kinds = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    fits = type(value) is hint or (hint is float and type(value) is int)
    if not fits:
        raise ConfigurationError(table, key, f"{value!r} is not {kinds[hint]}")


def line_of(text: str, table: str, key: str) -> int | None:
    """The line of a key in a table, or of the table where the key is not written; None where neither is.

    >>> line_of("[dp]\\nranks = 2\\n[tp]\\nranks = 4\\n", "tp", "ranks")
    4
    """
    inside, of_table = False, None
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
        if head is not None:
            inside = head[1] == table
            of_table = number if inside else of_table
        elif inside and key and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
            return number
    return of_table
