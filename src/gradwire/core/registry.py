"""The list of methods: the one place where a codec or reducer is made known.

The laws, the benchmarks, the command line and the docs iterate over this registry; nothing else lists names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Exchange = Literal["allreduce", "allgather", "twoshot", "own"]


@dataclass(frozen=True)
class Method:
    """A name of the spec language and what it builds.

    `build` takes the method's own options as keywords. `argument` is the option that may follow the name after a
    colon. `exchange` and `feedback` are what suit it when a spec does not say; "own" marks a reducer with messages of
    its own. `examples` are the specs under which laws and benchmarks run.
    """

    name: str
    build: Callable[..., Any]
    summary: str
    exchange: Exchange
    feedback: bool = False
    argument: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    examples: tuple[str, ...] = ()


_methods: dict[str, Method] = {}


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
