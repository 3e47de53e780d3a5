"""The grammar of all specs: `topk:0.01+int8,warmup=100`, `local:8,outer=(int4,node=2)`, `ssp:4`, `fedprox:0.1`.

    spec    = method {"+" method} {"," option}
    method  = name [":" value] | name ":" option | "(" spec ")"
    option  = name "=" value
    value   = text | "(" spec ")"

The value after the colon is the method's main number: its density, levels, rank, block or steps of a window. It may
stand by name as well: `topk:0.01`, `topk:density=0.01` and `topk,density=0.01` are the same. Brackets enclose a value
that is a spec with commas of its own, and a second method that has options. Options after a comma are those of the
first method; in federations those of the method that they follow.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant
from gradwire.core.options import REQUIRED, convert
from gradwire.core.registry import Method, SpecMethod


class Part(NamedTuple):
    """A method as it is written.

    Attributes:
        written: its name with what follows the colon.
        name: the name.
        value: what follows the colon without a name; None where nothing does.
        options: what is written by name, as text.
    """

    written: str
    name: str
    value: str | None
    options: dict[str, str]


def name_of(spec: str) -> str:
    """Return the name of the first method.

    >>> name_of(" local:H=8"), name_of("topk,ef=off"), name_of("(topk,ef=off)+int8")
    ('local', 'topk', 'topk')
    """
    return re.split(r"[:,+)]", _unbracketed(spec).lstrip("( "), maxsplit=1)[0].strip()


def split(spec: str, separator: str) -> list[str]:
    """Return what stands between separators that no brackets enclose.

    Raises:
        SpecError: brackets that do not match.

    >>> split("local:8,outer=(int4,node=2)", ",")
    ['local:8', 'outer=(int4,node=2)']
    """
    pieces, depth = [""], 0
    for character in spec:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
        if character == separator and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth:
        raise SpecError(f"parentheses do not match in {spec!r}: they enclose a value, as in outer=(int4,node=2)")
    return [piece.strip() for piece in pieces]


def read(spec: str, joins: bool = True) -> list[Part]:
    """Return the methods that a spec names, the first of them with all options that follow a comma.

    Args:
        spec: as written.
        joins: whether "+" stands between methods; it may stand in a value otherwise.

    Raises:
        SpecError: what cannot be read, with how it is written.

    >>> [part.name for part in read("topk:0.1+int8,warmup=9")], read("topk:0.1+int8,warmup=9")[0].options
    (['topk', 'int8'], {'warmup': '9'})
    """
    head, *items = split(_unbracketed(spec), ",")
    first, *others = split(head, "+") if joins else [head]
    return [_part(spec, first, items), *(_part(spec, other) for other in others)]


def _part(spec: str, text: str, items: Iterable[str] = ()) -> Part:
    head, *own = split(_unbracketed(text), ",")
    name, colon, rest = (piece.strip() for piece in head.partition(":"))
    if not name:
        raise SpecError(f"a method's name is missing in {spec!r}: write one, as in 'int4' or 'topk:0.01+int8'")
    is_named = re.match(r"\w+\s*=", rest) is not None
    options: dict[str, str] = {}
    for item in [*([rest] if is_named else []), *own, *items]:
        option, _, value = (piece.strip() for piece in item.partition("="))
        if not value:
            raise SpecError(
                f"cannot read {item!r} in {spec!r}: an option is written name=value, as in 'int4,warmup=100'"
            )
        if option in options:
            raise SpecError(f"{option!r} is given twice in {spec!r}")
        options[option] = _unbracketed(value)
    return Part(head, name, _unbracketed(rest) if colon and not is_named else None, options)


def current(spec: str) -> str:
    """Return a spec as it is written now: PyTorch's own methods had a colon after `torch`, which is hinted at once.

    >>> current("torch.fp16")
    'torch.fp16'
    """
    now = renamed(spec)
    if now != spec:
        warnings.warn(f"{spec!r} is written {now!r} now; gradwire goes on to read both", FutureWarning, stacklevel=2)
    return now


def renamed(spec: str) -> str:
    """Return a spec of an older file as it is written now, without a hint.

    >>> renamed("torch:powersgd:4"), renamed("method:torch:fp16")
    ('torch.powersgd:4', 'method:torch.fp16')
    """
    return re.sub(r"^(method:)?torch:", r"\1torch.", spec)


def _unbracketed(text: str) -> str:
    """Without brackets that enclose all of it."""
    text = current(text.strip())
    depths = [*itertools.accumulate({"(": 1, ")": -1}.get(character, 0) for character in text)]
    is_enclosed = text[:1] == "(" and text[-1:] == ")" and 0 not in depths[:-1]
    return _unbracketed(text[1:-1]) if is_enclosed else text


def arguments(
    spec: str,
    part: Part,
    method: Method | SpecMethod,
    also: Iterable[str] = (),
    synonyms: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the options of a method that are written, converted.

    Args:
        spec: where they stand, for errors.
        part: what is written.
        method: whose options they are.
        also: options of all methods, which an unknown name may mean.
        synonyms: other names of options, which lead to these.

    Raises:
        SpecError: an unknown name, a missing option, one that is given twice, or a value that cannot be read.
    """
    name, given, known = part.name, part.options, method.options
    if part.value is not None:
        given = _with_argument(spec, part, method)
    for option in given:
        if option not in known:
            names = [*known, *also]
            hint = meant(option, names, synonyms) if names else "it has none"
            raise SpecError(f"{name!r} has no option {option!r}, in {spec!r}: {hint}")
    for option, (_, default) in known.items():
        if default is REQUIRED and option not in given:
            raise SpecError(f"{name!r} needs its {option}, in {spec!r}: write it as in {method.example!r}")
    return {option: convert(spec, option, text, known[option].kind) for option, text in given.items()}


def _with_argument(spec: str, part: Part, method: Method | SpecMethod) -> dict[str, str]:
    """All that is written by name, and what follows the colon by its name."""
    if method.argument is None:
        raise SpecError(f"{part.name!r} takes nothing after a colon, in {spec!r}: write {part.name!r}")
    if not part.value:
        raise SpecError(
            f"nothing stands after the colon of {part.written!r}: {part.name} takes its {method.argument} there"
        )
    if method.argument in part.options:
        raise SpecError(f"{method.argument!r} is given twice in {spec!r}: once after the colon, once as an option")
    return {method.argument: part.value, **part.options}
