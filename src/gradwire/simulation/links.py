"""How long a step's messages take among thousands of ranks, on links of several levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from gradwire.core.axis import Axis
from gradwire.core.collective import AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import SpecError
from gradwire.core.figures import listed
from gradwire.core.link import Link
from gradwire.core.messages import SendRecv
from gradwire.drivers.cost import Parameters, asked_of, require_world, specs_of
from gradwire.drivers.interpreter import sent_bytes
from gradwire.drivers.plan import plan
from gradwire.drivers.timing import rounds_of, step_s
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import PAST_WARM_UPS
from gradwire.topology.description import DescribedLevel, read_levels
from gradwire.topology.levels import RANK
from gradwire.topology.link_profile import LinkProfile

LATENCY_S = 1e-4
"""Of a message on a level of a topology file that tells none, as in `gradwire cost`."""

MOST_PAIRED = 64
"""Ranks whose messages between pairs are simulated one by one."""


class LinkLevel(NamedTuple):
    """Groups of equally many ranks that follow each other, and the link that each of them shares.

    Attributes:
        name: of a group.
        ranks: of a group.
        link: from a group to the others, as fast in both directions.
    """

    name: str
    ranks: int
    link: Link


@dataclass(frozen=True)
class LevelLinks:
    """The links of all levels.

    Args:
        levels: the finest first, whose groups are single ranks; each size divides the next one.
        all_reduce: "ring", or "tree": 2 ceil(log2 n) rounds in which each rank sends two buffers at most, over two
            trees (Sanders et al. 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan").

    Raises:
        SpecError: sizes that do not, or no level.

    >>> links = LevelLinks.of_hosts(Link(1e-3, 1e-8), ranks_per_host=8)
    >>> [(level.name, level.ranks) for level in links.levels]
    [('rank', 1), ('host', 8)]
    """

    levels: tuple[LinkLevel, ...]
    all_reduce: Literal["ring", "tree"] = "ring"

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        if sizes[:1] != [1] or any(larger % smaller for smaller, larger in pairwise(sizes)):
            raise SpecError(f"levels of {listed(sizes)} ranks do not lie in each other: each must divide the next one")

    @classmethod
    def of_hosts(cls, link: Link, ranks_per_host: int = 1, inside: Link | None = None) -> LevelLinks:
        """Hosts of equally many ranks, which share the link of their host.

        Args:
            link: of each host.
            ranks_per_host: how many.
            inside: of a rank to the others of its host; None where that takes no time.
        """
        if ranks_per_host == 1:
            return cls((LinkLevel(RANK, 1, link),))
        return cls((LinkLevel(RANK, 1, inside or Link(0.0, 0.0)), LinkLevel("host", ranks_per_host, link)))

    @classmethod
    def of_topology(cls, file: Path) -> LevelLinks:
        """What a file of levels says, see `gradwire.topology.description`. Each level needs its rate.

        Raises:
            SpecError: a file that cannot be read, groups of unequal size, or a level without a rate.
            TopologyError: what `read_levels` raises.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise SpecError(f"--topology {file} cannot be read: {error}") from error
        levels = read_levels(text)
        sizes = _group_sizes(levels, file)
        found = [LinkLevel(level.name, size, _link(level, file)) for level, size in zip(levels, sizes, strict=True)]
        found.sort(key=lambda level: level.ranks)
        return cls(tuple(found) if found[0].ranks == 1 else (LinkLevel(RANK, 1, Link(0.0, 0.0)), *found))

    @classmethod
    def of_profile(cls, file: Path) -> LevelLinks:
        """What was measured: the file of `GRADWIRE_LINKS`.

        Raises:
            TopologyError: a file that cannot be read, or a level that has no measured rate.
            SpecError: groups of unequal size.
        """
        profile = LinkProfile.read(file)
        measured = {each.level for each in profile.links}
        found: list[LinkLevel] = []
        for name, groups in profile.levels.items():
            if name in measured:
                found.append(LinkLevel(name, _equal_size(name, groups, file), profile.link_of(name)))
        found.sort(key=lambda level: level.ranks)
        if not found:
            raise SpecError(f"{file} holds no measured links: make it anew with `gradwire topology --cache`")
        return cls(tuple(found) if found[0].ranks == 1 else (LinkLevel(RANK, 1, Link(0.0, 0.0)), *found))

    def require(self, ranks: int) -> None:
        """Refuse a number of ranks that fills no whole groups.

        Raises:
            SpecError: with the nearest numbers that do.
        """
        for level in self.levels:
            if ranks > level.ranks and ranks % level.ranks:
                below = ranks - ranks % level.ranks
                raise SpecError(
                    f"{ranks} ranks make no whole {level.name}s of {level.ranks}: take {below} or {below + level.ranks}"
                )

    @property
    def outermost(self) -> Link:
        """That of the coarsest level."""
        return self.levels[-1].link

    def seconds(self, request: Collective, ranks: int) -> float:
        """Time of a collective, which is that of the level where it takes longest:

            rounds * alpha + (bytes that leave a group of the level) * beta.

        All sub-groups of the collective's axis send at once, and share the link of a group. Reductions and gathers go
        around rings, which leave a group once. Of an all-to-all each rank sends to all others. The sub-group of the
        first rank stands for all. On one level it is what `gradwire.drivers.timing.step_s` counts.
        """
        members = (request.axis or Axis(ranks)).members(0)
        size = len(members)
        return max((self._level_s(request, level, members) for level in self.levels if size > 1), default=0.0)

    def _level_s(self, request: Collective, level: LinkLevel, members: Sequence[int]) -> float:
        size = len(members)
        inside = sum(rank < level.ranks for rank in members)
        if inside == size:
            return 0.0
        together = max(1, level.ranks // inside)
        sent = float(request.wire_bytes(size))
        if isinstance(request, AllToAll | AllToAllV) and inside > 1:
            sent *= inside * (size - inside) / (size - 1)
        rounds = 1 if isinstance(request, AllToAllV) else rounds_of(request, size)
        if isinstance(request, AllReduce) and self.all_reduce == "tree":
            sent, rounds = 2.0 * request.nbytes, 2 * math.ceil(math.log2(size))
        return level.link.seconds(sent * together, rounds)


def _group_sizes(levels: Sequence[DescribedLevel], file: Path) -> list[int]:
    """Ranks of a group of each level."""
    if all(level.size is not None for level in levels):
        sizes = [level.size or 1 for level in levels]
        return [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    sizes = list[int]()
    for level in levels:
        if level.groups is None and level.name != RANK:
            raise SpecError(f"{file}: level {level.name} has no groups: write groups = [[0, 1], [2, 3]], or a size")
        sizes.append(_equal_size(level.name, level.groups, file) if level.groups else 1)
    return sizes


def _equal_size(name: str, groups: Sequence[Sequence[int]], file: Path) -> int:
    size = len(groups[0])
    if any(len(group) != size for group in groups):
        found = listed(sorted({len(group) for group in groups}))
        raise SpecError(f"{file}: groups of level {name} have {found} ranks, and the simulation wants equally many")
    return size


def _link(level: DescribedLevel, file: Path) -> Link:
    if level.bits_per_s is None:
        raise SpecError(f'{file}: level {level.name} has no rate, which the simulation needs: write rate = "50mbit"')
    return Link(LATENCY_S if level.latency_s is None else level.latency_s, 8 / level.bits_per_s)


class MessageTimes(NamedTuple):
    """What the messages of one step take.

    Attributes:
        seconds: all of them, one collective after the other.
        pieces: waves that they are cut into.
        nbytes: that a rank sends.
    """

    seconds: float
    pieces: int
    nbytes: int


def message_times(reducer: Reducer, model: Parameters, ranks: int, links: LevelLinks) -> MessageTimes:
    """Return what the messages of one step take, without coding.

    It is the cost driver's list of collectives, each at the time of `LevelLinks.seconds`. What this takes grows neither
    with the ranks nor with the model. Messages between pairs are simulated rank by rank (`gradwire.drivers.timing`).

    Raises:
        SpecError, CompositionError: numbers of ranks that the method or the links are not for; messages between pairs
            of more than 64 ranks, or on links of several levels.

    >>> import torch
    >>> from gradwire.spec import as_method
    >>> flat = LevelLinks.of_hosts(Link(0.001, 1e-6))
    >>> model = torch.nn.Linear(1000, 999)
    >>> round(message_times(as_method("none"), model, 4, flat).seconds, 3)
    6.054
    """
    require_world(reducer, ranks)
    links.require(ranks)
    planned = plan(specs_of(model), reducer)
    asked = asked_of(planned, ranks, PAST_WARM_UPS)
    nbytes = sum(times * sent_bytes(request, 0, ranks) for request, times in asked)
    if any(isinstance(request, SendRecv) for request, _ in asked):
        if len(links.levels) > 1 or ranks > MOST_PAIRED:
            raise SpecError(
                f"messages between pairs are simulated one by one, for {MOST_PAIRED} ranks at most on links of one "
                "level: leave exchange= out, or take fewer ranks"
            )
        seconds = step_s(reducer, model, ranks, links.outermost, step=PAST_WARM_UPS)
    else:
        seconds = sum(times * links.seconds(request, ranks) for request, times in asked)
    return MessageTimes(seconds, len(planned.waves), nbytes)
