"""Network interfaces, as `/sys/class/net` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.core.rates import spoken_rate
from gradwire.topology.sysfs import folders_in, numa_node_of, text_of, whole_number_of

_ETHERNET, _INFINIBAND, _LOOPBACK = 1, 32, 772  # ARPHRD_* in the kernel's if_arp.h
_VIRTUAL = frozenset({"loopback", "bridge", "virtual", "vlan", "vxlan", "macvlan", "tun"})
_UNKNOWN_MBIT_PER_S = frozenset({0, 65535, 4294967295})
"""What kernels of different ages say for an unknown speed besides -1: 16 and 32 bits without a sign."""


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this host.

    Attributes:
        name: such as "eth0".
        kind: "ethernet", "wlan", "infiniband" (IP over InfiniBand), "bond", "loopback", "bridge", "vlan", "virtual"
            (a veth pair and all else without a device), "other"; None where nothing about it can be read.
        bits_per_s: in each direction; None where the kernel does not know, as in most virtual machines, and for
            virtual interfaces, since a veth pair says 10 Gbit/s whatever limits it.
        state: "up", "down", "unknown" and so on (RFC 2863).
        numa_node: that its device is attached to.

    >>> NetworkInterface("eth0", "ethernet", 1e9, "up").summary
    'eth0: ethernet, 1 Gbit/s, up'
    """

    name: str
    kind: str | None = None
    bits_per_s: float | None = None
    state: str | None = None
    numa_node: int | None = None

    @property
    def is_virtual(self) -> bool:
        """Whether no device stands behind it, as far as is known."""
        return self.kind in _VIRTUAL

    @property
    def summary(self) -> str:
        """One line for people."""
        rate = "speed unknown" if self.bits_per_s is None else spoken_rate(self.bits_per_s)
        words = [self.kind or "unknown kind", *([] if self.is_virtual else [rate])]
        words += [self.state or "state unknown", *([] if self.numa_node is None else [f"NUMA node {self.numa_node}"])]
        return f"{self.name}: {', '.join(words)}"


def read_interfaces(root: Path = Path("/sys"), own: Mapping[str, int] | None = None) -> tuple[NetworkInterface, ...]:
    """Return the network interfaces of this host.

    Args:
        root: where sysfs is mounted.
        own: number of each interface of this process's network namespace, by name, as `socket.if_nameindex` has them.
            A sysfs that was mounted in another namespace shows that one's interfaces, perhaps by the same names. What
            is not of this namespace is left out, and what sysfs does not show is known by name alone.
    """
    folders = [folder for folder in folders_in(root / "class" / "net") if folder.is_dir()]  # not bonding_masters
    if own is not None:
        folders = [folder for folder in folders if own.get(folder.name) == whole_number_of(folder / "ifindex")]
    found = [_read(folder) for folder in folders]
    missing = set(own or ()) - {interface.name for interface in found}
    return (*found, *(NetworkInterface(name) for name in sorted(missing)))


def _read(folder: Path) -> NetworkInterface:
    kind = _kind(folder)
    mbit_per_s = None if kind in _VIRTUAL else whole_number_of(folder / "speed")
    is_known = mbit_per_s is not None and mbit_per_s > 0 and mbit_per_s not in _UNKNOWN_MBIT_PER_S
    rate = 1e6 * mbit_per_s if is_known and mbit_per_s is not None else None
    return NetworkInterface(folder.name, kind, rate, text_of(folder / "operstate"), numa_node_of(folder / "device"))


def _kind(folder: Path) -> str | None:
    link_type, device_type = whole_number_of(folder / "type"), _device_type(folder)
    if link_type == _LOOPBACK:
        return "loopback"
    for name, kind in (("bridge", "bridge"), ("bonding", "bond"), ("tun_flags", "tun")):
        if (folder / name).exists():
            return kind
    if not (folder / "device").exists():
        return device_type if device_type in _VIRTUAL else "virtual"
    if link_type is None:
        return None
    if device_type == "wlan" or (folder / "wireless").exists():
        return "wlan"
    return {_ETHERNET: "ethernet", _INFINIBAND: "infiniband"}.get(link_type, "other")


def _device_type(folder: Path) -> str | None:
    try:
        lines = (folder / "uevent").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.removeprefix("DEVTYPE=") for line in lines if line.startswith("DEVTYPE=")), None)
