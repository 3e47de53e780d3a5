"""Latency and bandwidth of the links of each level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from gradwire.core.link import Link
from gradwire.core.rates import spoken_rate
from gradwire.topology.levels import Level, Topology

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
