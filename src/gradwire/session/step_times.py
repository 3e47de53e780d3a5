"""What ranks tell each other of their last steps, so that each knows which part of its waiting was for slower ranks.

A rank's exposed time is communication, and waiting for ranks whose gradients came later. The rank that came last waited
for nobody. So the least exposed time of a step over all ranks is what its communication took.

Ranks write to the store that they met at. It is a message of a few hundred bytes that nobody waits for, and no rank
waits for another one's. Whoever reaches the store's port can write there: everything in it is text, in JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.checked import thread_safe
from gradwire.drivers.window import STEPS, Ready, Sample, Window

SELDOM = (10, 50)
"""Steps between two messages, once a window holds so many, and once it holds all it can. Before there is one a step."""


_Told = tuple[int, Annotated[list[int], Meta(max_length=STEPS)], int, list[tuple[int, int]]]


class ToldSteps(NamedTuple):
    """What one rank tells of its last steps.

    Attributes:
        first: number of the first one.
        exposed_s: of each.
        encode_s: of one of them.
        buckets: of one of them.
    """

    first: int
    exposed_s: tuple[float, ...]
    encode_s: float
    buckets: tuple[Ready, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample], first: int) -> ToldSteps:
        """Tell of steps, one at least: medians of coding, and of the length of backward passes."""
        encode_s = statistics.median(sample.encode_s for sample in samples)
        by_length = sorted((sample.buckets for sample in samples), key=lambda buckets: buckets[:1])
        return cls(first, tuple(sample.exposed_s for sample in samples), encode_s, by_length[len(samples) // 2])

    def to_json(self) -> str:
        """Return it as JSON, times in whole microseconds.

        >>> ToldSteps(5, (0.5,), 0.1, (Ready(-0.25, 100),)).to_json()
        '[5, [500000], 100000, [[-250000, 100]]]'
        """
        buckets = [[_microseconds(at_s), nbytes] for at_s, nbytes in self.buckets]
        return json.dumps([self.first, [*map(_microseconds, self.exposed_s)], _microseconds(self.encode_s), buckets])

    @classmethod
    def from_json(cls, raw: bytes | str) -> ToldSteps:
        """Read it.

        Raises:
            ValueError: it is something else.
        """
        first, exposed, encode, buckets = msgspec.json.decode(raw, type=thread_safe(_Told))
        ready = tuple(Ready(1e-6 * at, nbytes) for at, nbytes in buckets)
        return cls(first, tuple(1e-6 * each for each in exposed), 1e-6 * encode, ready)


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


class StepBoard:
    """Where the ranks of a session tell each other of their steps.

    Args:
        store: of the process group that the ranks belong to.
        name: of this board, the same on all ranks and used for no other.
        rank: of this process in the group.
        ranks: how many.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: int) -> None:
        self._store: Any = PrefixStore(f"gradwire/steps/{name}", store)
        self._rank, self._others = rank, [str(other) for other in range(ranks) if other != rank]

    def tell(self, window: Window, end: int) -> None:
        """Write down the steps of a window, the last of which has the number `end` - 1, where it is time to."""
        count = len(window.samples)
        every = 1 if count <= SELDOM[0] else SELDOM[0] if count < STEPS else SELDOM[1]
        if not count or end % every:
            return
        try:
            self._store.set(str(self._rank), ToldSteps.of(list(window.samples), end - count).to_json())
        except Exception:
            return  # the store went with who held it: reports say then that they cannot tell

    def read(self) -> list[ToldSteps] | None:
        """What the other ranks have told last; None where one of them has told nothing, or the store is gone."""
        try:
            if not self._store.check(self._others):
                return None
            at_once = self._store.has_extended_api()
            found = self._store.multi_get(self._others) if at_once else [self._store.get(key) for key in self._others]
            return [ToldSteps.from_json(raw) for raw in found]
        except Exception:
            return None


class Communication(NamedTuple):
    """What communication took in the steps that all ranks have told of.

    Attributes:
        steps: places in the rank's own window.
        seconds: of communication in each of them, without waiting for slower ranks.
        encode_s: of coding in a step on the slowest rank.
        buckets: of that rank.
    """

    steps: Sequence[int]
    seconds: Sequence[float]
    encode_s: float
    buckets: Sequence[Ready]


def communication(mine: ToldSteps, others: Sequence[ToldSteps], fewest: int) -> Communication | None:
    """What communication took in the steps that all ranks have told of; None where these are fewer than `fewest`.

    >>> quick, slow = (ToldSteps(5, exposed, 0.0, (Ready(0.0, 8),)) for exposed in ((0.5, 0.6), (0.1, 0.2)))
    >>> communication(quick, [slow], 1)
    Communication(steps=range(0, 2), seconds=[0.1, 0.2], encode_s=0.0, buckets=(Ready(at_s=0.0, nbytes=8),))
    """
    told = [mine, *others]
    first = max(each.first for each in told)
    last = min(each.first + len(each.exposed_s) for each in told)
    if last - first < fewest:
        return None
    rows = [each.exposed_s[first - each.first : last - each.first] for each in told]
    slowest = min(range(len(told)), key=lambda i: sum(rows[i]))
    return Communication(
        steps=range(first - mine.first, last - mine.first),
        seconds=[min(column) for column in zip(*rows, strict=True)],
        encode_s=told[slowest].encode_s,
        buckets=told[slowest].buckets,
    )
