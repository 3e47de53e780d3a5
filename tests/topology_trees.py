"""Small copies of what sysfs shows on hosts of several kinds, and a stand-in for NVIDIA's management library."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NET, RDMA, NUMA = "class/net", "class/infiniband", "devices/system/node"


def made(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below a root, each with the end of line that the kernel puts there."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def interface(name: str, speed: str, state: str = "up", numa_node: int = 0, link_type: int = 1) -> dict[str, str]:
    """An interface with a device."""
    folder = f"{NET}/{name}"
    return {
        f"{folder}/type": str(link_type),
        f"{folder}/speed": speed,
        f"{folder}/operstate": state,
        f"{folder}/uevent": f"INTERFACE={name}\nIFINDEX=2",
        f"{folder}/ifindex": "2",
        f"{folder}/device/numa_node": str(numa_node),
    }


def loopback() -> dict[str, str]:
    """`lo`, whose speed the kernel refuses to say."""
    return {f"{NET}/lo/type": "772", f"{NET}/lo/operstate": "unknown", f"{NET}/lo/ifindex": "1"}


def rdma_port(
    device: str, rate: str, layer: str, state: str = "4: ACTIVE", numa_node: int = 0, node_type: str = "1: CA"
) -> dict[str, str]:
    """Port 1 of a device."""
    folder = f"{RDMA}/{device}"
    return {
        f"{folder}/node_type": node_type,
        f"{folder}/device/numa_node": str(numa_node),
        f"{folder}/ports/1/rate": rate,
        f"{folder}/ports/1/link_layer": layer,
        f"{folder}/ports/1/state": state,
        f"{folder}/ports/1/phys_state": "5: LinkUp",
    }


def numa(*cpulists: str) -> dict[str, str]:
    """NUMA nodes with their processors, and what lies beside them."""
    nodes = {f"{NUMA}/node{number}/cpulist": cpus for number, cpus in enumerate(cpulists)}
    return {**nodes, f"{NUMA}/possible": f"0-{len(cpulists) - 1}", f"{NUMA}/has_cpu": "0"}


def workstation() -> dict[str, str]:
    """One interface of 1 Gbit/s, of a desktop: the kernel says -1 for the NUMA node of a device."""
    return {**loopback(), **interface("enp5s0", "1000", numa_node=-1), **numa("0-15")}


def dgx() -> dict[str, str]:
    """Eight NDR ports, four on each of two NUMA nodes, and an interface for management."""
    files = {**loopback(), **interface("eno1", "10000"), **numa("0-55,112-167", "56-111,168-223")}
    for number in range(8):
        files |= rdma_port(f"mlx5_{number}", "400 Gb/sec (4X NDR)", "InfiniBand", numa_node=number // 4)
        files |= interface(f"ibp{number}", "400000", numa_node=number // 4, link_type=32)
        files |= {f"{RDMA}/mlx5_{number}/device/net/ibp{number}/dev_port": "0"}
    return files


def roce() -> dict[str, str]:
    """Two ports of 100 Gbit/s Ethernet with RDMA, of which one is unplugged, below a bond and a bridge."""
    files = {**loopback(), **interface("ens1f0np0", "100000", numa_node=1), **numa("0-7", "8-15")}
    files |= interface("ens1f1np1", "-1", "down", numa_node=1)
    files |= rdma_port("mlx5_0", "100 Gb/sec (4X EDR)", "Ethernet", numa_node=1)
    files |= rdma_port("mlx5_1", "40 Gb/sec (4X QDR)", "Ethernet", "1: DOWN", numa_node=1)
    files |= {f"{RDMA}/mlx5_{i}/device/net/ens1f{i}np{i}/dev_port": "0" for i in range(2)}
    for name, mark in (("bond0", "bonding/mode"), ("br0", "bridge/stp_state")):
        files |= {f"{NET}/{name}/type": "1", f"{NET}/{name}/{mark}": "0", f"{NET}/{name}/speed": "100000"}
        files |= {f"{NET}/{name}/operstate": "up", f"{NET}/{name}/uevent": f"DEVTYPE={mark.split('/')[0]}"}
    files |= {f"{NET}/veth1/type": "1", f"{NET}/veth1/speed": "10000", f"{NET}/veth1/operstate": "up"}
    files |= {f"{NET}/vlan7/type": "1", f"{NET}/vlan7/speed": "100000", f"{NET}/vlan7/uevent": "DEVTYPE=vlan"}
    return {**files, f"{NET}/bonding_masters": "bond0"}


class NvmlError(Exception):
    """As `pynvml.NVMLError`: `value` is the library's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


MISSING, INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN = 0, 2, 3, 999


def _raise(code: int, *_: object) -> None:
    raise NvmlError(code)


class Nvml:
    """Stands in for the module `pynvml`.

    Args:
        links: of each GPU: for each link the number of the GPU at its other end, "switch", or None where it is down.
        speed: MB/s of a link.
        fails: calls that the driver refuses, with the code, or `MISSING` where the module has none of the name.
    """

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(
        self, links: Sequence[Sequence[int | str | None]], speed: int = 0, fails: Mapping[str, int] | None = None
    ) -> None:
        self._links, self._speed, self._fails = links, speed, fails or {}
        self.is_open = False

    def __getattribute__(self, name: str) -> Any:
        code = None if name.startswith("_") else self._fails.get(name)
        if code is None:
            return object.__getattribute__(self, name)
        if code == MISSING:  # a version of the module without this call
            raise AttributeError(name)
        return functools.partial(_raise, code)

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self._links)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x1A + handle:02X}:00.0".encode())

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0  # OK, over PCIe too

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self._links[handle]:
            raise NvmlError(NOT_SUPPORTED)
        if link >= len(self._links[handle]):
            raise NvmlError(INVALID_ARGUMENT)
        return int(self._links[handle][link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self._links[handle][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        peer = self._links[handle][link]
        return self.nvmlDeviceGetPciInfo(peer if isinstance(peer, int) else 0xC0)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Sequence[int]) -> list[SimpleNamespace]:
        value = SimpleNamespace(uiVal=self._speed)
        return [SimpleNamespace(nvmlReturn=0 if self._speed else NOT_SUPPORTED, value=value) for _ in fields]
