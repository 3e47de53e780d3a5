"""Learning rates that fall with staleness: tau, the updates that a server made since the parameters were pulled."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from gradwire.core.errors import CompositionError


class Rate(ABC):
    """A factor of the learning rate."""

    @abstractmethod
    def factor(self, tau: int) -> float:
        """Return the factor at a staleness of `tau` updates, 0 or more; it is 1 at 0."""


@dataclass(frozen=True)
class Constant(Rate):
    """1, whatever the staleness.

    >>> Constant().factor(7)
    1.0
    """

    @override
    def factor(self, tau: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Inverse(Rate):
    """1 / tau, and 1 at tau = 0 (Zhang, Gupta, Lian & Liu 2016, "Staleness-aware Async-SGD").

    >>> [Inverse().factor(tau) for tau in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    def factor(self, tau: int) -> float:
        """1 / max(1, tau)."""
        return 1.0 / max(1, tau)


@dataclass(frozen=True)
class Hyperbolic(Rate):
    """1 / (1 + tau).

    >>> Hyperbolic().factor(3)
    0.25
    """

    def factor(self, tau: int) -> float:
        """1 / (1 + tau)."""
        return 1.0 / (1 + tau)


@dataclass(frozen=True)
class RootHyperbolic(Rate):
    """1 / sqrt(1 + tau).

    >>> RootHyperbolic().factor(3)
    0.5
    """

    def factor(self, tau: int) -> float:
        """1 / sqrt(1 + tau)."""
        return 1.0 / math.sqrt(1 + tau)


@dataclass(frozen=True)
class Geometric(Rate):
    """base^tau.

    Args:
        base: lambda, in (0, 1].

    Raises:
        CompositionError: a base out of range.

    >>> Geometric(0.5).factor(3)
    0.125
    """

    base: float

    def __post_init__(self) -> None:
        if not 0 < self.base <= 1:
            raise CompositionError(f"a base of {self.base}: rates fall with staleness where it lies in (0, 1]")

    @override
    def factor(self, tau: int) -> float:
        return self.base**tau
