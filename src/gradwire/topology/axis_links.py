"""Latency and bandwidth of the links of each level, and the file in which they are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from gradwire.core.errors import TopologyError
from gradwire.core.link import Link
from gradwire.core.rates import spoken_rate
from gradwire.topology.identity import HostIdentity
from gradwire.topology.levels import Level, Topology

_FORMAT = 1
_TYPICAL_BYTES = 1 << 20

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class MeasuredPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a message takes between two ranks, in the slower of the two directions.

    Attributes:
        ranks: the two.
        alpha_s: of an empty message, one way.
        beta_s_per_byte: of each byte of a long one.

    >>> MeasuredPair((0, 1), 0.001, 1e-6).link.seconds(500_000)
    0.501
    """

    ranks: tuple[int, int]
    alpha_s: Seconds
    beta_s_per_byte: Seconds

    @property
    def link(self) -> Link:
        """The same for those who count."""
        return Link(self.alpha_s, self.beta_s_per_byte)


class AxisLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links of one level.

    Attributes:
        level: whose groups they join.
        pairs: that were measured; none where a description says all.
        alpha_s: what a description says in place of what was measured, and
        beta_s_per_byte: the same.
    """

    level: str
    pairs: tuple[MeasuredPair, ...] = ()
    alpha_s: Seconds | None = None
    beta_s_per_byte: Seconds | None = None

    @property
    def link(self) -> Link:
        """What a message takes: of several pairs the slowest for a megabyte, which all others wait for.

        >>> AxisLink("node", (MeasuredPair((0, 1), 1e-3, 1e-6), MeasuredPair((2, 3), 1e-3, 2e-6))).link
        Link(alpha_s=0.001, beta_s_per_byte=2e-06)
        """
        slowest = max((pair.link for pair in self.pairs), key=_typical_s, default=Link(0.0, 0.0))
        return Link(
            slowest.alpha_s if self.alpha_s is None else self.alpha_s,
            slowest.beta_s_per_byte if self.beta_s_per_byte is None else self.beta_s_per_byte,
        )

    @property
    def summary(self) -> str:
        """Latency and rate of the slowest link, and of the fastest where they differ by more than a tenth."""
        said = [
            name for name, value in (("latency", self.alpha_s), ("rate", self.beta_s_per_byte)) if value is not None
        ]
        notes = [f"{' and '.join(said)} as described"] if said else []
        if self.pairs:
            notes.append(f"{len(self.pairs)} pair{'s' * (len(self.pairs) > 1)} measured")
            times = {_typical_s(pair.link): pair.link for pair in self.pairs}
            if max(times) > 1.1 * min(times):
                notes.append(f"this is the slowest; the fastest: {shown(times[min(times)])}")
        return f"{shown(self.link)} ({', '.join(notes)})"


def with_described(links: Sequence[AxisLink], topology: Topology) -> tuple[AxisLink, ...]:
    """Return measured links with what a description of the topology says of each level in their place."""
    levels = {level.name: level for level in topology.levels}
    return tuple(_with_described(each, levels[each.level]) for each in links if each.level in levels)


def _with_described(link: AxisLink, level: Level) -> AxisLink:
    beta_s_per_byte = None if level.bits_per_s is None else 8 / level.bits_per_s
    return AxisLink(level.name, () if level.is_described else link.pairs, level.latency_s, beta_s_per_byte)


def _typical_s(link: Link) -> float:
    return link.seconds(_TYPICAL_BYTES)


def shown(link: Link) -> str:
    """A link as people say it.

    >>> shown(Link(0.005, 1.6e-7))
    '5 ms one way, 50 Mbit/s'
    """
    latency = f"{1e3 * link.alpha_s:.3g} ms" if link.alpha_s >= 1e-3 else f"{1e6 * link.alpha_s:.3g} us"
    rate = "no limit seen" if link.beta_s_per_byte <= 0 else spoken_rate(8 / link.beta_s_per_byte)
    return f"{latency} one way, {rate}"


@dataclass(frozen=True)
class AxisLinks:
    """The links of all levels that have any, the finest first, alike on every rank.

    Attributes:
        links: a level that nothing joins is left out, such as the ranks of nodes of one.
        source: "measured", or the file that they were read from.
        notes: why a file that was there was not used, or could not be written: a sentence each.
    """

    links: tuple[AxisLink, ...]
    source: str = "measured"
    notes: tuple[str, ...] = ()

    def of(self, level: str) -> Link | None:
        """The link between groups of a level; None where nothing joins any.

        >>> links = AxisLinks((AxisLink("node", alpha_s=0.005, beta_s_per_byte=1.6e-7),))
        >>> links.of("node"), links.of("rank")
        (Link(alpha_s=0.005, beta_s_per_byte=1.6e-07), None)
        """
        return next((each.link for each in self.links if each.level == level), None)

    def summary(self, topology: Topology) -> str:
        """A line for each level, and where the figures are from."""
        names = {level.name: topology.links_name(place) for place, level in enumerate(topology.levels)}
        lines = [f"{names[each.level]}: {each.summary}" for each in self.links] or ["nothing to measure: one rank"]
        lines += [] if self.source == "measured" else [f"read from {self.source}"]
        return "\n".join([*lines, *self.notes])


# The file -------------------------------------------------------------------------------------------------------------


class KeptLinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds: pairs that were measured, and all that they are true of.

    Attributes:
        format: of the file.
        hosts: `HostIdentity.key` of each rank.
        names: `HostIdentity.name` of each rank, for errors.
        levels: the groups of each level.
        settings: what links were asked for: backend, device, and variables that choose an interface.
        links: of each level, without what a description says.
    """

    format: int
    hosts: tuple[str, ...]
    names: tuple[str, ...]
    levels: dict[str, tuple[tuple[int, ...], ...]]
    settings: dict[str, str]
    links: tuple[AxisLink, ...]

    def having(self, links: Sequence[AxisLink]) -> KeptLinks:
        """The same with links that were measured."""
        return msgspec.structs.replace(self, links=tuple(AxisLink(each.level, each.pairs) for each in links))


def kept(topology: Topology, identities: Sequence[HostIdentity], settings: Mapping[str, str]) -> KeptLinks:
    """What a file says that belongs to this run, without links."""
    groups = {level.name: level.groups for level in topology.levels}
    keys, names = tuple(each.key for each in identities), tuple(each.name for each in identities)
    return KeptLinks(_FORMAT, keys, names, groups, dict(settings), ())


def to_text(found: KeptLinks) -> str:
    """The text of the file: JSON, for people too."""
    return json.dumps(msgspec.to_builtins(found), indent=1) + "\n"


def from_text(text: str) -> KeptLinks:
    """What `to_text` made.

    Raises:
        TopologyError: damaged, or of another version.
    """
    try:
        found = msgspec.json.decode(text, type=KeptLinks)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise TopologyError(f"it holds no links ({str(error)[:120]})") from error
    if found.format != _FORMAT:
        raise TopologyError(f"it has format {found.format}, and {_FORMAT} is known")
    return found


def difference(found: KeptLinks, wanted: KeptLinks, needed: Sequence[str] = ()) -> str | None:
    """What a file is true of and this run is not, for an error; None where it may be used.

    Args:
        found: in the file.
        wanted: what it should say.
        needed: levels whose links it must have.

    >>> here = KeptLinks(1, ("host a boot 1 net 2",), ("a",), {}, {"backend": "gloo"}, ())
    >>> there = KeptLinks(1, ("host b boot 1 net 2",), ("b",), {}, {"backend": "gloo"}, ())
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
    measured = [link.level for link in found.links if link.pairs]
    missing = next((level for level in needed if level not in measured), None)
    return None if missing is None else f"it has no links of level {missing}"
