"""When ranks average: how many local steps a window has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from gradwire.core.errors import CompositionError


class Schedule(ABC):
    """How many local steps the next window has."""

    @property
    def limit(self) -> float | None:
        """How far ranks may drift before a window ends, see `DriftTriggered`; None where that does not count."""
        return None

    @abstractmethod
    def length(self, steps: int) -> int:
        """Steps of the window that begins after `steps` steps of the run, 1 or more. Alike on all ranks."""


def require_steps(name: str, steps: int, least: int = 1) -> None:
    """Refuse a number of steps that makes no sense.

    Raises:
        CompositionError: with the name of the argument.
    """
    if steps < least:
        reason = "a window has at least one step" if least == 1 else "it counts steps"
        raise CompositionError(f"{name}={steps}: {reason}, so give {least} or more")


@dataclass(frozen=True)
class Constant(Schedule):
    """Every window has `every` steps (Stich 2019, algorithm 1, H).

    >>> Constant(8).length(1000)
    8
    """

    every: int

    def __post_init__(self) -> None:
        require_steps("every", self.every)

    @override
    def length(self, steps: int) -> int:
        return self.every


@dataclass(frozen=True)
class Increasing(Schedule):
    """Windows of `first` steps, twice as long after each `double_after` steps of the run, and `last` steps at most.

    Early in training ranks move apart quickly, and late they do not.

    >>> [Increasing(first=2, last=16, double_after=100).length(steps) for steps in (0, 100, 250, 900)]
    [2, 4, 8, 16]
    """

    first: int
    last: int
    double_after: int

    def __post_init__(self) -> None:
        require_steps("first", self.first)
        require_steps("last", self.last, self.first)
        require_steps("double_after", self.double_after)

    def length(self, steps: int) -> int:
        """`first`, doubled so often as is due."""
        doublings = min(steps // self.double_after, self.last.bit_length())
        return min(self.last, self.first << doublings)


@dataclass(frozen=True)
class DriftTriggered(Schedule):
    """A window ends once |x - x_0| / |x_0| exceeds `drift` on any rank, and after `most` steps at the latest.

    x are the parameters of a rank, all together, and x_0 those that the window began with. Ranks agree on the largest
    of these numbers after each step, by a collective of 8 bytes (after Kamp et al. 2018, dynamic averaging).

    >>> DriftTriggered(drift=0.01, most=64).length(0)
    64
    """

    drift: float
    most: int

    def __post_init__(self) -> None:
        require_steps("most", self.most)
        if not self.drift > 0:
            raise CompositionError(f"drift={self.drift}: give a number above 0, such as 0.01")

    @property
    @override
    def limit(self) -> float | None:
        return self.drift

    @override
    def length(self, steps: int) -> int:
        return self.most


def as_schedule(every: int | Schedule) -> Schedule:
    """The schedule that is meant; a number of steps is a constant one.

    Raises:
        CompositionError: less than one step.
    """
    return every if isinstance(every, Schedule) else Constant(every)
