"""A file that says of a topology what no rank can see: sites, and how they are joined.

    [[level]]                       # the coarsest first
    name = "site"
    groups = [[0, 1], [2, 3]]       # ranks; every rank is in one group
    rate = "50mbit"                 # of the link between two sites, in each direction
    latency_ms = 20                 # one way: half of what ping shows

A level without groups gives a rate or a latency to one that is known anyway: "node" (between nodes), or "rank" (between
the ranks of a node). In place of groups every level may have a `size`, which is how many of it lie in one group above;
then the sizes of all levels, "rank" among them, multiply to the number of ranks, which follow each other.

Nodes that a file names replace those that were found, but no host is in two of them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

from gradwire.core.errors import TopologyError
from gradwire.core.figures import listed, ranks_named
from gradwire.core.nearest import meant
from gradwire.core.rates import parse_rate
from gradwire.topology.levels import NODE, RANK, Group, Level, Topology

_KEYS = ("name", "groups", "size", "rate", "latency_ms")


@dataclass(frozen=True)
class DescribedLevel:
    """What a file says of a level; None is what it does not say."""

    name: str
    groups: tuple[Group, ...] | None = None
    size: int | None = None
    bits_per_s: float | None = None
    latency_s: float | None = None


def described(
    found: Topology, text: str, source: str = "the description", members: Sequence[int] | None = None
) -> Topology:
    """Return the topology that was found, with what a file says of them.

    Args:
        found: by the hosts of the ranks.
        text: of the file, in TOML.
        source: what errors call it.
        members: which ranks of the file these are, where the file is of more ranks; None: it is of these.

    Raises:
        TopologyError: a file that cannot be read, names a rank twice or not at all, has sizes that do not multiply to
            the number of ranks, or puts the ranks of one host into two groups.

    >>> text = '''
    ... [[level]]
    ... name = "site"
    ... groups = [[0, 1], [2, 3]]
    ... rate = "50mbit"
    ... '''
    >>> print(described(Topology.of_keys(["a", "b", "c", "d"]), text).summary)
    4 ranks on 4 nodes of 1 rank
    2 sites of 2 ranks (described as joined by 50 Mbit/s)
    """
    try:
        levels_read = read_levels(text)
        if members is not None:
            levels_read = _among(levels_read, members)
        finest_first = _by_groups(levels_read, found.world_size)[::-1]
        levels = {level.name: level for level in found.levels}
        named = {level.name: _level(level, levels.get(level.name)) for level in finest_first}
        hosts = Level("host", found.groups)
        for level in named.values():
            _require_whole_hosts(level, hosts)
        others = tuple(level for name, level in named.items() if name not in levels)
        return Topology((*(named.get(name, level) for name, level in levels.items()), *others))
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from error


def read_levels(text: str) -> tuple[DescribedLevel, ...]:
    """Read the levels of a file, the coarsest first, whatever the ranks are.

    Raises:
        TopologyError: no TOML, an unknown key, or a value of another kind.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"it is no TOML: {error}") from error
    for key in data:
        if key != "level":
            raise TopologyError(f"it has {key!r} beside its levels: write [[level]] above each of them")
    tables = data.get("level")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in cast("list[Any]", tables)):
        raise TopologyError('it has no levels: write [[level]], and below it name = "site" and groups = [[0, 1], [2]]')
    levels = tuple(_read(table) for table in cast("list[dict[str, Any]]", tables))
    names = [level.name for level in levels]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TopologyError(f"level {twice} is described twice")
    return levels


def _read(table: dict[str, Any]) -> DescribedLevel:
    for key in table:
        if key not in _KEYS:
            raise TopologyError(f"a level has no {key!r}: {meant(key, _KEYS)}")
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        raise TopologyError('a level has no name: write name = "site"')
    if "groups" in table and "size" in table:
        raise TopologyError(f"level {name} has both groups and a size: write one of them")
    size, latency_ms = table.get("size"), table.get("latency_ms")
    if size is not None and (type(size) is not int or size < 1):
        raise TopologyError(f"level {name} has size {size!r}: write a whole number of 1 or more")
    if latency_ms is not None and (type(latency_ms) not in (int, float) or not 0 <= latency_ms < math.inf):
        raise TopologyError(f"level {name} has latency_ms {latency_ms!r}: write milliseconds, such as 20")
    groups = _groups(name, table["groups"]) if "groups" in table else None
    latency_s = None if latency_ms is None else 1e-3 * latency_ms
    return DescribedLevel(name, groups, size, _rate(name, table.get("rate")), latency_s)


def _rate(name: str, rate: object) -> float | None:
    if rate is None:
        return None
    if not isinstance(rate, str):
        raise TopologyError(f'level {name} has rate {rate!r}: write it with its unit in quotes, such as "50mbit"')
    try:
        return parse_rate(rate)
    except ValueError as error:
        raise TopologyError(f"level {name}: {error}") from error


def _groups(name: str, groups: object) -> tuple[Group, ...]:
    lists = cast("list[Any]", groups) if isinstance(groups, list) else []
    are_ranks = [
        isinstance(group, list) and all(type(rank) is int for rank in cast("list[Any]", group)) for group in lists
    ]
    if not lists or not all(are_ranks) or not all(lists):
        raise TopologyError(f"level {name} has no groups of ranks: write groups = [[0, 1], [2, 3]]")
    return tuple(sorted(tuple(sorted(group)) for group in lists))


def _by_groups(levels: Sequence[DescribedLevel], world_size: int) -> tuple[DescribedLevel, ...]:
    """The same levels, where sizes have become groups."""
    sized = [level for level in levels if level.size is not None]
    if not sized:
        return tuple(levels)
    if len(sized) < len(levels) or levels[-1].name != RANK:
        raise TopologyError(f'where one level has a size, all have, and the last one is named "{RANK}"')
    sizes = [level.size or 1 for level in levels]
    product = math.prod(sizes)
    if product != world_size:
        shown = " x ".join(map(str, sizes))
        raise TopologyError(f"sizes {shown} make {product} ranks, and there are {world_size}")
    made: list[DescribedLevel] = []
    for place, level in enumerate(levels):
        width = math.prod(sizes[place + 1 :])
        groups = tuple(tuple(range(first, first + width)) for first in range(0, world_size, width))
        made.append(replace(level, groups=groups, size=None))
    return tuple(made)


def _among(levels: Sequence[DescribedLevel], members: Sequence[int]) -> tuple[DescribedLevel, ...]:
    """What a file says of some of its ranks, which are numbered anew."""
    whole = _by_groups(levels, math.prod(level.size or 1 for level in levels))
    numbers = {rank: number for number, rank in enumerate(members)}
    return tuple(replace(level, size=None, groups=level.groups and _kept(level.groups, numbers)) for level in whole)


def _kept(groups: Sequence[Group], numbers: Mapping[int, int]) -> tuple[Group, ...]:
    kept = (tuple(sorted(numbers[rank] for rank in group if rank in numbers)) for group in groups)
    return tuple(sorted(group for group in kept if group))


def _level(said: DescribedLevel, known: Level | None) -> Level:
    """A level as it is described."""
    groups = said.groups if said.groups is not None else known.groups if known is not None else None
    if groups is None:
        raise TopologyError(f"level {said.name} has no groups: write groups = [[0, 1], [2, 3]]")
    if known is not None:
        _require_every_rank(said.name, groups, sum(known.sizes))
    if said.name == RANK and any(len(group) > 1 for group in groups):
        raise TopologyError(f'level "{RANK}" is each rank by itself: give groups to another one, such as "{NODE}"')
    return Level(said.name, groups, said.bits_per_s, said.latency_s)


def _require_every_rank(name: str, groups: Sequence[Group], world_size: int) -> None:
    ranks = sorted(rank for group in groups for rank in group)
    twice = next((one for one, other in pairwise(ranks) if one == other), None)
    if twice is not None:
        raise TopologyError(f"level {name} has rank {twice} twice")
    beyond = [rank for rank in ranks if not 0 <= rank < world_size]
    if beyond:
        raise TopologyError(f"level {name} has rank {beyond[0]}, and there are ranks 0 to {world_size - 1}")
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        raise TopologyError(f"level {name} misses {ranks_named(missing)}")


def _require_whole_hosts(level: Level, hosts: Level) -> None:
    _require_every_rank(level.name, level.groups, sum(hosts.sizes))
    for host in hosts.groups:
        if level.name != RANK and len({level.group_of(rank) for rank in host}) > 1:
            raise TopologyError(
                f"level {level.name} puts ranks {listed(host)} into different groups, and they run on one host"
            )
