"""GPUs and the NVLinks between them, as NVIDIA's management library (NVML) tells of them.

That two GPUs can read each other's memory (peer access) says nothing about NVLink, since it works over PCIe as well.
What counts is a link that is active, and what stands at its other end.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradwire.core.rates import spoken_rate
from gradwire.topology.sysfs import numa_node_of

_GPU, _SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t
_NO_SUCH_LINK = (2, 3)  # NVML_ERROR_INVALID_ARGUMENT beyond the last link, NVML_ERROR_NOT_SUPPORTED without any
_MOST_LINKS = 18
_SPEED_FIELD = "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON"


@dataclass(frozen=True)
class NvLink:
    """An active NVLink of a GPU.

    Attributes:
        number: of the link, on this GPU.
        peer: what stands at the other end; None where NVML does not say.
        peer_bus_id: its PCI address, such as "0000:3b:00.0".
    """

    number: int
    peer: Literal["gpu", "switch"] | None
    peer_bus_id: str | None


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host.

    Attributes:
        index: as NVML counts, in the order of PCI addresses. CUDA may count otherwise.
        bus_id: PCI address, such as "0000:3b:00.0".
        name: of the product.
        numa_node: that it is attached to.
        nvlinks: its active links; None where NVML could not tell.
        nvlink_bits_per_s: of each link in each direction, as NVML tells it; None where it does not.
    """

    index: int
    bus_id: str | None = None
    name: str | None = None
    numa_node: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    nvlink_bits_per_s: float | None = None

    @property
    def summary(self) -> str:
        """One line for people.

        >>> Gpu(0, "0000:3b:00.0", "H100", 0, (NvLink(0, "switch", None),), 200e9).summary
        'GPU 0: H100, 0000:3b:00.0, NUMA node 0, 1 NVLink of 200 Gbit/s (25 GB/s)'
        """
        words = [self.name or "unknown name", self.bus_id or "PCI address unknown"]
        words += [] if self.numa_node is None else [f"NUMA node {self.numa_node}"]
        return f"GPU {self.index}: {', '.join([*words, self._links_summary()])}"

    def _links_summary(self) -> str:
        if self.nvlinks is None:
            return "NVLink unknown"
        if not self.nvlinks:
            return "no NVLink"
        rate = self.nvlink_bits_per_s
        each = "" if rate is None else f" of {spoken_rate(rate)} ({rate / 8e9:g} GB/s)"
        return f"{len(self.nvlinks)} NVLink{'s' * (len(self.nvlinks) > 1)}{each}"


def nvlinks_between(one: Gpu, other: Gpu) -> int:
    """How many NVLinks join two GPUs of a host: those that lead from one to the other, or else through switches.

    All switches of a host are taken to be joined, as NCCL does, so of two GPUs with links to switches the one with
    fewer of these decides.

    >>> ring = Gpu(0, "a", nvlinks=(NvLink(0, "gpu", "b"), NvLink(1, "gpu", "d")))
    >>> [nvlinks_between(ring, Gpu(1, bus)) for bus in ("b", "c")]
    [1, 0]
    """
    direct = sum(link.peer_bus_id is not None and link.peer_bus_id == other.bus_id for link in one.nvlinks or ())
    return direct or min(_to_switches(one), _to_switches(other))


def _to_switches(gpu: Gpu) -> int:
    return sum(link.peer == "switch" for link in gpu.nvlinks or ())


def nvlink_groups(gpus: Sequence[Gpu]) -> tuple[tuple[int, ...], ...]:
    """The GPUs that reach each other by NVLinks alone, over others of them if need be: indices, a group each.

    >>> pair = Gpu(0, "a", nvlinks=(NvLink(0, "gpu", "b"),)), Gpu(1, "b", nvlinks=(NvLink(0, "gpu", "a"),))
    >>> nvlink_groups([*pair, Gpu(2, "c", nvlinks=())])
    ((0, 1), (2,))
    """
    left, groups = list(gpus), list[tuple[int, ...]]()
    while left:
        group = [left.pop(0)]
        for member in group:  # it grows meanwhile
            near = [gpu for gpu in left if nvlinks_between(member, gpu) or nvlinks_between(gpu, member)]
            group += near
            left = [gpu for gpu in left if gpu not in near]
        groups.append(tuple(sorted(gpu.index for gpu in group)))
    return tuple(groups)


def find_nvml() -> Any | None:
    """The Python module of NVML, `pynvml` of the package nvidia-ml-py; None where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older package of the same name warns that it is
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None


def read_gpus(nvml: Any | None, root: Path = Path("/sys")) -> tuple[Gpu, ...] | None:
    """Return the GPUs of this host; None where there is no NVML, or no driver for it to talk to.

    Args:
        nvml: the module `pynvml` (`find_nvml`), or what stands in for it.
        root: where sysfs is mounted, for the NUMA node of each.
    """
    if nvml is None or not has_begun(nvml):
        return None
    try:
        count = asked(nvml, "nvmlDeviceGetCount")
        return None if count is None else tuple(_read(nvml, index, root) for index in range(count))
    finally:
        asked(nvml, "nvmlShutdown")


def has_begun(nvml: Any) -> bool:
    """Whether NVML finds a driver; every call that says so wants an `nvmlShutdown`."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def asked(nvml: Any, call: str, *arguments: Any) -> Any | None:
    """Return the answer to a call; None where this version has no such call, or the device refuses."""
    function: Callable[..., Any] | None = getattr(nvml, call, None)
    if function is None:
        return None
    with contextlib.suppress(nvml.NVMLError):
        return function(*arguments)
    return None


def _read(nvml: Any, index: int, root: Path) -> Gpu:
    handle = asked(nvml, "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(index)
    bus_id = _bus_id(asked(nvml, "nvmlDeviceGetPciInfo", handle))
    return Gpu(
        index=index,
        bus_id=bus_id,
        name=_plain(asked(nvml, "nvmlDeviceGetName", handle)),
        numa_node=None if bus_id is None else numa_node_of(root / "bus" / "pci" / "devices" / bus_id),
        nvlinks=_links(nvml, handle),
        nvlink_bits_per_s=_link_rate(nvml, handle),
    )


def _links(nvml: Any, handle: Any) -> tuple[NvLink, ...] | None:
    try:
        return tuple(_active_links(nvml, handle))
    except nvml.NVMLError:
        return None


def _active_links(nvml: Any, handle: Any) -> Generator[NvLink]:
    for number in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MOST_LINKS)):
        try:
            is_active = nvml.nvmlDeviceGetNvLinkState(handle, number) == 1
        except nvml.NVMLError as error:
            if getattr(error, "value", None) in _NO_SUCH_LINK:
                return
            raise
        if is_active:
            kind = asked(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
            # The library's function ends in _v2; its Python module calls it without.
            info = asked(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
            info = info or asked(nvml, "nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, number)
            yield NvLink(number, _peer(kind), _bus_id(info))


def _peer(kind: int | None) -> Literal["gpu", "switch"] | None:
    return "gpu" if kind == _GPU else "switch" if kind == _SWITCH else None


def _link_rate(nvml: Any, handle: Any) -> float | None:
    field = getattr(nvml, _SPEED_FIELD, None)
    values = None if field is None else asked(nvml, "nvmlDeviceGetFieldValues", handle, [field])
    if not values or values[0].nvmlReturn != 0:
        return None
    megabytes_per_s = float(values[0].value.uiVal)
    return 8e6 * megabytes_per_s if megabytes_per_s > 0 else None


def _bus_id(info: Any | None) -> str | None:
    """A PCI address as sysfs writes it; NVML's has a domain of eight digits and capital letters."""
    text = (_plain(getattr(info, "busId", None)) or "").lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}" if rest else None


def _plain(text: Any | None) -> str | None:
    """NVML's texts are bytes in older versions of the module."""
    return text.decode(errors="replace") if isinstance(text, bytes) else None if text is None else str(text)
