"""Who may start a step: how far workers may run ahead of the slowest one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from gradwire.core.errors import CompositionError


class Pace(ABC):
    """A rule about clocks: a worker's clock is the number of steps that it has completed."""

    @abstractmethod
    def may_start(self, own: int, slowest: int) -> bool:
        """Whether a worker may start its next step.

        Args:
            own: steps that it has completed.
            slowest: the fewest that any living worker has completed.
        """


@dataclass(frozen=True)
class Free(Pace):
    """Nobody waits for anybody.

    >>> Free().may_start(own=1000, slowest=0)
    True
    """

    @override
    def may_start(self, own: int, slowest: int) -> bool:
        return True


@dataclass(frozen=True)
class Bounded(Pace):
    """Bounded staleness, SSP: own - slowest <= s, so completed steps differ by s + 1 at most (Ho et al. 2013).

    Section 2 of the paper. Where it deviates: there a worker reads from a cache until that is more than s clocks old;
    here it pulls what the servers have now after each of its pushes.

    With s = 0 all workers compute each step from the same parameters, as synchronous training does.

    Args:
        staleness: s, 0 or more.

    Raises:
        CompositionError: a negative s.

    References:
        Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server".

    >>> pace = Bounded(2)
    >>> pace.may_start(own=5, slowest=3), pace.may_start(own=5, slowest=2)
    (True, False)
    """

    staleness: int

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise CompositionError(f"a staleness of {self.staleness}: it is 0, which is synchronous, or more")

    @override
    def may_start(self, own: int, slowest: int) -> bool:
        return own - slowest <= self.staleness


@dataclass(frozen=True)
class Barriers(Pace):
    """A full barrier after every R steps, and `between` two barriers another pace: own // R = slowest // R.

    Args:
        every: R, 1 or more.
        between: free, or a bound.

    Raises:
        CompositionError: a period below 1.

    >>> pace = Barriers(4)
    >>> pace.may_start(own=3, slowest=0), pace.may_start(own=4, slowest=3), pace.may_start(own=4, slowest=4)
    (True, False, True)
    """

    every: int
    between: Pace = Free()

    def __post_init__(self) -> None:
        if self.every < 1:
            raise CompositionError(f"a barrier every {self.every} steps: give 1 or more")

    def may_start(self, own: int, slowest: int) -> bool:
        """Once all have reached the last barrier, and as it is `between`."""
        return own // self.every <= slowest // self.every and self.between.may_start(own, slowest)
