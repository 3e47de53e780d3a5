"""Programs: what a rank does with one tensor, as a generator that yields collectives and is sent their results.

    received = yield collective.AllToAll(rows)

A program does no I/O. All drivers advance it through `drivers.interpreter`. This module has the functions for that, and
those that make a program of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic

from torch import Tensor
from typing_extensions import TypeVar

from gradwire.core.collective import Axis, Collective

T = TypeVar("T")

Program = Generator[Collective, Tensor, T]
"""Yields what it asks for, is sent the answer, and returns a T."""


@dataclass(frozen=True, eq=False)
class Ended(Generic[T]):
    """The end of a program, with what it returned."""

    value: T


def advance(program: Program[T], answer: Tensor | None) -> Collective | Ended[T]:
    """Send a program the answer to what it asked (None to start it); return what it asks next, or its end."""
    try:
        return next(program) if answer is None else program.send(answer)
    except StopIteration as stop:
        return Ended(stop.value)


def once(request: Collective) -> Program[Tensor]:
    """The program that asks for one collective and returns its result."""
    return (yield request)


def asking(program: Program[T], ask: Callable[[Collective], Collective]) -> Program[T]:
    """Run a program whose every request is what `ask` makes of the program's own."""
    answer: Tensor | None = None
    while not isinstance(turn := advance(program, answer), Ended):
        answer = yield ask(turn)
    return turn.value


def along(program: Program[T], axis: Axis) -> Program[T]:
    """Run a program that knows only its sub-group of a mesh: what it asks for, it asks for on `axis`."""
    return asking(program, lambda request: request.on(axis))
