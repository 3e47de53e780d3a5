"""Specs of methods that have names and options: `name:value,option=value,option=(text, with commas)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from gradwire.core.errors import SpecError
from gradwire.core.options import REQUIRED, Option, convert, meant, require_choice
from gradwire.core.uses import Use


class SpecMethod(ABC):
    """A name of a spec language and what it makes.

    Attributes:
        summary: what is computed.
        example: a spec that works.
        use: what the method is for.
        exchange: how what ranks send becomes a result.
        main: the option whose value may stand alone behind the colon.
        build: what computes it; its documentation names the paper.
        options: what may be written, by name.
    """

    summary: str
    example: str
    use: Use
    exchange: str
    main: str
    build: type
    options: Mapping[str, Option]

    @abstractmethod
    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse options that do not fit together, as far as that can be told without ranks."""


M = TypeVar("M", bound=SpecMethod)


def name_of(spec: str) -> str:
    """The name of the method that a spec is of.

    >>> name_of(" local:H=8"), name_of("topk,ef=off")
    ('local', 'topk')
    """
    return spec.split(":")[0].split(",")[0].strip()


def read(spec: str, methods: Mapping[str, M], module: str) -> tuple[M, dict[str, Any]]:
    """Return the method that a spec names, and the options that are written, converted.

    Args:
        spec: as written.
        methods: those that there are, by name.
        module: whose they are, for errors.

    Raises:
        SpecError: an unknown name or option, or a value that cannot be read.
        CompositionError: options that do not fit together.
    """
    name, _, text = spec.strip().partition(":")
    if name not in methods:
        raise SpecError(f"{spec!r} is no method of {module}: {meant(name, methods)}")
    method = methods[name]
    given = _given(spec, method, text)
    for option, (_, default) in method.options.items():
        if default is REQUIRED and option not in given:
            raise SpecError(f"{name!r} needs its {option}, in {spec!r}: write it as in {method.example!r}")
    method.check(given)
    return method, given


def _given(spec: str, method: SpecMethod, text: str) -> dict[str, Any]:
    """The options that are written, converted."""
    given: dict[str, Any] = {}
    for number, item in enumerate(_items(spec, text)):
        name, equals, value = item.partition("=")
        if not equals and number == 0:
            name, value = method.main, item
        if not value:
            raise SpecError(
                f"cannot read {item!r} in {spec!r}: an option is written name=value, as in {method.example!r}"
            )
        if name not in method.options:
            raise SpecError(f"{name!r} is no option in {spec!r}: {meant(name, method.options)}")
        if name in given:
            raise SpecError(f"{name!r} is given twice in {spec!r}")
        kind = method.options[name].kind
        require_choice(spec, name, value, kind)
        given[name] = convert(spec, name, value, kind)
    return given


def _items(spec: str, text: str) -> list[str]:
    """Cut at commas that no parentheses enclose, and take away the parentheses around values."""
    items, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise SpecError(f"parentheses do not match in {spec!r}: they enclose a value, as in outer=(int4,node=2)")
    return [
        item.strip().replace("=(", "=", 1).removesuffix(")") if "=(" in item else item.strip() for item in items if text
    ]
