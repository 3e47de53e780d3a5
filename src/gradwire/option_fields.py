"""Options of a command as fields of a frozen dataclass: each is written once, with all that is to be known of it.

From the fields are made the command's arguments (`gradwire.cli.option_arguments`), the checks of their ranges
(`check_fields`), what a file of results keeps of them (`stored`) and what two runs must share (`conditions`).

    @dataclass(frozen=True)
    class Options:
        hosts: int = option(4, "hosts, one rank each", group="the network", metavar="N", limits=AtLeast(1))

The type of a field says how its argument is read: a whole number, a number, a path, one of a `Literal`'s texts, several
texts for a tuple, and a switch for a truth value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradwire.core.errors import GradwireError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Limits(Protocol):
    """Which numbers an option may be."""

    def refusal(self, value: Any) -> str | None:
        """What a value must be, and is not; None where it may be used."""
        ...


@dataclass(frozen=True)
class AtLeast:
    """Whole numbers from `least`; beyond `most` one is a slip of the keyboard, and would fail somewhere deep inside.

    >>> AtLeast(1, most=1000).refusal(0)
    'must be at least 1, and at most 1,000, not 0'
    """

    least: int
    most: float = math.inf

    def refusal(self, value: int) -> str | None:
        """What a value must be, and is not; None where it may be used."""
        if self.least <= value <= self.most:
            return None
        most = f", and at most {self.most:,}" if math.isfinite(self.most) else ""
        shown = str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
        return f"must be at least {self.least}{most}, not {shown}"


@dataclass(frozen=True)
class Positive:
    """Numbers above 0; beyond `most` one is a slip of the keyboard.

    >>> Positive(most=1e6).refusal(-1.0)
    'must be a positive number of at most 1,000,000, not -1.0'
    """

    most: float

    def refusal(self, value: float) -> str | None:
        """What a value must be, and is not; None where it may be used."""
        return None if 0 < value <= self.most else f"must be a positive number of at most {self.most:,.0f}, not {value}"


@dataclass(frozen=True)
class OptionField:
    """What is to be known of an option beyond its name, type and default.

    Attributes:
        help: what it says.
        group: where `--help` shows it; None for an option that only Python has.
        metavar: what `--help` shows in place of its value.
        flag: its argument, where that is not made of the name.
        unset: what happens where it is not given, where that is not a value.
        limits: which numbers it may be.
        instead_of: the name of the option that it excludes.
        separator: what stands between several texts in one argument; None for one argument each.
        condition: its name among what two runs must share; None where they need not share it.
        kept: whether a file of results keeps it.
    """

    help: str
    group: str | None = None
    metavar: str | None = None
    flag: str | None = None
    unset: str | None = None
    limits: Limits | None = None
    instead_of: str | None = None
    separator: str | None = None
    condition: str | None = None
    kept: bool = True


def option(default: Any, help: str, **facts: Any) -> Any:
    """A field of a dataclass with its default, its help, and any of the facts of an `OptionField`."""
    return field(default=default, metadata={"option": OptionField(help, **facts)})


def options_of(kind: type[DataclassInstance]) -> Iterator[tuple[str, Any, OptionField]]:
    """Yield name, default and facts of every option of a class, in order."""
    for each in fields(kind):
        yield each.name, each.default, each.metadata["option"]


def flag_of(name: str, facts: OptionField) -> str:
    """What an option is called in a message: by its argument, or by its name where it has none."""
    return name if facts.group is None else facts.flag or f"--{name.replace('_', '-')}"


def check_fields(options: DataclassInstance, error: type[GradwireError]) -> None:
    """Check what can be known of each option by itself, and that none is given beside one which it excludes.

    Raises:
        GradwireError: the given `error`; the message names the option and says what it must be.
    """
    known = {name: (getattr(options, name), default, facts) for name, default, facts in options_of(type(options))}
    for name, (value, default, facts) in known.items():
        if facts.instead_of is not None and value != default:
            other, other_default, other_facts = known[facts.instead_of]
            if other != other_default:
                raise error(f"give {flag_of(facts.instead_of, other_facts)} or {flag_of(name, facts)}, not both")
    for name, (value, _, facts) in known.items():
        if facts.limits is not None and value is not None and (refusal := facts.limits.refusal(value)):
            raise error(f"{flag_of(name, facts)} {refusal}")


def stored(options: DataclassInstance) -> dict[str, Any]:
    """What a file of results keeps of options: plain data."""
    kept = ((name, getattr(options, name)) for name, _, facts in options_of(type(options)) if facts.kept)
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept}


def conditions(options: DataclassInstance) -> dict[str, Any]:
    """What two runs must share of their options, by the names that a reader is told."""
    return {facts.condition: getattr(options, name) for name, _, facts in options_of(type(options)) if facts.condition}
