"""Learning rates that fall with staleness: tau, the updates that a server made since the parameters were pulled.

Where n workers are equally fast, each of the others pushes once between a worker's pull and its push, so tau is n - 1.
It is n - 1 in the mean in any case, as long as nobody waits.
"""

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
    """1 / tau, and 1 at tau = 0.

    The rule of the paper is `ASGD(alpha_0, Inverse())`: alpha_0 / tau, where alpha_0 is the rate of synchronous
    training. It is not divided by the number of workers, since 1 / tau does that already.

    References:
        Zhang, Gupta, Lian & Liu 2016, "Staleness-aware Async-SGD for distributed deep learning", IJCAI, Equation 3.

    >>> [Inverse().factor(tau) for tau in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    def factor(self, tau: int) -> float:
        """1 / max(1, tau)."""
        return 1.0 / max(1, tau)


@dataclass(frozen=True)
class Hyperbolic(Rate):
    """1 / (1 + tau): the polynomial (1 + tau)^-a of FedAsync with a = 1, which weights models there and not pushes.

    References:
        Xie, Koyejo & Gupta 2019, "Asynchronous federated optimization".

    >>> Hyperbolic().factor(3)
    0.25
    """

    def factor(self, tau: int) -> float:
        """1 / (1 + tau)."""
        return 1.0 / (1 + tau)


@dataclass(frozen=True)
class RootHyperbolic(Rate):
    """1 / sqrt(1 + tau): the same polynomial with a = 1/2, by which FedBuff's experiments scale updates.

    References:
        Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation".

    >>> RootHyperbolic().factor(3)
    0.5
    """

    def factor(self, tau: int) -> float:
        """1 / sqrt(1 + tau)."""
        return 1.0 / math.sqrt(1 + tau)


@dataclass(frozen=True)
class Geometric(Rate):
    """base^tau: an exponential penalty, which is Chan & Lane's idea; this form of it is ours.

    Args:
        base: lambda, in (0, 1].

    Raises:
        CompositionError: a base out of range.

    References:
        Chan & Lane 2014, "Distributed asynchronous optimization of convolutional neural networks", Interspeech.

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


@dataclass(frozen=True)
class Relative(Rate):
    """min(1, f(tau) / f(usual)): another rate f, of what is staler than usual. It is ours.

    So `ASGD(1 / n, Relative(f, n - 1))` has n pushes of the usual staleness move as far as one synchronous step, as
    plain `ASGD(1 / n)` does, and shortens those of slow workers. n pushes never move further: not either where workers
    wait for each other and then push together, with a staleness of 0, 1, ..., n - 1.

    Args:
        rate: f, which falls.
        usual: the staleness up to which nothing is shortened, 0 or more.

    Raises:
        CompositionError: a staleness below 0.

    >>> [Relative(Hyperbolic(), usual=3).factor(tau) for tau in (0, 3, 7)]
    [1.0, 1.0, 0.5]
    """

    rate: Rate
    usual: int

    def __post_init__(self) -> None:
        if self.usual < 0:
            raise CompositionError(f"a usual staleness of {self.usual}: it is 0 or more")

    @override
    def factor(self, tau: int) -> float:
        return 1.0 if tau <= self.usual else self.rate.factor(tau) / self.rate.factor(self.usual)
