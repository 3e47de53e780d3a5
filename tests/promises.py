"""What random schedules over the carrier with faults share: a promise that is broken, and faults that are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from gradwire.peers.faulty import CarrierFaults, FaultyNetwork


class Broken(AssertionError):  # noqa: N818 - what is broken is a promise
    """A promise that a schedule broke."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def faults_of(draw: random.Random, repeated: float, **times_s: float) -> CarrierFaults:
    """Some of all faults: what breaks a promise is found sooner where other things do not go wrong."""
    return CarrierFaults(
        lost=draw.choice((0.0, 0.03)),
        repeated=draw.choice((0.0, repeated)),
        late=draw.choice((0.0, 0.1)),
        cut=draw.choice((0.0, 0.02)),
        kills=draw.choice((0.0, 0.7)),
        stops=draw.choice((0.0, 0.7)),
        silent_s=0.7,
        is_ordered=draw.random() < 0.5,
        is_packed=draw.random() < 0.25,  # which takes most of the time
        **times_s,
    )


class AnySchedule(Protocol):
    """A schedule, which `run` runs to its end."""

    network: FaultyNetwork

    def run(self) -> None: ...


ScheduleT = TypeVar("ScheduleT", bound=AnySchedule)


def checked(make: Callable[..., ScheduleT], seed: int, *kinds: Any) -> ScheduleT:
    """Run a schedule of a seed.

    Raises:
        Broken: it breaks a promise.
    """
    schedule = make(seed, *kinds)
    try:
        schedule.run()
    except Exception as error:
        raise Broken(f"schedule {seed} at {schedule.network.now_s:.2f} s: {type(error).__name__}: {error}") from error
    return schedule
