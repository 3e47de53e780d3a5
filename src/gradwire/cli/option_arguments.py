"""Arguments of a command, made of the fields of its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gradwire.option_fields import OptionField, flag_of, options_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def add_options(parser: argparse.ArgumentParser, kind: type[DataclassInstance]) -> None:
    """Add an argument for each option of a class, in its group."""
    types = get_type_hints(kind)
    known = {name: (default, facts) for name, default, facts in options_of(kind) if facts.group is not None}
    excluding = {facts.instead_of: name for name, (_, facts) in known.items() if facts.instead_of}
    groups: dict[str | None, argparse._ArgumentGroup] = {}  # pyright: ignore[reportPrivateUsage]
    pairs: dict[str | None, argparse._MutuallyExclusiveGroup] = {}  # pyright: ignore[reportPrivateUsage]
    for name, (default, facts) in known.items():
        if facts.group not in groups:
            groups[facts.group] = parser.add_argument_group(facts.group)
        group = groups[facts.group]
        if name in excluding:
            pairs[name] = group.add_mutually_exclusive_group()
        place = pairs.get(name) or pairs.get(facts.instead_of) or group
        place.add_argument(
            flag_of(name, facts), dest=name, default=default, help=_help(default, facts), **_reading(types[name], facts)
        )


def read_options(arguments: argparse.Namespace, kind: type[T]) -> T:
    """What was given on the command line, as options."""
    given = {name: getattr(arguments, name) for name, _, facts in options_of(kind) if facts.group is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _help(default: Any, facts: OptionField) -> str:
    """The help of an option with what it is if it is not given, for argparse, which takes % for its own."""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    unset = facts.unset or (None if default is None or default == () or default is False else shown)
    words = (facts.help, f"(default: {unset})" if unset else "")
    return " ".join(word for word in words if word).replace("%", "%%")


def _reading(annotation: Any, facts: OptionField) -> dict[str, Any]:
    """How argparse reads a value of a type."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
    if annotation is bool:
        return {"action": "store_true"}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    named = {"metavar": facts.metavar}
    if get_origin(annotation) is tuple:
        return {**named, "type": _split(facts.separator)} if facts.separator else {**named, "nargs": "+"}
    return {**named, "type": annotation if annotation in (int, float, Path) else str}


def _split(separator: str) -> Callable[[str], tuple[str, ...]]:
    return lambda text: tuple(text.split(separator))
