"""Options as they are written: `name=value`, read by the annotations of whatever they are for."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple, cast

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant

SWITCH = {"on": True, "off": False, "true": True, "false": False}
_WANTED: Mapping[Any, str] = {bool: "on or off", int: "a whole number", float: "a number"}
REQUIRED = inspect.Parameter.empty
"""The default of an option that has none."""


class Option(NamedTuple):
    """A parameter that can be written.

    Attributes:
        kind: its annotation, without None.
        default: what it is where nothing is written; `REQUIRED` where something must be.
    """

    kind: Any
    default: Any = REQUIRED

    @property
    def described(self) -> str:
        """The default and what else may stand there.

        >>> Option(bool, False).described, Option(Literal["fp32", "bf16"], "bf16").described, Option(int).described
        ('off|on', 'bf16|fp32', 'INT')
        """
        if typing.get_origin(self.kind) is Literal:
            return "|".join(sorted(typing.get_args(self.kind), key=lambda choice: choice != self.default))
        if typing.get_origin(self.kind) is Sequence:
            return "TEXT/TEXT/..."
        if self.default is REQUIRED or self.default is None:
            return self.kind.__name__.upper()
        return {True: "on|off", False: "off|on"}[self.default] if self.kind is bool else str(self.default)


def options_of(build: Callable[..., Any]) -> dict[str, Option]:
    """Return the parameters of a dataclass, a class or a function that have names and simple values.

    >>> def build(model, *, block: int = 64, betas: tuple[float, float]): ...
    >>> options_of(build)
    {'block': Option(kind=<class 'int'>, default=64)}

    What may be given as text among other things is text, such as a reducer; several texts have slashes between them.
    """
    return dict(_options_of(build))


@functools.cache  # each annotation is compiled anew, and a spec is read several times
def _options_of(build: Callable[..., Any]) -> dict[str, Option]:
    typed: Any = cast(Any, build).__init__ if inspect.isclass(build) and not is_dataclass(build) else build
    kinds = {name: _written(kind) for name, kind in typing.get_type_hints(typed).items()}
    found = inspect.signature(cast(Any, build)).parameters.values()
    return {p.name: Option(kinds[p.name], p.default) for p in found if p.name in kinds and _is_simple(kinds[p.name])}


def _written(kind: Any) -> Any:
    """An annotation, or of several the one that can be written."""
    if not isinstance(kind, types.UnionType):
        return kind
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    return str if str in parts else parts[0] if len(parts) == 1 else kind


def _is_simple(kind: Any) -> bool:
    return kind in (bool, int, float, str, Sequence[str]) or typing.get_origin(kind) is Literal


def convert(spec: str, name: str, text: str, kind: Any, wanted: str | None = None) -> Any:
    """Read a value.

    Args:
        spec: where it stands, for the error.
        name: of the option.
        text: the value as written.
        kind: an annotation, or a function of the text.
        wanted: what should stand there, in words, for a function.

    Raises:
        SpecError: with what was expected.

    >>> convert("int4,guard=off", "guard", "off", bool)
    False
    """
    try:
        if kind is bool:
            return SWITCH[text.lower()]
        if typing.get_origin(kind) is Literal or kind is str:
            return text
        if typing.get_origin(kind) is Sequence:
            return tuple(text.split("/"))
        return kind(text)
    except (ValueError, KeyError):
        expected = wanted or _WANTED.get(kind, "a value")
        raise SpecError(f"{name}={text!r} in {spec!r}: expected {expected}") from None


def require_choice(spec: str, name: str, text: str, kind: Any) -> None:
    """Refuse what is none of a few choices, where nothing else does.

    Raises:
        SpecError: with the choice that is meant, or all.

    >>> require_choice("local:buffers=mine", "buffers", "mine", Literal["own", "rank0"])
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: buffers='mine' in 'local:buffers=mine': known are own, rank0
    """
    if typing.get_origin(kind) is Literal and text not in typing.get_args(kind):
        raise SpecError(f"{name}={text!r} in {spec!r}: {meant(text, typing.get_args(kind))}")


def described(options: Mapping[str, Option]) -> tuple[str, ...]:
    """Return options as they are written, with their defaults, and choices where there are few.

    The first of several choices is the default; a type in capitals stands where there is none.

    >>> described({"density": Option(float, 0.0625), "values": Option(Literal["fp32", "bf16"], "fp32")})
    ('density=0.0625', 'values=fp32|bf16')
    """
    return tuple(f"{name}={option.described}" for name, option in options.items())
