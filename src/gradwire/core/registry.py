"""The list of methods: the one place where a codec or reducer is made known.

The laws, the benchmarks, the command line and the docs iterate over this registry; nothing else lists names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradwire.core.uses import Study, Use

Exchange = Literal["allreduce", "allgather", "twoshot", "own"]


@dataclass(frozen=True)
class Method:
    """A name of the spec language and what it builds.

    `build` takes the method's own options as keywords. `argument` is the option that may follow the name after a
    colon. `exchange` and `feedback` are what suit it when a spec does not say; "own" marks a reducer with messages of
    its own. `examples` are the specs under which laws and benchmarks run. `synonyms` are other names under which people
    look for it: no spec may use them, but errors lead from them to `name`. `use` says what the method is for: it orders
    `gradwire methods` and docs/methods.md.
    """

    name: str
    build: Callable[..., Any]
    summary: str
    exchange: Exchange
    feedback: bool = False
    argument: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    examples: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()
    use: Use = field(default_factory=Study)


_methods: dict[str, Method] = {}
_advice: dict[str, str] = {}


def register(method: Method) -> None:
    """Make a method known. A name can be taken once.

    Raises:
        ValueError: the name is taken.
    """
    if method.name in _methods:
        raise ValueError(f"the method name {method.name!r} is taken by {_methods[method.name].build}")
    _methods[method.name] = method


def methods() -> Mapping[str, Method]:
    """Return every known method by name, in the order of registration."""
    return dict(_methods)


def advise(advice: str, *names: str) -> None:
    """Say what to do instead to whoever asks for one of `names`, which are no methods."""
    _advice.update(dict.fromkeys(names, advice))


def hints() -> Mapping[str, str]:
    """Return what to tell those who use a name that is not quite a method's: by name, synonym and advised name."""
    aliases = {alias: method.name for method in _methods.values() for alias in (method.name, *method.synonyms)}
    return {**_advice, **{alias: f"did you mean {name!r}?" for alias, name in aliases.items()}}


def nearest(name: str, meanings: Mapping[str, str]) -> str | None:
    """Return the meaning of the key that is nearest to `name`; None where none is near.

    A key that differs in case and punctuation only is nearest, then the one that is spelled most alike.

    >>> nearest("Top_K", {"topk": "largest", "randomk": "random"})
    'largest'
    >>> nearest("rndomk", {"topk": "largest", "randomk": "random"})
    'random'
    """
    folded = {fold(key): meaning for key, meaning in meanings.items()}
    wanted = fold(name)
    close = [wanted] if wanted in folded else difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def fold(name: str) -> str:
    """Return the letters and digits of a name, in lower case: names that agree in them are the same to a reader."""
    return "".join(c for c in name.lower() if c.isalnum())
