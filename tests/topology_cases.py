"""What each rank does in the tests of topologies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.errors import TopologyError
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.topology import find_topology

CPU = torch.device("cpu")


def _transport() -> GroupTransport:
    group = dist.group.WORLD
    assert group is not None
    return GroupTransport(group)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def links(rank: int, world_size: int, description: str | None = None, cache: str | None = None) -> dict[str, Any]:
    """Where the ranks are, and what a message takes between them."""
    profiler = LinkProfiler(_transport(), CPU, _path(cache), _path(description))
    found = profiler.topology()
    began = time.perf_counter()
    measured = profiler.axis_links()
    seconds = time.perf_counter() - began
    return {
        "groups": found.topology.groups,
        "links": {each.level: [each.link.alpha_s, each.link.beta_s_per_byte] for each in measured.links},
        "pairs": {each.level: [pair.ranks for pair in each.pairs] for each in measured.links},
        "source": measured.source,
        "notes": measured.notes,
        "summary": f"{found.summary}\n{measured.summary(found.topology)}",
        "seconds": seconds,
    }


def refused(rank: int, world_size: int, descriptions: list[str | None]) -> str:
    """What a rank is told whose group has a description that does not fit."""
    try:
        find_topology(_transport(), CPU, _path(descriptions[rank]))
    except TopologyError as error:
        return str(error)
    return "nothing"
