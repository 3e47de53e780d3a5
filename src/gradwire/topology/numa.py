"""NUMA nodes and their processors, as `/sys/devices/system/node` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradwire.topology.sysfs import cpus_in, folders_in, text_of


@dataclass(frozen=True)
class NumaNode:
    """Processors that are equally near to a part of the memory.

    Attributes:
        number: as `numactl` counts them.
        cpus: numbers of its logical processors, which may be none; None where they cannot be read.

    >>> NumaNode(1, (8, 9)).summary
    'NUMA node 1: 2 CPUs'
    """

    number: int
    cpus: tuple[int, ...] | None

    @property
    def summary(self) -> str:
        """One line for people."""
        count = "CPUs unknown" if self.cpus is None else f"{len(self.cpus)} CPU{'s' * (len(self.cpus) != 1)}"
        return f"NUMA node {self.number}: {count}"


def read_numa_nodes(root: Path = Path("/sys")) -> tuple[NumaNode, ...] | None:
    """Return the NUMA nodes of this host; None where the kernel shows none, as one without NUMA does.

    Args:
        root: where sysfs is mounted.
    """
    found: list[NumaNode] = []
    for folder in folders_in(root / "devices" / "system" / "node"):
        number = folder.name.removeprefix("node")
        if folder.name.startswith("node") and number.isdigit():
            listed = folder / "cpulist"
            found.append(NumaNode(int(number), cpus_in(text_of(listed) or "") if listed.exists() else None))
    return tuple(found) or None
