"""Which pairs of ranks stand for the links of a level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradwire.topology.levels import Topology

MOST_IN_PAIRS = 8
"""Up to so many hosts or ranks all pairs are measured where links are compared, in a round less than there are of them,
of some two seconds each; beyond that each is in one pair or two."""


class RankPair(NamedTuple):
    """Two ranks, the lower one first."""

    first: int
    second: int


def rounds_of_pairs(topology: Topology, place: int) -> tuple[tuple[RankPair, ...], ...]:
    """Return pairs of ranks that the links of a level join, in one or two rounds; pairs of a round talk at once.

    Each group of the level is in a pair, so a slow host is found among a thousand, and no group is in two pairs of a
    round, so pairs do not share its link: neighbours are paired, and where their number is odd the last one meets the
    first one in a round of its own. Between the ranks of a node only the first two are asked: they share the memory
    with the others, who would disturb them.

    Args:
        topology: all levels.
        place: of the level.

    >>> topology = Topology.of_keys(["a", "a", "b", "b", "c"])
    >>> rounds_of_pairs(topology, 0)
    ((RankPair(first=0, second=1), RankPair(first=2, second=3)),)
    >>> rounds_of_pairs(topology, 1)
    ((RankPair(first=0, second=2),), (RankPair(first=0, second=4),))
    """
    together: list[RankPair] = []
    after: list[RankPair] = []
    heads = {group[0] for group in topology.levels[place].groups}
    for above in topology.above(place):
        firsts = [rank for rank in above if rank in heads]
        if place == 0:
            firsts = firsts[:2]
        together += _neighbours(firsts)
        if len(firsts) > 1 and len(firsts) % 2:
            after.append(RankPair(*sorted((firsts[0], firsts[-1]))))
    return tuple(tuple(pairs) for pairs in (together, after) if pairs)


def all_pairs_in_rounds(ranks: Sequence[int]) -> tuple[tuple[RankPair, ...], ...]:
    """Return all pairs of some ranks, in rounds in which no rank has two partners: n - 1 of them, or n if n is odd.

    One rank keeps its place on a circle and the others move on by one place between rounds (the circle method).

    >>> all_pairs_in_rounds([0, 2, 4])
    ((RankPair(first=2, second=4),), (RankPair(first=0, second=4),), (RankPair(first=0, second=2),))
    """
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds: list[tuple[RankPair, ...]] = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        pairs = [RankPair(*sorted((one, other))) for one, other in facing if one is not None and other is not None]
        rounds += [tuple(sorted(pairs))] if pairs else []
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(rounds)


def _neighbours(firsts: Sequence[int]) -> list[RankPair]:
    return [RankPair(one, other) for one, other in zip(firsts[::2], firsts[1::2], strict=False)]
