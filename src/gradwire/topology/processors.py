"""How many processors the ranks of a machine have: whether one is spare, and how much they slow each other down."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_core(rank: int, machines: Sequence[Hashable], cores: int, threads: int) -> bool:
    """Whether there are cores for a rank, if those before it on its machine have theirs; the first one always has.

    Args:
        rank: which.
        machines: of each rank: `HostIdentity.machine`.
        cores: that the rank may run on.
        threads: that it computes on.

    >>> [has_core(rank, ["a", "b", "a", "a"], cores=2, threads=1) for rank in range(4)]
    [True, True, True, False]
    """
    before = machines[:rank].count(machines[rank])
    return before == 0 or (before + 1) * threads <= cores


class Processors(NamedTuple):
    """The cores of a machine, and the ranks that share them.

    Emulated hosts and containers of one machine have one set of cores, so the machine counts and not the node.

    Attributes:
        cores: that a rank may run on.
        threads: that a rank computes on.
        ranks: on the machine.

    >>> Processors(cores=4, threads=1, ranks=2).has_spare, Processors(cores=2, threads=1, ranks=2).has_spare
    (True, False)
    >>> Processors(cores=2, threads=1, ranks=8).crowding
    4.0
    """

    cores: int
    threads: int
    ranks: int

    @property
    def has_spare(self) -> bool:
        """Whether each rank has a core more than it computes on, which may serve the network meanwhile."""
        return self.cores >= self.ranks * (self.threads + 1)

    @property
    def crowding(self) -> float:
        """How many times longer a rank computes beside the others, which do so at the same time, than alone."""
        return max(1.0, self.ranks * self.threads / self.cores)

    @classmethod
    def fewest(cls, machines: Sequence[Hashable], cores: Sequence[int], threads: Sequence[int]) -> Processors:
        """Return those of the rank that has the fewest for itself.

        Args:
            machines: of each rank: `HostIdentity.machine`.
            cores, threads: of each rank.

        >>> Processors.fewest(["a", "a", "b"], [2, 2, 8], [1, 1, 4])
        Processors(cores=2, threads=1, ranks=2)
        """
        ranks = Counter(machines)
        found = [cls(*each) for each in zip(cores, threads, (ranks[name] for name in machines), strict=True)]
        return max(found, key=lambda each: each.ranks * (each.threads + 1) / each.cores)
