"""Functions and methods of others, replaced for a while so that somebody is told of each call."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from types import FunctionType, ModuleType
from typing import Any

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


@contextlib.contextmanager
def told(
    place: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Generator[None]:
    """Have somebody told of each call of a function that is neither PyTorch's own nor part of another such call.

    Args:
        place: the module that has the function. Modules outside of PyTorch that have imported it are found too.
        name: of the function.
        before: is given a call's arguments, before the work.
        after: is given the result and the arguments, once the work has succeeded.
    """
    plain = getattr(place, name)

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

    with replaced(plain, telling, [place]):
        yield


@contextlib.contextmanager
def replaced(plain: Callable[..., Any], new: Callable[..., Any], places: list[Any]) -> Generator[None]:
    """Put one function in the place of another, in the given places and in modules outside of PyTorch that have it.

    A script is imported before this where it starts processes, so that it has the function by a name of its own.
    """
    held = [(names, name) for names in _namespaces(places) for name, value in list(names.items()) if value is plain]
    for names, name in held:
        names[name] = new
    try:
        yield
    finally:
        for names, name in held:
            names[name] = plain


def _namespaces(places: list[Any]) -> list[dict[str, Any]]:
    """The names of some modules, and of all that are neither PyTorch's nor gradwire's."""
    found = list(sys.modules.items())
    others = [module for name, module in found if name.partition(".")[0] not in ("torch", "gradwire")]
    spaces = [vars(module) for module in (*places, *others) if isinstance(module, ModuleType)]
    # A process that is spawned runs the script again, and gives __main__ a copy of the names that its functions have.
    spaces += [function.__globals__ for function in _functions(vars(sys.modules["__main__"]))]
    return list({id(space): space for space in spaces}.values())


def _functions(names: Mapping[str, Any]) -> list[FunctionType]:
    """Functions and methods among what has names."""
    classes = [vars(value) for value in list(names.values()) if isinstance(value, type)]
    return [value for held in (names, *classes) for value in list(held.values()) if isinstance(value, FunctionType)]
