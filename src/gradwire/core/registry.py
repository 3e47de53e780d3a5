"""The table of methods: the one place where a name that a spec may begin with is made known.

The laws, the benchmarks, the command line and the docs iterate over this registry; nothing else lists names.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gradwire.core.options import Option, options_of
from gradwire.core.places import EVERY_STEP, Place
from gradwire.core.uses import Study, Use

Exchange = Literal["allreduce", "allgather", "twoshot", "own"]


@dataclass(frozen=True)
class Method:
    """A name whose spec makes a reducer, and what builds its part of that.

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

    place: ClassVar[Place] = EVERY_STEP

    @property
    def example(self) -> str:
        """A spec that works."""
        return self.examples[0] if self.examples else self.name

    @property
    def options(self) -> Mapping[str, Option]:
        """The method's own options, by name."""
        return {name: option for name, option in options_of(self.build).items() if name not in self.fixed}


class SpecMethod(ABC):
    """A name whose spec makes something else than a reducer.

    Attributes:
        summary: what is computed.
        example: a spec that works.
        use: what the method is for.
        exchange: how what ranks send becomes a result.
        argument: the option whose value may stand alone behind the colon, if there is one.
        build: what computes it; its documentation names the paper.
        options: what may be written, by name.
        place: where it serves.
    """

    summary: str
    example: str
    use: Use = Study()
    exchange: str = "own"
    argument: str | None
    build: Callable[..., Any]
    options: Mapping[str, Option]
    place: Place

    @abstractmethod
    def made(self, spec: str) -> Any:
        """Return what a spec that begins with this name stands for."""


ENTERED_BY = ("gradwire.methods", "gradwire.sync.methods", "gradwire.federated.names", "gradwire.asynchronous.methods")
"""Modules that enter methods when they are imported. Whoever reads the table imports them first, so that what is known
does not depend on what a program has imported."""

_methods: dict[str, Method | SpecMethod] = {}
_advice: dict[str, str] = {}


def register(method: Method) -> None:
    """Make a method of gradients known. A name can be taken once.

    Raises:
        ValueError: the name is taken.
    """
    _enter_all()
    register_all({method.name: method})


def register_all(found: Mapping[str, Method | SpecMethod]) -> None:
    """Make methods known by their names. A name can be taken once.

    Raises:
        ValueError: a name is taken.
    """
    for name, method in found.items():
        if name in _methods:
            raise ValueError(f"the method name {name!r} is taken by {_methods[name].build}")
        _methods[name] = method


def table() -> Mapping[str, Method | SpecMethod]:
    """Return every known method by name, in the order of registration."""
    _enter_all()
    return dict(_methods)


def methods() -> Mapping[str, Method]:
    """Return the methods that make reducers by name, in the order of registration."""
    _enter_all()
    return {name: method for name, method in _methods.items() if isinstance(method, Method)}


def advise(advice: str, *names: str) -> None:
    """Say what to do instead to whoever asks for one of `names`, which are no methods."""
    _advice.update(dict.fromkeys(names, advice))


def hints(*wanted: Place) -> Mapping[str, str]:
    """Return what to tell those who use a name that is not quite a method's: by name, synonym and advised name.

    Args:
        wanted: where a method has to serve; of those that serve elsewhere it is told what takes them.
    """
    _enter_all()
    said = dict(_advice)
    for name, method in _methods.items():
        meant = f"did you mean {name!r}?"
        if wanted and method.place not in wanted:
            meant = f"did you mean {name!r}, which is for {method.place.call_of(method.example)}?"
        said |= dict.fromkeys((name, *(method.synonyms if isinstance(method, Method) else ())), meant)
    return said


@functools.cache
def _enter_all() -> None:
    """Import what enters methods."""
    for module in ENTERED_BY:
        importlib.import_module(module)
