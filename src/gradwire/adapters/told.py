"""Functions and methods of others, replaced for a while so that somebody is told of each call."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

_inside = threading.local()
"""Whether this thread is in a call that somebody is told of: calls that it makes itself are parts of that one."""


@contextlib.contextmanager
def unheard() -> Generator[None]:
    """Nobody is told of the calls that this thread makes inside."""
    before = getattr(_inside, "call", False)
    _inside.call = True
    try:
        yield
    finally:
        _inside.call = before


class Told(NamedTuple):
    """Whom to tell of the calls of one function.

    Attributes:
        place: the module that has the function. Modules outside of PyTorch that have imported it are found too.
        name: of the function.
        before: is given a call's arguments, before the work.
        after: is given the result and the arguments, once the work has succeeded.
    """

    place: ModuleType
    name: str
    before: Callable[..., None] | None = None
    after: Callable[..., None] | None = None


@contextlib.contextmanager
def told(*functions: Told) -> Generator[None]:
    """Have somebody told of each call of functions that is neither PyTorch's own nor part of another such call."""
    plain = [(one.place, getattr(one.place, one.name)) for one in functions]
    with replaced([(place, each, _telling(each, one)) for (place, each), one in zip(plain, functions, strict=True)]):
        yield


def _telling(plain: Callable[..., Any], function: Told) -> Callable[..., Any]:
    before, after = function.before, function.after

    @functools.wraps(plain)
    def telling(*arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if getattr(_inside, "call", False) or caller.startswith("torch."):
            return plain(*arguments, **options)
        with unheard():
            if before is not None:
                before(*arguments, **options)
            result = plain(*arguments, **options)
            if after is not None:
                after(result, *arguments, **options)
        return result

    return telling


@contextlib.contextmanager
def replaced(functions: Sequence[tuple[ModuleType, Callable[..., Any], Callable[..., Any]]]) -> Generator[None]:
    """Put functions in the place of others, in the given modules and in all outside of PyTorch that have them.

    A script is imported before this where it starts processes, so that it has a function by a name of its own. All
    names of all modules are looked through once, however many functions there are: there are some 400,000 names.

    Args:
        functions: a module, what it has, and what comes in its place.
    """
    wanted = {id(plain): (plain, new) for _, plain, new in functions}
    places = [(names, wanted) for names in _namespaces()]
    places += [(vars(module), {id(plain): (plain, new)}) for module, plain, new in functions]
    held = [(names, name, *found) for names, here in places for name, found in _named(names, here)]
    for names, name, _, new in held:
        names[name] = new
    try:
        yield
    finally:
        for names, name, plain, _ in held:
            names[name] = plain


_Replacement = tuple[Callable[..., Any], Callable[..., Any]]


def _named(names: Mapping[str, Any], wanted: Mapping[int, _Replacement]) -> list[tuple[str, _Replacement]]:
    """Names of functions that are wanted, by their identities, with what they are and what comes in their places."""
    return [(name, wanted[id(value)]) for name, value in list(names.items()) if id(value) in wanted]


def _namespaces() -> list[dict[str, Any]]:
    """The names of all modules that are neither PyTorch's nor gradwire's."""
    found: list[tuple[str, Any]] = list(sys.modules.items())  # a script may have put anything there
    others = [module for name, module in found if name.partition(".")[0] not in ("torch", "gradwire")]
    spaces = [vars(module) for module in others if isinstance(module, ModuleType)]
    # A process that is spawned runs the script again, and gives __main__ a copy of the names that its functions have.
    spaces += [function.__globals__ for function in _functions(vars(sys.modules["__main__"]))]
    return list({id(space): space for space in spaces}.values())


def _functions(names: Mapping[str, Any]) -> list[FunctionType]:
    """Functions and methods among what has names."""
    classes = [vars(value) for value in list(names.values()) if isinstance(value, type)]
    return [value for held in (names, *classes) for value in list(held.values()) if isinstance(value, FunctionType)]
