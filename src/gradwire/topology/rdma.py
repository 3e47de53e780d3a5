"""Ports that move memory without the processor: InfiniBand, RoCE and iWARP, as `/sys/class/infiniband` shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gradwire.core.rates import spoken_rate
from gradwire.topology.sysfs import folders_in, numa_node_of, text_of, whole_number_of

_ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device.

    Attributes:
        device: such as "mlx5_0".
        port: its number, from 1.
        kind: "InfiniBand", "RoCE" (a channel adapter on Ethernet) or "iWARP" (a network interface with RDMA on
            Ethernet); None for another one, such as an adapter of a cloud.
        state: "ACTIVE", "DOWN", "INIT", "ARMED".
        bits_per_s: in each direction, as the link is trained: width times speed. An NDR port of four lanes has 400
            Gbit/s, which are 50 GB/s; an HDR port has 200, which are 25 GB/s. None unless the port is active, since
            kernels say 10 Gbit/s (SDR) for a port that is down. A kernel that is older than the speed says so too.
        numa_node: that the device is attached to.
        interface: the network interface of the same device, where there is one.

    >>> RdmaPort("mlx5_0", 1, "InfiniBand", "ACTIVE", 400e9, numa_node=0).summary
    'mlx5_0 port 1: InfiniBand, 400 Gbit/s (50 GB/s), ACTIVE, NUMA node 0'
    """

    device: str
    port: int
    kind: str | None = None
    state: str | None = None
    bits_per_s: float | None = None
    numa_node: int | None = None
    interface: str | None = None

    @property
    def summary(self) -> str:
        """One line for people."""
        rate = self.bits_per_s
        words = [self.kind or "unknown kind"]
        words += ["rate unknown" if rate is None else f"{spoken_rate(rate)} ({rate / 8e9:g} GB/s)"]
        words += [self.state or "state unknown", *([] if self.numa_node is None else [f"NUMA node {self.numa_node}"])]
        words += [] if self.interface is None else [f"interface {self.interface}"]
        return f"{self.device} port {self.port}: {', '.join(words)}"


def read_rdma_ports(root: Path = Path("/sys")) -> tuple[RdmaPort, ...]:
    """Return the RDMA ports of this host; none where no driver of such a device is loaded.

    Args:
        root: where sysfs is mounted.
    """
    found: list[RdmaPort] = []
    for device in folders_in(root / "class" / "infiniband"):
        found += [_read(device, port) for port in folders_in(device / "ports") if port.name.isdigit()]
    return tuple(found)


def rate_in(text: str) -> float | None:
    """The bits per second of a `rate` file; None where it is none.

    >>> rate_in("400 Gb/sec (4X NDR)"), rate_in("2.5 Gb/sec (1X)"), rate_in("fast")
    (400000000000.0, 2500000000.0, None)
    """
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec\b", text)
    return 1e9 * float(match[1]) if match and float(match[1]) > 0 else None


def _read(device: Path, port: Path) -> RdmaPort:
    state = (text_of(port / "state") or "").rpartition(": ")[2] or None  # "4: ACTIVE"
    rate = rate_in(text_of(port / "rate") or "") if state == _ACTIVE else None
    interfaces = folders_in(device / "device" / "net")
    return RdmaPort(
        device=device.name,
        port=int(port.name),
        kind=_kind(text_of(port / "link_layer"), text_of(device / "node_type")),
        state=state,
        bits_per_s=rate,
        numa_node=numa_node_of(device / "device"),
        interface=_interface(interfaces, int(port.name)),
    )


def _interface(interfaces: list[Path], port: int) -> str | None:
    """The interface of a port. `dev_port` counts from 0 where a device has several."""
    if len(interfaces) == 1:
        return interfaces[0].name
    return next((path.name for path in interfaces if whole_number_of(path / "dev_port") == port - 1), None)


def _kind(link_layer: str | None, node_type: str | None) -> str | None:
    if link_layer == "InfiniBand":
        return "InfiniBand"
    if link_layer != "Ethernet" or node_type is None:
        return None
    return {"CA": "RoCE", "RNIC": "iWARP"}.get(node_type.rpartition(": ")[2])  # "1: CA"
