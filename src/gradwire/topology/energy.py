"""Joules that this host has used: the counters of Linux's powercap for processors and memory, of NVML for GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from gradwire.topology.gpus import asked, has_begun


class EnergyCounter(NamedTuple):
    """A counter of joules.

    Attributes:
        name: what it counts, such as "package-0" or "GPU 0".
        joules: since some time.
        wraps_at: joules at which it begins again; 0 if never.
    """

    name: str
    joules: float
    wraps_at: float = 0.0


class EnergyMeter:
    """Sums up what the host uses in stretches of time: between `skip()` and the `add_up()`s that follow it.

    Processors count by `intel-rapl` zones under /sys/class/powercap, which AMD's have too: packages and memory. Only
    root may read these files on most systems. GPUs count by NVML's total energy (Volta and later).

    Args:
        root: where sysfs is mounted.
        nvml: the module `pynvml`, or what stands in for it; None leaves GPUs out.

    References:
        Documentation/power/powercap/powercap.rst of Linux; `nvmlDeviceGetTotalEnergyConsumption` of NVML.

    >>> EnergyMeter(root=Path("/nowhere")).spent_j is None
    True
    """

    def __init__(self, root: Path = Path("/sys"), nvml: Any | None = None) -> None:
        self._root, self._nvml = root, nvml if nvml is not None and has_begun(nvml) else None
        self._last = self._read()
        self._spent_j = 0.0

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the counters; none where the host does not tell its power."""
        return tuple(self._last)

    @property
    def spent_j(self) -> float | None:
        """Joules of all stretches; None where the host does not tell its power."""
        return self._spent_j if self._last else None

    def skip(self) -> None:
        """Begin a stretch: what was used since the last reading does not count."""
        self._last = self._read() if self._last else {}

    def add_up(self) -> None:
        """Count what was used since the last reading. It must come more often than a counter wraps: every minute."""
        if not self._last:
            return
        now = self._read()
        for name, before in self._last.items():
            if (after := now.get(name)) is not None:
                used = after.joules - before.joules
                self._spent_j += used if used >= 0 else used + after.wraps_at
        self._last = now

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            asked(self._nvml, "nvmlShutdown")
            self._nvml = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, EnergyCounter]:
        return {counter.name: counter for counter in (*_zones(self._root), *self._gpus())}

    def _gpus(self) -> Iterator[EnergyCounter]:
        if self._nvml is None:
            return
        for index in range(asked(self._nvml, "nvmlDeviceGetCount") or 0):
            handle = asked(self._nvml, "nvmlDeviceGetHandleByIndex", index)
            used = None if handle is None else asked(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)
            if used is not None:
                yield EnergyCounter(f"GPU {index}", used / 1e3)


def _zones(root: Path) -> Iterator[EnergyCounter]:
    """Packages and their memory. Other zones are parts of a package (core, uncore), or the whole machine (psys)."""
    for zone in sorted((root / "class" / "powercap").glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                used, most = (int((zone / file).read_text()) for file in ("energy_uj", "max_energy_range_uj"))
                yield EnergyCounter(f"{name} ({zone.name})", used / 1e6, most / 1e6)
