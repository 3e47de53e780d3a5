"""A configuration of DeepSpeed as its checks see it: read, with what is known of the cluster."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gradwire.core.errors import SpecError

AUTO = "auto"
"""What Transformers and Accelerate replace before DeepSpeed sees it."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """What DeepSpeed is given, and what of the cluster is known.

    Attributes:
        keys: the whole of it; sections are mappings.
        world_size: ranks of data parallelism; None where nobody said.
        gpus_per_node: ranks that share a node; None where nobody said.
        twice: keys that stand twice in the same section of a file.

    >>> given = DeepSpeedFile({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"})
    >>> given.stage, given.at("zero_optimization.stage"), given.at("train_batch_size")
    (3, 3, None)
    """

    keys: Mapping[str, Any]
    world_size: int | None = None
    gpus_per_node: int | None = None
    twice: Sequence[str] = field(default=())

    def section(self, name: str) -> Mapping[str, Any]:
        """A section by its dotted name; empty where there is none."""
        found: object = self.keys
        for part in name.split("."):
            found = cast("Mapping[str, object]", found).get(part) if isinstance(found, Mapping) else None
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}

    def at(self, name: str) -> Any:
        """A value by its dotted name; None where there is none, and where something else fills it in."""
        section, _, last = name.rpartition(".")
        value = (self.section(section) if section else self.keys).get(last)
        return None if value == AUTO else value

    def count(self, name: str) -> int | None:
        """A whole number by its dotted name; None where there is none, or something that is none.

        >>> DeepSpeedFile({"a": 5e8, "b": True, "c": "7"}).count("a")
        500000000
        """
        value = self.at(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return int(value) if is_number and value == value // 1 else None

    def is_on(self, name: str) -> bool:
        """Whether a switch is on; one that is left out, or filled in by something else, is off."""
        return self.at(name) is True

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO, 0 where nothing is sharded; None where it cannot be told."""
        section = self.keys.get("zero_optimization")
        if section is None:
            return 0
        if isinstance(section, bool):
            return int(section)
        return 0 if "stage" not in self.section("zero_optimization") else self.count("zero_optimization.stage")

    @property
    def autos(self) -> Iterator[str]:
        """Dotted names of all values that something else fills in."""
        return _autos(self.keys, "")

    @property
    def optimizer(self) -> str:
        """The optimizer's name in small letters; empty where the script makes its own."""
        name = self.at("optimizer.type")
        return name.lower() if isinstance(name, str) else ""


def _autos(section: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _autos(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        elif value == AUTO:
            yield f"{prefix}{name}"


def read_deepspeed(
    given: Mapping[str, Any] | str | Path, world_size: int | None = None, gpus_per_node: int | None = None
) -> DeepSpeedFile:
    """Read a configuration of DeepSpeed from a file, or take one that was read.

    Args:
        given: a path, or what was in it.
        world_size: ranks of data parallelism, where they are known.
        gpus_per_node: ranks that share a node, where they are known.

    Raises:
        SpecError: no JSON, something else than an object, or numbers that are no sizes.
        OSError: the file cannot be read.
    """
    for name, value in (("world_size", world_size), ("gpus_per_node", gpus_per_node)):
        if value is not None and value < 1:
            raise SpecError(f"{name}={value} is no size: give 1 or more")
    if isinstance(given, Mapping):
        return DeepSpeedFile(given, world_size, gpus_per_node)
    twice: list[str] = []
    keys = _parsed(Path(given), twice)
    if not isinstance(keys, dict):
        raise SpecError(f"{given} holds no object: a configuration of DeepSpeed begins with a brace")
    return DeepSpeedFile(cast("dict[str, Any]", keys), world_size, gpus_per_node, tuple(twice))


def _parsed(file: Path, twice: list[str]) -> object:
    """What a file holds. DeepSpeed itself reads Hjson, which has comments; Transformers reads JSON alone."""

    def noticing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(dict.fromkeys(name for name in names if names.count(name) > 1))
        return dict(pairs)

    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is no text in UTF-8: give the JSON file of the configuration") from error
    try:
        return json.loads(text, object_pairs_hook=noticing)
    except json.JSONDecodeError as error:
        twice.clear()
        try:
            return importlib.import_module("hjson").loads(text, object_pairs_hook=noticing)
        except ImportError:
            where = f"line {error.lineno}, column {error.colno}"
            raise SpecError(f"{file} is no JSON at {where}: {error.msg.lower()}") from error
        except ValueError as second:
            raise SpecError(f"{file} is neither JSON nor Hjson: {second}") from second
