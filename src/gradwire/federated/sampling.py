"""Who takes part in a round: drawn from a key, so that a resumed run draws the same."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.reducers.aggregate import epsilon, epsilon_of_replacing


def generator(key: Key) -> np.random.Generator:
    """A generator that a key names: equal keys draw alike on every machine."""
    return np.random.Generator(np.random.Philox(key.stream_seed))


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return w_i / sum w.

    Raises:
        CompositionError: no weight, a negative or non-finite one, or a sum of zero.

    >>> shares_of([1, 3])
    [0.25, 0.75]
    """
    bad = [i for i, weight in enumerate(weights) if not 0 <= weight < math.inf]
    if bad:
        raise CompositionError(f"weight {bad[0]} is {weights[bad[0]]}: give each client a finite number of 0 or more")
    total = math.fsum(weights)
    if not total > 0:
        raise CompositionError(
            f"the weights of {len(weights)} clients sum to {total:g}, so they have no mean: give one of them at least "
            "a weight above 0"
        )
    return [weight / total for weight in weights]


class Sampling(ABC):
    """Draws the clients of a round. A frozen dataclass of settings."""

    neighbours: ClassVar[str]
    """Which two federations `epsilon` cannot tell apart, for a sentence such as "for ..."."""

    @property
    def by_weight(self) -> bool:
        """Whether heavier clients are drawn more often, so that those who were drawn count alike."""
        return False

    @abstractmethod
    def expected(self, clients: int) -> float:
        """How many clients a round is expected to have: q W of McMahan et al. 2018."""

    @abstractmethod
    def most(self, clients: int) -> int:
        """How many it has at most."""

    @abstractmethod
    def draw(self, clients: int, key: Key) -> list[int]:
        """Return some of the numbers below `clients`, each once, in ascending order."""

    @abstractmethod
    def require(self, clients: int) -> None:
        """Refuse a federation for which these settings make no sense.

        Raises:
            CompositionError: more clients to draw than there are, or none.
        """

    @abstractmethod
    def epsilon(self, noise: float, rounds: int, delta: float, clients: int) -> float:
        """Return epsilon of so many rounds of a private mean, each divided by `expected`.

        Raises:
            CompositionError: as `gradwire.reducers.aggregate.epsilon`.
        """


class FixedSize(Sampling):
    """Samples of one size.

    Attributes:
        count: clients of a round.
    """

    count: int
    neighbours: ClassVar[str] = "replacing one client by another"

    @override
    def expected(self, clients: int) -> float:
        return self.count

    @override
    def most(self, clients: int) -> int:
        return self.count

    @override
    def require(self, clients: int) -> None:
        if self.count < 1:
            raise CompositionError(f"a sample of {self.count} clients: draw one at least")
        if self.count > clients:
            raise CompositionError(
                f"a sample of {self.count} clients is larger than the federation of {clients}: draw {clients} at most"
            )

    @override
    def epsilon(self, noise: float, rounds: int, delta: float, clients: int) -> float:
        return epsilon_of_replacing(noise, rounds, delta)


@dataclass(frozen=True)
class Uniform(FixedSize):
    """`count` clients at once, without replacement, each as likely as any other (McMahan et al. 2017, Algorithm 1).

    Memory grows with the sample alone.

    >>> Uniform(3).draw(1_000_000_000, Key(seed=1)) == Uniform(3).draw(1_000_000_000, Key(seed=1))
    True
    """

    count: int

    @override
    def draw(self, clients: int, key: Key) -> list[int]:
        return drawn_at_once(clients, self.count, generator(key))

    @override
    def epsilon(self, noise: float, rounds: int, delta: float, clients: int) -> float:
        return epsilon_of_replacing(noise, rounds, delta, self.count / clients)


def drawn_at_once(clients: int, count: int, source: np.random.Generator) -> list[int]:
    """`count` of the numbers below `clients`, all sets as likely, in ascending order."""
    return sorted(source.choice(clients, count, replace=False, shuffle=False).tolist())


@dataclass(frozen=True)
class Poisson(Sampling):
    """Each client takes part with the same probability, by itself, so a round has more clients or fewer, or none.

    This is the sampling of McMahan et al. 2018 (Algorithm 1), and the one whose privacy is accounted best: a private
    mean (`aggregate="dp:1"`) takes a round without clients as any other. Elsewhere such a round is below its quorum.

    How many take part is drawn first, from a binomial distribution, and then who: it is the same distribution, and
    memory grows with the sample alone.

    Args:
        probability: q of each client in each round, in (0, 1].

    Raises:
        CompositionError: a probability out of range.

    >>> [len(Poisson(0.001).draw(2000, Key(seed=1, step=round))) for round in range(6)]
    [1, 0, 3, 1, 1, 2]
    """

    probability: float
    neighbours: ClassVar[str] = "adding or removing one client"

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise CompositionError(f"clients with a probability of {self.probability}: it lies in (0, 1]")

    @override
    def expected(self, clients: int) -> float:
        return self.probability * clients

    @override
    def most(self, clients: int) -> int:
        return clients

    @override
    def require(self, clients: int) -> None:
        """Every probability makes sense for every federation."""

    @override
    def draw(self, clients: int, key: Key) -> list[int]:
        source = generator(key)
        return drawn_at_once(clients, int(source.binomial(clients, self.probability)), source)

    @override
    def epsilon(self, noise: float, rounds: int, delta: float, clients: int) -> float:
        return epsilon(noise, rounds, delta, self.probability)


@dataclass(frozen=True)
class ByWeight(FixedSize):
    """Clients are drawn one after another, each with a probability in proportion to its weight among those left.

    Since heavy clients come more often, those who were drawn count alike in the mean (Li et al. 2020, Algorithm 2, has
    these probabilities and this mean). With few clients and a large sample that is not quite the weighted mean of all,
    because nobody is drawn twice. Privacy gains nothing by it: heavy clients take part most often.

    Args:
        count: clients of a round.
        weights: one a client, such as its number of examples.

    Raises:
        CompositionError: weights as for `shares_of`, or fewer above zero than are to be drawn.
    """

    count: int
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        shares_of(self.weights)
        usable = sum(weight > 0 for weight in self.weights)
        if usable < self.count:
            raise CompositionError(f"a sample of {self.count} clients, of which {usable} have a weight above 0")

    @property
    @override
    def by_weight(self) -> bool:
        return True

    @override
    def require(self, clients: int) -> None:
        """Also refuses another number of weights than clients."""
        super().require(clients)
        if len(self.weights) != clients:
            raise CompositionError(f"{len(self.weights)} weights for {clients} clients: give one a client")

    @override
    def draw(self, clients: int, key: Key) -> list[int]:
        shares = np.asarray(shares_of(self.weights))
        return sorted(generator(key).choice(clients, self.count, replace=False, p=shares / shares.sum()).tolist())
