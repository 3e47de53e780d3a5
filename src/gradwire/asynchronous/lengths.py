"""How many local steps a worker makes between two pushes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from gradwire.core.errors import CompositionError


class Length(ABC):
    """Local steps of a worker's next push."""

    @abstractmethod
    def of(self, worker: int, speeds: Sequence[float]) -> int:
        """Return the number of steps.

        Args:
            worker: who.
            speeds: local steps a second of each living worker's last push; 0 where that is not known.
        """


@dataclass(frozen=True)
class Fixed(Length):
    """H for everyone.

    Raises:
        CompositionError: no step.

    >>> Fixed(8).of(0, [1.0, 4.0])
    8
    """

    steps: int = 1

    def __post_init__(self) -> None:
        _require_steps(self.steps)

    @override
    def of(self, worker: int, speeds: Sequence[float]) -> int:
        return self.steps


@dataclass(frozen=True)
class Matched(Length):
    """H for the fastest worker, and floor(H v / v_max) for one of speed v, at least 1 (Liu et al. 2024, DyLU).

    So all push about equally often. A worker whose speed is not known yet makes H.

    Raises:
        CompositionError: no step.

    >>> Matched(8).of(0, [1.0, 4.0]), Matched(8).of(1, [1.0, 4.0]), Matched(8).of(0, [0.0, 4.0])
    (2, 8, 8)
    """

    steps: int

    def __post_init__(self) -> None:
        _require_steps(self.steps)

    def of(self, worker: int, speeds: Sequence[float]) -> int:
        """In proportion to speed."""
        if not speeds[worker]:
            return self.steps
        return max(1, int(self.steps * speeds[worker] / max(speeds)))


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise CompositionError(f"{steps} local steps between pushes: give 1 or more")
