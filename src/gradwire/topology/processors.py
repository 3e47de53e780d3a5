"""How many processors the ranks of a machine have: whether one is spare, and how much they slow each other down."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import NamedTuple


def own_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores() -> int:
    """How many cores this process may run on."""
    return len(own_cores())


def share(cores: int, parts: int, spared: int = 0) -> int:
    """Return how many of a machine's cores each part gets by `divide`; 0 where there are too few."""
    return max(cores - spared, 0) // parts


def divide(cores: Sequence[int], parts: int, spared: int = 0) -> list[tuple[int, ...]]:
    """Return cores for each of some parts of a machine, none twice; all of them for each where there are too few.

    Args:
        cores: numbers of the machine's.
        parts: that want some.
        spared: the first so many are left to others, if there are enough.

    >>> divide((0, 1, 2, 3, 8), 2)
    [(0, 1), (2, 3)]
    >>> divide((0, 1), 3)
    [(0, 1), (0, 1), (0, 1)]
    >>> divide((0, 1, 2), 2, spared=1), divide((0, 1), 2, spared=1)
    ([(1,), (2,)], [(0, 1), (0, 1)])
    """
    each = share(len(cores), parts, spared)
    return [tuple(cores[spared + part * each :][:each] if each else cores) for part in range(parts)]


def has_core(rank: int, machines: Sequence[Hashable], cores: Sequence[Sequence[int]], threads: Sequence[int]) -> bool:
    """Whether there are cores for a rank, if those before it on its machine have theirs.

    It has them as well where it computes on more threads than it has cores, and none of these is taken.

    Args:
        rank: which.
        machines: of each rank: `HostIdentity.machine`.
        cores: numbers of those that each rank may run on.
        threads: that each rank computes on.

    >>> both = [(0, 1)] * 4
    >>> [has_core(rank, ["a", "b", "a", "a"], both, [1] * 4) for rank in range(4)]
    [True, True, True, False]
    >>> [has_core(rank, ["a"] * 3, [(0,), (1,), (0, 1)], [1] * 3) for rank in range(3)]
    [True, True, False]
    """
    taken, has = set[int](), False
    for each in range(rank + 1):
        if machines[each] == machines[rank]:
            free = [core for core in cores[each] if core not in taken]
            has = len(free) >= min(threads[each], len(cores[each]))
            taken.update(free[: threads[each]] if has else ())
    return has  # of the last one, which is the rank itself


class Processors(NamedTuple):
    """What a rank has of the cores of its machine.

    Attributes:
        cores: that it may run on; one that k ranks may run on counts as 1/k.
        threads: that it computes on.

    >>> Processors(cores=2.0, threads=1).has_spare, Processors(cores=1.0, threads=1).has_spare
    (True, False)
    >>> Processors(cores=0.25, threads=1).crowding
    4.0
    """

    cores: float
    threads: int

    @property
    def has_spare(self) -> bool:
        """Whether the rank has a core more than it computes on, which may serve the network meanwhile."""
        return self.cores >= self.threads + 1

    @property
    def crowding(self) -> float:
        """How many times longer a rank computes beside the others, which do so at the same time, than alone."""
        return max(1.0, self.threads / self.cores)

    @classmethod
    def fewest(cls, machines: Sequence[Hashable], cores: Sequence[Sequence[int]], threads: Sequence[int]) -> Processors:
        """Return those of the rank that has the fewest for its threads.

        Emulated hosts and containers share the cores of their machine unless each of them is kept to its own, so the
        machine counts and not the node.

        Args:
            machines, cores, threads: as of `has_core`.

        >>> Processors.fewest(["a", "a", "b"], [(0, 1), (0, 1), range(8)], [1, 1, 4])
        Processors(cores=1.0, threads=1)
        >>> Processors.fewest(["a", "a"], [(0, 1), (2, 3)], [1, 1])  # ranks that are bound to cores of their own
        Processors(cores=2.0, threads=1)
        """
        users = Counter((machine, core) for machine, own in zip(machines, cores, strict=True) for core in own)
        found = [
            cls(float(sum(Fraction(1, users[machine, core]) for core in own)), count)
            for machine, own, count in zip(machines, cores, threads, strict=True)
        ]
        return max(found, key=lambda each: (each.threads + 1) / each.cores)
