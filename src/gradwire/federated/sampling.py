"""Who takes part in a round: drawn from a key, so that a resumed run draws the same."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key


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
    """Draws the clients of a round. A frozen dataclass of settings.

    Attributes:
        count: clients of a round.
    """

    count: int

    @property
    def by_weight(self) -> bool:
        """Whether heavier clients are drawn more often, so that those who were drawn count alike."""
        return False

    @abstractmethod
    def draw(self, clients: int, key: Key) -> list[int]:
        """Return `count` of the numbers below `clients`, each once, in ascending order."""

    def require(self, clients: int) -> None:
        """Refuse a federation that is too small.

        Raises:
            CompositionError: more clients to draw than there are, or none.
        """
        if self.count < 1:
            raise CompositionError(f"a sample of {self.count} clients: draw one at least")
        if self.count > clients:
            raise CompositionError(
                f"a sample of {self.count} clients is larger than the federation of {clients}: draw {clients} at most"
            )


@dataclass(frozen=True)
class Uniform(Sampling):
    """Every client is as likely as any other; memory grows with the sample alone.

    >>> Uniform(3).draw(1_000_000_000, Key(seed=1)) == Uniform(3).draw(1_000_000_000, Key(seed=1))
    True
    """

    count: int

    @override
    def draw(self, clients: int, key: Key) -> list[int]:
        return sorted(generator(key).choice(clients, self.count, replace=False, shuffle=False).tolist())


@dataclass(frozen=True)
class ByWeight(Sampling):
    """Clients are drawn one after another, each with a probability in proportion to its weight among those left.

    Since heavy clients come more often, those who were drawn count alike in the mean. With few clients and a large
    sample that is not quite the weighted mean of all, because nobody is drawn twice.

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

    def require(self, clients: int) -> None:
        """Also refuses another number of weights than clients."""
        super().require(clients)
        if len(self.weights) != clients:
            raise CompositionError(f"{len(self.weights)} weights for {clients} clients: give one a client")

    @override
    def draw(self, clients: int, key: Key) -> list[int]:
        shares = np.asarray(shares_of(self.weights))
        return sorted(generator(key).choice(clients, self.count, replace=False, p=shares / shares.sum()).tolist())
