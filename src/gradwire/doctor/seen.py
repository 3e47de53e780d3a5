"""What a host has, for whoever reads its examination: versions, ports, GPUs and what joins them."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.doctor.facts import Facts
from gradwire.topology.gpus import nvlinks_between


def seen(facts: Facts) -> tuple[str, ...]:
    """Lines about a process and its host: versions, all that `gradwire topology` shows, and which GPUs reach which.

    >>> from gradwire.topology import Host, HostIdentity
    >>> facts = Facts(Host(HostIdentity("a")), {"python": "3.12.4", "torch": "2.13.0"})
    >>> print(*seen(facts)[:2], sep="\\n")
    python 3.12.4, torch 2.13.0
    host a
    """
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return (*([versions] if versions else []), *facts.host.summary.splitlines(), *_matrices(facts))


def _matrices(facts: Facts) -> list[str]:
    """NVLinks between GPUs, by their numbers in NVML, and which of them read each other's memory, by those in CUDA."""
    gpus, reach = facts.host.gpus or (), facts.devices.peer_access or ()
    links = _table("NVLinks", len(gpus), lambda one, other: str(nvlinks_between(gpus[one], gpus[other])))
    peers = _table("reads", len(reach), lambda one, other: "yes" if reach[one][other] else "no")
    return [*(links if any(gpu.nvlinks for gpu in gpus) else []), *peers]


def _table(title: str, count: int, cell: Callable[[int, int], str]) -> list[str]:
    """Rows of a table of all pairs; nothing where there are none."""
    if count < 2:
        return []
    heads = [f"GPU {number}" for number in range(count)]
    wide = max(len(head) for head in [title, *heads])
    rows = [f"{title:<{wide}}  {'  '.join(f'{head:>5}' for head in heads)}"]
    for one, head in enumerate(heads):
        cells = ["-" if one == other else cell(one, other) for other in range(count)]
        rows.append(f"{head:<{wide}}  {'  '.join(f'{each:>5}' for each in cells)}")
    return rows
