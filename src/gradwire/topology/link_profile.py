"""All that was measured of the links between the ranks of a group, with what it is true of, and the file of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from gradwire.core.checked import thread_safe
from gradwire.core.errors import TopologyError
from gradwire.core.figures import listed
from gradwire.core.link import Curve, Link, TimedSize
from gradwire.topology.axis_links import AxisLink
from gradwire.topology.identity import HostIdentity
from gradwire.topology.levels import Level, Topology
from gradwire.topology.reduction_times import Probe, ReductionTimes

_FORMAT = 5
_SHOWN_HOSTS = 4

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class KeptRoutes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of the routes that one all-reduce may take.

    Attributes:
        groups: the ranks that reduce together.
        method: whose routes they are.
        curves: of each route, bytes of the payload and seconds, by rising size.
    """

    groups: tuple[tuple[int, ...], ...]
    method: str
    curves: dict[str, Annotated[tuple[tuple[int, Seconds], ...], msgspec.Meta(min_length=1)]]

    def __post_init__(self) -> None:
        for route in self.curves:
            self.curve_of(route)  # refuses sizes that do not rise

    def curve_of(self, route: str) -> Curve:
        """Seconds by size of a route.

        >>> KeptRoutes(((0, 1),), "none", {"Ring": ((4, 1.0), (8, 2.0))}).curve_of("Ring").seconds(6)
        1.5
        """
        return Curve(tuple(TimedSize(*point) for point in self.curves[route]))


class KeptReduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ReductionTimes`, and the buckets that they are of.

    Attributes:
        caps: bytes of the first bucket and of the others.
        nbytes, least_s, cold_s, cold_error_s: see `ReductionTimes`.
        probes: bytes, seconds and their error of each probe; an error is null where a size was timed once.
    """

    caps: tuple[int, int]
    nbytes: int
    least_s: Seconds
    probes: Annotated[tuple[tuple[int, Seconds, Seconds | None], ...], msgspec.Meta(min_length=1)]
    cold_s: Seconds
    cold_error_s: Seconds

    def __post_init__(self) -> None:
        _ = self.times.curve  # refuses sizes that do not rise

    @classmethod
    def of(cls, times: ReductionTimes, caps: tuple[int, int]) -> KeptReduction:
        """What a file says of times."""
        probes = tuple((size, s, error if math.isfinite(error) else None) for size, s, error in times.probes)
        return cls(caps, times.nbytes, times.least_s, probes, times.cold_s, times.cold_error_s)

    @property
    def times(self) -> ReductionTimes:
        """The times.

        >>> times = ReductionTimes(8, 0.1, (Probe(8, 0.2, math.inf),))
        >>> KeptReduction.of(times, (10, 20)).times == times
        True
        """
        probes = tuple(Probe(size, s, math.inf if error is None else error) for size, s, error in self.probes)
        return ReductionTimes(self.nbytes, self.least_s, probes, self.cold_s, self.cold_error_s)


class LinkProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of links, alike on every rank, and all that it is true of.

    Attributes:
        format: of the file.
        hosts: `HostIdentity.key` of each rank; empty where nothing is kept for another run.
        names: `HostIdentity.name` of each rank, for errors.
        levels: the groups of each level.
        settings: what links were asked for: backend, device, and variables that choose an interface.
        links: of each level, without what a description says.
        routes: what `exchange=auto` chooses by.
        reductions: what reports estimate by.
    """

    format: int = _FORMAT
    hosts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    levels: dict[str, tuple[tuple[int, ...], ...]] = {}
    settings: dict[str, str] = {}
    links: tuple[AxisLink, ...] = ()
    routes: tuple[KeptRoutes, ...] = ()
    reductions: tuple[KeptReduction, ...] = ()

    def __post_init__(self) -> None:
        if len(self.hosts) != len(self.names):
            raise ValueError(f"{len(self.hosts)} hosts with {len(self.names)} names")

    @classmethod
    def of_ranks(
        cls, topology: Topology, identities: Sequence[HostIdentity], settings: Mapping[str, str]
    ) -> LinkProfile:
        """The profile of these ranks, of whose links nothing was measured yet."""
        groups = {level.name: level.groups for level in topology.levels}
        keys, names = tuple(each.key for each in identities), tuple(each.name for each in identities)
        return cls(_FORMAT, keys, names, groups, dict(settings))

    @classmethod
    def from_text(cls, text: str) -> LinkProfile:
        """What `to_text` made.

        Raises:
            TopologyError: damaged, or of another version.
        """
        try:
            format_ = msgspec.json.decode(text, type=thread_safe(_OfFormat)).format
            if format_ != _FORMAT:
                raise TopologyError(f"it has format {format_}, and {_FORMAT} is known")
            return msgspec.json.decode(text, type=thread_safe(cls))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise TopologyError(f"it is no link profile ({str(error)[:120]})") from error

    def to_text(self) -> str:
        """The text of the file: JSON, for people too."""
        return json.dumps(msgspec.to_builtins(self), indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> LinkProfile:
        """The profile that a file holds, on whatever host it is read.

        Raises:
            TopologyError: there is none that can be read.
        """
        try:
            return cls.from_text(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise TopologyError(f"{file} cannot be read: {error}") from error
        except TopologyError as error:
            raise TopologyError(f"{file} cannot be used, since {error}") from error

    def link_between(self, ranks: Sequence[int]) -> Link:
        """The link that ranks of a group wait for: that of the coarsest level that parts them.

        Raises:
            TopologyError: it has no measured rate.

        >>> from gradwire.topology import MeasuredPair
        >>> inside, between = (MeasuredPair((0, other), 1e-3 * other, 1e-9) for other in (1, 2))
        >>> levels = {"rank": ((0,), (1,), (2,)), "node": ((0, 1), (2,))}
        >>> links = (AxisLink("rank", (inside,)), AxisLink("node", (between,)))
        >>> profile = LinkProfile(levels=levels, links=links)
        >>> profile.link_between((0, 1)).alpha_s, profile.link_between((0, 1, 2)).alpha_s
        (0.001, 0.002)
        """
        for level, groups in reversed(self.levels.items()):
            if sum(not {*ranks}.isdisjoint(group) for group in groups) > 1:
                return self.link_of(level)
        raise TopologyError(f"ranks {listed(ranks)} are not parted by any level of the link profile")

    def link_of(self, level: str) -> Link:
        """The link between groups of a level.

        Raises:
            TopologyError: it has no measured rate: a description says all of it, or no limit was seen.
        """
        found = next((each for each in self.links if each.level == level), None)
        if found is None:
            raise TopologyError(f"the link profile has no measured links between {level}s")
        if not found.link.beta_s_per_byte > 0:
            why = "showed no limit" if found.pairs else "were described and not measured"
            again = "again" if found.pairs else "without GRADWIRE_TOPOLOGY"
            raise TopologyError(
                f"links between {level}s {why}, so the link profile has no rate of them: give a rate such as 1gbit, or "
                f"measure {again}"
            )
        return found.link

    @property
    def measured_on(self) -> str | None:
        """Where links were measured, for people; None where no hosts are known.

        >>> LinkProfile(hosts=("a", "a", "b"), names=("a", "a", "b")).measured_on
        'links measured on a, b'
        >>> names = tuple(f"host{i}" for i in range(100))
        >>> LinkProfile(hosts=names, names=names).measured_on
        'links measured on host0, host1, host2, host3 and 96 others'
        """
        names = list(dict.fromkeys(self.names))
        shown, others = names[:_SHOWN_HOSTS], len(names) - _SHOWN_HOSTS
        rest = f" and {others} other{'s' * (others > 1)}" if others > 0 else ""
        return f"links measured on {', '.join(shown)}{rest}" if names else None

    def with_links(self, links: Sequence[AxisLink]) -> LinkProfile:
        """The same with the links of all levels."""
        return msgspec.structs.replace(self, links=tuple(AxisLink(each.level, each.pairs) for each in links))

    def has_link(self, level: Level) -> bool:
        """Whether the links of a level are known: they were measured, or its description says all."""
        return any(link.level == level.name and (link.pairs or level.is_described) for link in self.links)

    def routes_of(self, groups: Sequence[Sequence[int]], method: str, names: Sequence[str]) -> tuple[Curve, ...] | None:
        """The curves of these routes; None where one of them was not timed."""
        for kept in self.routes:
            if (kept.groups, kept.method) == (tuple(map(tuple, groups)), method) and {*names} == {*kept.curves}:
                return tuple(kept.curve_of(name) for name in names)
        return None

    def with_routes(self, groups: Sequence[Sequence[int]], method: str, curves: Mapping[str, Curve]) -> LinkProfile:
        """The same with the times of routes, in place of older ones."""
        points = {name: tuple((size, s) for size, s in curve.points) for name, curve in curves.items()}
        new = KeptRoutes(tuple(map(tuple, groups)), method, points)
        others = [kept for kept in self.routes if (kept.groups, kept.method) != (new.groups, new.method)]
        return msgspec.structs.replace(self, routes=(*others, new))

    def reduction_of(self, nbytes: int, caps: tuple[int, int]) -> ReductionTimes | None:
        """How long so many bytes in such buckets took; None where they were not timed."""
        found = (kept.times for kept in self.reductions if (kept.nbytes, kept.caps) == (nbytes, tuple(caps)))
        return next(found, None)

    def with_reduction(self, times: ReductionTimes, caps: tuple[int, int]) -> LinkProfile:
        """The same with the times of a model's gradients, in place of older ones."""
        new = KeptReduction.of(times, (caps[0], caps[1]))
        others = [kept for kept in self.reductions if (kept.nbytes, kept.caps) != (new.nbytes, new.caps)]
        return msgspec.structs.replace(self, reductions=(*others, new))


class _OfFormat(msgspec.Struct):
    format: int


def difference(found: LinkProfile, wanted: LinkProfile) -> str | None:
    """What a file is true of and this run is not, for an error; None where it may be used.

    >>> here = LinkProfile(2, ("host a boot 1 net 2",), ("a",), {}, {"backend": "gloo"})
    >>> there = LinkProfile(2, ("host b boot 1 net 2",), ("b",), {}, {"backend": "gloo"})
    >>> difference(there, here)
    'it was measured with rank 0 on b, which runs on a now'
    """
    if len(found.hosts) != len(wanted.hosts):
        return f"it was measured with {len(found.hosts)} ranks, and there are {len(wanted.hosts)}"
    for rank, (then, now) in enumerate(zip(found.hosts, wanted.hosts, strict=True)):
        if then != now:
            was, runs = found.names[rank], wanted.names[rank]
            if was == runs:
                return f"it was measured before {runs}, of rank {rank}, was started anew or got another network"
            return f"it was measured with rank {rank} on {was}, which runs on {runs} now"
    if found.levels != wanted.levels:
        return "it was measured with other groups of ranks"
    for key in sorted({*found.settings, *wanted.settings}):
        then, now = found.settings.get(key, ""), wanted.settings.get(key, "")
        if then != now:
            return f"it was measured with {key}={then or 'unset'}, which is {now or 'unset'} now"
    return None
