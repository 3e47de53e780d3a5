"""What a host can see of itself: interfaces, RDMA ports, NUMA nodes, GPUs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.topology.gpus import Gpu, find_nvml, nvlink_groups, read_gpus
from gradwire.topology.identity import HostIdentity
from gradwire.topology.interfaces import NetworkInterface, read_interfaces
from gradwire.topology.numa import NumaNode, read_numa_nodes
from gradwire.topology.rdma import RdmaPort, read_rdma_ports

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Host:
    """What was read about a host. None is what could not be read, and an empty tuple what is not there.

    Attributes:
        identity: by what it is told from others.
        interfaces: of its network namespace.
        rdma_ports: InfiniBand, RoCE, iWARP.
        numa_nodes: with their processors.
        gpus: with their NVLinks.

    >>> print(Host(HostIdentity("a"), (NetworkInterface("eth0", "ethernet", 1e9, "up"),), (), None, None).summary)
    host a
      eth0: ethernet, 1 Gbit/s, up
      no RDMA port
      NUMA nodes unknown
      GPUs unknown: NVML is not installed, or has no driver
    """

    identity: HostIdentity
    interfaces: tuple[NetworkInterface, ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()
    numa_nodes: tuple[NumaNode, ...] | None = None
    gpus: tuple[Gpu, ...] | None = None

    @property
    def summary(self) -> str:
        """A few lines for people."""
        lines = [*(each.summary for each in self.interfaces if not each.is_virtual)]
        virtual = [each.name for each in self.interfaces if each.is_virtual]
        lines += [f"virtual: {', '.join(virtual)}"] if virtual else []
        lines += [] if self.interfaces else ["no network interface can be read"]
        lines += [each.summary for each in self.rdma_ports] or ["no RDMA port"]
        lines += [each.summary for each in self.numa_nodes or ()] or ["NUMA nodes unknown"]
        lines += self._gpu_lines()
        return "\n  ".join([f"host {self.identity.name}", *lines])

    def _gpu_lines(self) -> list[str]:
        if self.gpus is None:
            return ["GPUs unknown: NVML is not installed, or has no driver"]
        lines = [each.summary for each in self.gpus] or ["no GPU"]
        joined = [group for group in nvlink_groups(self.gpus) if len(group) > 1]
        return [*lines, *(f"joined by NVLink: GPUs {_listed(group)}" for group in joined)]


def read_host(root: Path = SYSFS, nvml: Any | None = None, identity: HostIdentity | None = None) -> Host:
    """Read what this host can see of itself, without asking any other.

    Args:
        root: where sysfs is mounted.
        nvml: the module `pynvml` or what stands in for it; None looks for the module, if `root` is the real one.
        identity: None is that of this process.
    """
    is_real = root == SYSFS
    return Host(
        identity=identity or HostIdentity.here(),
        interfaces=read_interfaces(root, _own_interfaces() if is_real else None),
        rdma_ports=read_rdma_ports(root),
        numa_nodes=read_numa_nodes(root),
        gpus=read_gpus(find_nvml() if nvml is None and is_real else nvml, root),
    )


def _own_interfaces() -> dict[str, int] | None:
    with contextlib.suppress(OSError):
        return {name: number for number, name in socket.if_nameindex()}
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
