"""Programs: what a rank does with one tensor, as a generator that yields collectives and is sent their results.

    received = yield collective.AllToAll(rows)

A program does no I/O. All drivers advance it through `drivers.interpreter`. This module has the functions for that, and
those that make a program of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from gradwire.core.axis import SubGroups
from gradwire.core.collective import Collective
from gradwire.core.shapes import Shapes

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


def along(program: Program[T], axis: SubGroups) -> Program[T]:
    """Run a program that knows only its sub-group of a mesh: what it asks for, it asks for on `axis`."""
    return asking(program, lambda request: request.on(axis))


def apart(program: Program[T], axis: SubGroups, ranks: int, device: torch.device) -> Program[T]:
    """Run a rank's part in a program that the others of its node run for it, so that the order of all ranks is one.

    Where nodes have unequally many ranks, some take no part between nodes. Such a rank asks for the same kinds of
    collectives on the same axis at the same places, with nothing in them.

    Args:
        program: of a rank that takes part, on tensors without data.
        axis: on which this rank is by itself.
        ranks: how many take part.
        device: where this rank's tensors lie.
    """
    shapes: Any = Shapes(ranks)
    answer: Tensor | None = None
    while not isinstance(turn := advance(program, answer), Ended):
        yield turn.on(axis).without_content(device)
        answer = turn.received(getattr(shapes, turn.verb)(turn))
    return turn.value
