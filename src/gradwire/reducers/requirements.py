"""What whoever takes a reducer may want of it: refused with a sentence that says what to take instead."""

from __future__ import annotations

from gradwire.core.errors import CompositionError
from gradwire.reducers.base import Reducer


def require_linear(inner: Reducer, memory: str) -> None:
    """Refuse error memory around a reducer whose result is not linear in what was sent.

    Args:
        inner: what the memory goes around.
        memory: its name in the error, e.g. "error feedback".

    Raises:
        CompositionError: an `inner` that is not `linear`.
    """
    if not inner.linear:
        raise CompositionError(
            f"{memory} over {inner} would deliver something else than it makes of the gradient, which is sent in "
            "parts: what it makes of the parts does not add up to that. Write ef=off, which gives up what a codec "
            "loses, or leave the codec out"
        )


def require_whole(reducer: Reducer, what: str) -> Reducer:
    """Return a reducer, if every rank ends with the whole mean.

    Args:
        reducer: the reducer.
        what: what it is for, e.g. "a step of the whole model".

    Raises:
        CompositionError: a reducer that `scatters`.
    """
    if reducer.scatters:
        raise CompositionError(
            f"{reducer} leaves each rank with its own shard of the mean, and {what} needs all of it: take TwoShot, or "
            "put a Gather behind it"
        )
    return reducer


def require_alike(reducer: Reducer) -> Reducer:
    """Return a reducer, if every rank ends with the same result.

    Raises:
        CompositionError: one whose results differ between ranks, so that models trained by them would drift apart.
    """
    if not (reducer.ends_alike or reducer.scatters):
        raise CompositionError(
            f"{type(reducer).__name__} ends with another result on each rank, and replicas that are trained by these "
            "drift apart: gossip belongs into gradwire.sync.Gossip, which mixes parameters"
        )
    return reducer
