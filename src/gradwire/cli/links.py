"""The links that a command line tells: by a rate, or by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradwire.core.errors import SpecError
from gradwire.core.link import Link

if TYPE_CHECKING:
    from gradwire.core.axis import SubGroups
    from gradwire.topology.link_profile import LinkProfile


class MeasuredLinks(NamedTuple):
    """The link of every rank to every other, and where it was measured that of each level."""

    slowest: Link
    profile: LinkProfile | None = None

    def of_axes(self, axes: Sequence[SubGroups]) -> dict[SubGroups, Link]:
        """The links of axes that were measured; nothing travels on one of a single rank."""
        profile = self.profile
        if profile is None:
            return {}
        ranks = range(len(profile.hosts))
        largest = {axis: max((axis.members(rank) for rank in ranks), key=len) for axis in axes}
        return {axis: profile.link_between(group) for axis, group in largest.items() if len(group) > 1}


def read_links(rate: str | None, latency_ms: float | None, ranks: int) -> MeasuredLinks | None:
    """What --rate, --latency and --hosts say: a rate, or the file of a link profile; None where they say nothing.

    Raises:
        SpecError: what is no rate or no time, or a file that was measured with another number of ranks.
        TopologyError: a file that cannot be read.
    """
    if rate is not None and rate.endswith(".json"):
        return _profiled(Path(rate), latency_ms, ranks)
    link = _link(rate, latency_ms)
    return None if link is None else MeasuredLinks(link)


def _profiled(file: Path, latency_ms: float | None, ranks: int) -> MeasuredLinks:
    from gradwire.topology.link_profile import LinkProfile

    profile = LinkProfile.read(file)
    if latency_ms is not None:
        raise SpecError(f"--latency belongs to a rate, and {file} has measured latencies: leave it out")
    if len(profile.hosts) != ranks:
        raise SpecError(f"{file} was measured with {len(profile.hosts)} ranks: give --hosts {len(profile.hosts)}")
    return MeasuredLinks(profile.link_between(range(ranks)), profile)


def _link(rate: str | None, latency_ms: float | None) -> Link | None:
    from gradwire.network import parse_rate

    if rate is None and latency_ms is not None:
        raise SpecError("--latency tells nothing without --rate: give --rate 100mbit too")
    latency_ms = 0.1 if latency_ms is None else latency_ms
    if not 0 <= latency_ms < float("inf"):
        raise SpecError(f"--latency {latency_ms} is no time: give milliseconds, 0 or more")
    try:
        return Link(latency_ms * 1e-3, 8 / parse_rate(rate)) if rate else None
    except ValueError as error:
        raise SpecError(str(error)) from error
