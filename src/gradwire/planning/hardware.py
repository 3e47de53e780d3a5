"""What machines can do: a kind of GPU, the links in a node and between nodes."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes of GPUs. Rates are those of data sheets but for the two fractions.

    Args:
        name: what it is called.
        peak_tflops: of bfloat16 matrix products with dense matrices, in 10^12 operations a second.
        memory_gb: of a GPU, in 10^9 bytes.
        memory_gb_per_s: of its memory.
        processors: streaming multiprocessors; a matrix product is cut into tiles for them.
        node: GPUs of a node.
        node_gb_per_s: what a GPU sends to the others of its node, one way.
        network_gbit_per_s: what each GPU of a node sends to other nodes, one way: a node's network cards over its GPUs.
        sustained: fraction of the peak that large matrix products reach for minutes. A100 reach 0.86 (270 of 312); H100
            lower their clock under load and reach about 0.70 (690 of 989).
        attention: fraction of the peak that fused attention reaches (Dao 2023, Figures 4 to 7; Shah et al. 2024).
        node_latency_s, network_latency_s: of one message.
        coding_gb_per_s: bytes of float32 gradients that a GPU codes and decodes in a second, in 10^9; None: as its
            memory reads and writes what coding touches.

    Raises:
        SpecError: numbers that are not positive, fractions above 1, or counts that are not whole.

    >>> hardware("a100-80g").peak_tflops
    312.0
    """

    name: str
    peak_tflops: float
    memory_gb: float
    memory_gb_per_s: float
    processors: int
    node: int
    node_gb_per_s: float
    network_gbit_per_s: float
    sustained: float = 0.8
    attention: float = 0.5
    node_latency_s: float = 4e-6
    network_latency_s: float = 12e-6
    coding_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (field.name == "coding_gb_per_s" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpecError(f"hardware {self.name}: {field.name}={value!r} is no number")
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"hardware {self.name}: {field.name}={value} must be a finite number above 0")
            if field.name in ("sustained", "attention") and value > 1:
                raise SpecError(f"hardware {self.name}: {field.name}={value} is a fraction of the peak: at most 1")
            if field.name in ("node", "processors") and not isinstance(value, int):
                whole = max(1, round(value))
                raise SpecError(f"hardware {self.name}: {field.name}={value} must be a whole number, such as {whole}")


def _a100(name: str, memory_gb: float, memory_gb_per_s: float, network_gbit_per_s: float = 200.0) -> Hardware:
    return Hardware(
        name=name,
        peak_tflops=312.0,
        memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s,
        processors=108,
        node=8,
        node_gb_per_s=300.0,
        network_gbit_per_s=network_gbit_per_s,
        sustained=0.86,
        attention=0.6,
    )


def _h100(
    name: str, memory_gb: float = 85.0, memory_gb_per_s: float = 3350.0, node_gb_per_s: float = 450.0
) -> Hardware:
    return Hardware(
        name=name,
        peak_tflops=989.0,
        memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s,
        processors=132,
        node=8,
        node_gb_per_s=node_gb_per_s,
        network_gbit_per_s=400.0,
        sustained=0.70,
        attention=0.5,
    )


KNOWN = {
    found.name: found
    for found in (
        Hardware("v100-32g", 125.0, 34.0, 900.0, 80, 8, 150.0, 50.0, sustained=0.80, attention=0.4),
        _a100("a100-40g", 42.0, 1555.0),
        _a100("a100-80g", 85.0, 2039.0),
        _a100("a100-80g-omnipath", 85.0, 2039.0, 50.0),
        _h100("h100-80g"),
        _h100("h800-80g", node_gb_per_s=200.0),
        _h100("h200-141g", 151.0, 4800.0),
        Hardware("b200-180g", 2250.0, 192.0, 8000.0, 148, 8, 900.0, 400.0, sustained=0.70, attention=0.5),
    )
}
"""Clusters by name: DGX nodes with a network card for each GPU, and Jean Zay's A100 nodes with four of 100 Gbit/s
(`a100-80g-omnipath`). What data sheets call 80 GB is 80 GiB, which are 85 of 10^9 bytes."""


def hardware(name: str) -> Hardware:
    """Return a cluster by its name, or from a TOML file whose keys are the fields of `Hardware`.

    Raises:
        SpecError: an unknown name, with the nearest; a file with unknown keys or values that make no sense.
    """
    if name.endswith(".toml"):
        return _read(Path(name))
    if name not in KNOWN:
        raise SpecError(f"no hardware is called {name!r}, and it is no file such as cluster.toml: {meant(name, KNOWN)}")
    return KNOWN[name]


def _read(path: Path) -> Hardware:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is no TOML: {error}") from error
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    for key in found:
        if key not in fields:
            raise SpecError(f"{path}: there is no key {key!r}: {meant(key, fields)}")
    based_on = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name != "name"]
    missing = [name for name in based_on if name not in found]
    if missing:
        raise SpecError(f"{path}: {missing[0]!r} is missing: a cluster needs {', '.join(based_on)}")
    return Hardware(name=str(found.pop("name", path.stem)), **found)
