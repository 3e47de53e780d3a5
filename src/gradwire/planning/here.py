"""Hardware as it is found on this machine, and links as they were measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gradwire.core.errors import SpecError, TopologyError
from gradwire.core.figures import listed
from gradwire.planning.hardware import Hardware
from gradwire.topology import Gpu, NetworkInterface, nvlink_groups, read_host
from gradwire.topology.link_profile import LinkProfile

BUDGET_S = 0.5
"""Seconds that each rate is measured for."""
PRODUCT = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices whose product is timed: large enough that a larger one is no faster."""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes that are copied: more than any cache has."""
UNKNOWN_GBIT_PER_S = 10.0
"""Of a node whose network's rate the kernel does not tell; NCCL takes the same."""
PCIE_GB_PER_S = 32.0
"""Between GPUs of a node that NVLinks do not join, or where NVML does not tell: PCIe 4.0 with 16 lanes, one way."""


def hardware_here(budget_s: float = BUDGET_S) -> Hardware:
    """Return what this machine can do: its GPUs, or its processors as one device, at the rates that are measured now.

    Products are in bfloat16 on a GPU, and in float32 on processors, which train in that. Their rate is one that was
    reached, so `sustained` is 1; so is that of memory. Plan with `Efficiencies(1.0, 1.0, links)`.

    Links are not measured, and `with_links` takes measured ones. The network has the rate of all interfaces that are up
    and as fast as the fastest one, or 10 Gbit/s where none tells its rate, and the devices of the node share it. GPUs
    of a node have the rate of their NVLinks where NVML tells that these join all of them; else they are assumed to have
    32 GB/s, that of PCIe 4.0.

    Args:
        budget_s: seconds for each of the two measurements.

    >>> found = hardware_here(budget_s=0.01)
    >>> found.peak_tflops > 0 and found.memory_gb_per_s > 0
    True
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    size, dtype = PRODUCT[device.type], torch.bfloat16 if is_gpu else torch.float32
    one, other = (torch.rand(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = _fastest_s(lambda: one @ other, budget_s)
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _fastest_s(lambda: target.copy_(source), budget_s)
    if is_gpu:
        properties = torch.cuda.get_device_properties(device)
        memory, processors, node = properties.total_memory, properties.multi_processor_count, torch.cuda.device_count()
    else:
        memory, processors, node = _memory_bytes(), torch.get_num_threads(), 1
    memory_gb_per_s = 2 * source.nbytes / copy_s / 1e9  # read and written
    host = read_host()
    return Hardware(
        name="here",
        peak_tflops=2 * size**3 / product_s / 1e12,
        memory_gb=memory / 1e9,
        memory_gb_per_s=memory_gb_per_s,
        processors=processors,
        node=node,
        node_gb_per_s=_node_gb_per_s(host.gpus or ()) if is_gpu else memory_gb_per_s / 2,
        network_gbit_per_s=_network_gbit_per_s(host.interfaces, node),
        sustained=1.0,
    )


def with_links(on: Hardware, file: Path) -> Hardware:
    """Return hardware whose links are those of a link profile, which `gradwire topology --cache FILE` has written.

    Links between ranks of a node are those of the profile's level "rank", where it has nodes of several ranks. Links
    between nodes are those of its coarsest level. Their rates were reached, so plan with `Efficiencies(links=1.0)`.

    One rank of each node measured the link between nodes, and had it to itself, so its rate is divided by the ranks of
    a node. A profile that tells that it was measured over NCCL is taken as it is: there each GPU is taken to have a
    network card of its own, and where GPUs share cards, their rate is lower. `gradwire topology` measures over Gloo.

    Args:
        on: whose other figures stand.
        file: of the profile.

    Raises:
        SpecError: a file that is no link profile, that has no measured links, or whose nodes are of several sizes.
    """
    try:
        profile = LinkProfile.read(file)
    except TopologyError as error:
        raise SpecError(str(error)) from error
    links = {each.level: each.link for each in profile.links if each.link.beta_s_per_byte > 0}
    if not links:
        raise SpecError(f"{file} has no measured links: write one by torchrun ... -m gradwire topology --cache {file}")
    sizes = sorted({len(group) for group in profile.levels.get("node", ())} or {1})
    if len(sizes) > 1:
        raise SpecError(f"{file} has nodes of {listed(sizes)} ranks: a plan needs nodes of one size")
    found, node = on, sizes[0]
    if "rank" in links and node > 1:
        inside = links["rank"]
        rate = 1e-9 / inside.beta_s_per_byte
        found = replace(found, node_gb_per_s=rate, node_latency_s=max(inside.alpha_s, 1e-9))
    coarsest = [level for level in profile.levels if level in links and level != "rank"][-1:]
    if coarsest:
        between = links[coarsest[0]]
        shared = 1 if "nccl" in profile.settings.get("backend", "") else node
        rate = 8e-9 / between.beta_s_per_byte / shared
        found = replace(found, network_gbit_per_s=rate, network_latency_s=max(between.alpha_s, 1e-9))
    return replace(found, name=f"{on.name} with the links of {file}", node=node)


def _fastest_s(work: Callable[[], torch.Tensor], budget_s: float) -> float:
    """Seconds of the fastest of as many runs as fit into the budget, at least three: what others took is left out."""
    least, ends = float("inf"), time.perf_counter() + budget_s
    runs = 0
    while runs < 3 or time.perf_counter() < ends:
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        least, runs = min(least, time.perf_counter() - began), runs + 1
    return least


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory_bytes() -> int:
    """Of this machine: what Linux says is there."""
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    except (OSError, StopIteration) as error:
        raise SpecError("the memory of this machine cannot be read: describe its hardware in a TOML file") from error
    return 1024 * int(line.split()[1])


def _node_gb_per_s(gpus: tuple[Gpu, ...]) -> float:
    """What a GPU sends by its NVLinks where these join all GPUs: the rate that NVML tells, of the GPU with least."""
    rates = [len(each.nvlinks or ()) * (each.nvlink_bits_per_s or 0.0) / 8e9 for each in gpus]
    is_joined = len(gpus) > 1 and len(nvlink_groups(gpus)) == 1
    return min(rates) if is_joined and min(rates) > 0 else PCIE_GB_PER_S


def _network_gbit_per_s(interfaces: tuple[NetworkInterface, ...], devices: int) -> float:
    """Of each device of the node: all interfaces that are up and as fast as the fastest one, which devices share.

    A bond is left out: its rate is that of interfaces which count by themselves.
    """
    rates = [each.bits_per_s for each in interfaces if each.state == "up" and each.kind != "bond" and each.bits_per_s]
    fastest = max(rates, default=UNKNOWN_GBIT_PER_S * 1e9)
    return fastest * max(1, rates.count(fastest)) / devices / 1e9
