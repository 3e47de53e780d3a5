"""Three levels and unequal nodes on emulated links: `python benchmarks/levels.py [--parts sites unequal] [--save]`.

Each rank is a network namespace of its own, with a link of 1 Gbit/s. In part `sites` two ranks share a node, whose link
has 200 Mbit/s, and two nodes a site, whose link has 50 Mbit/s and a round trip of 10 ms. In part `unequal` nodes have
1, 2 and 3 ranks, and links of 50 Mbit/s with a round trip of 4 ms. First the links are measured as `gradwire topology`
does it, and beside it by plain sockets, between the same ranks. Then all methods reduce the gradients of a perceptron,
in turn and in the same processes; `node=auto` is told of sites by `GRADWIRE_TOPOLOGY`, and decides on the links that
were measured. A step's time is the slowest rank's, and the time that its bytes take is that of the level where they
take longest.

Bytes are what leaves each group of a level, without headers, by the counters of its link, less what leaves it where no
method runs between the barriers around a step; beside them stands what `level_bytes` predicts. Without compression the
mean must be the flat one in float64 to rounding, and every method must give all ranks the same bits; the script fails
where it is not so.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from common import save_result
from gradwire import kernels
from gradwire.core.figures import si_bytes
from gradwire.drivers.level_bytes import level_bytes
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.network import Network, Uplinks, parse_rate
from gradwire.network.wire import UplinkMeter, WireMeter
from gradwire.ranks.supervised import run_function
from gradwire.session.figures import DESCRIPTION_VARIABLE, LINKS_VARIABLE
from gradwire.topology import NODE_VARIABLE, Topology
from link_probes import gloo_trip, plain_sockets, round_trips

RATE = "1gbit"
WIDTHS = (512, 1024, 1024, 512)
LEVELS = ("rank", "node", "site")
STREAM_S = 0.1
SETTLE_S = 0.1
CHECKED_STEPS = 2
DEADLINE_S = 560.0
ROUNDING = 1e-6


class Part(NamedTuple):
    """Groups of ranks, and what `node=` says of them."""

    uplinks: tuple[Uplinks, ...]
    node: str
    delay: str

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(self.uplinks[0].sizes)

    @property
    def rates(self) -> dict[str, str]:
        """Of the links of each level."""
        return dict(zip(LEVELS, [RATE, *(each.rate or RATE for each in self.uplinks)], strict=False))

    @property
    def methods(self) -> tuple[str, ...]:
        """Flat fp32 first."""
        return ("none", "int4", f"none,node={self.node}", f"int4,node={self.node}", "int4,node=auto")

    @property
    def description(self) -> str:
        """What no rank can see, as `GRADWIRE_TOPOLOGY` wants it: who shares a site, and nothing of the links."""
        if len(self.uplinks) == 1:
            return ""
        sites = self.uplinks[1]
        groups = [[first + rank for rank in range(size)] for first, size in zip(sites.firsts, sites.sizes, strict=True)]
        return f'[[level]]\nname = "site"\ngroups = {groups}\n'


PARTS = {
    "sites": Part((Uplinks((2, 2, 2, 2), "200mbit"), Uplinks((4, 4), "50mbit")), "2x2", "10ms"),
    "unequal": Part((Uplinks((1, 2, 3), "50mbit"),), "1/2/3", "4ms"),
}


# Links ----------------------------------------------------------------------------------------------------------------


def measured_links(profiler: LinkProfiler, part: Part) -> dict[str, Any]:
    """Latency and rate of each level: as the profiler has them, and as others have them between the same two ranks."""
    found: dict[str, Any] = {}
    for each in profiler.axis_links().links:
        slowest = max(each.pairs, key=lambda pair: pair.beta_s_per_byte)
        rate = part.rates[each.level]
        plain_s, plain_beta = plain_sockets(slowest.ranks, int(STREAM_S * parse_rate(rate) / 8))
        found[each.level] = {
            "emulated": rate,
            "ranks": slowest.ranks,
            "latency_us": 1e6 * slowest.alpha_s,
            "bits_per_s": 8 / slowest.beta_s_per_byte,
            "plain_latency_us": 1e6 * plain_s,
            "plain_bits_per_s": 8 / plain_beta,
            "gloo_latency_us": 1e6 * round_trips(slowest.ranks, gloo_trip),
        }
    return found


# Steps ----------------------------------------------------------------------------------------------------------------


def model() -> dict[str, Tensor]:
    """Tensors of the sizes of a perceptron's parameters."""
    sizes = [size for inputs, outputs in itertools.pairwise(WIDTHS) for size in ((outputs, inputs), (outputs,))]
    return {str(place): torch.zeros(size) for place, size in enumerate(sizes)}


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Some that every rank can make of every other one."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(parameter.shape, generator=generator) for name, parameter in model().items()}


def counted(work: Callable[[], object], own: WireMeter, uplinks: UplinkMeter) -> tuple[float, int, list[list[int]]]:
    """Seconds that it takes, and bytes that leave this rank and each group, between two moments of rest."""
    dist.barrier()
    time.sleep(SETTLE_S)
    before, groups_before = own.read(), uplinks.read()
    dist.barrier()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    dist.barrier()
    time.sleep(SETTLE_S)
    after, levels = own.read(), zip(groups_before, uplinks.read(), strict=True)
    sent = [[b.since(a).payload_tx_bytes for a, b in zip(*level, strict=True)] for level in levels]
    return took, after.since(before).payload_tx_bytes, sent


class Contestant:
    """A method with a session of its own, and what its steps took and sent."""

    def __init__(self, method: str, topology: Topology) -> None:
        self.session = gradwire.Session(model(), method, deadline_s=DEADLINE_S)
        self.found = str(self.session.begun_with)
        parameters = [parameter.requires_grad_() for parameter in model().values()]
        self.predicted = [each.sent for each in level_bytes(self.session.reducer, parameters, topology)]
        self.times_s, self.errors = list[float](), list[float]()
        self.digests = list[str]()
        self.rank_bytes, self.group_bytes = list[int](), list[list[list[int]]]()

    def measure(self, step: int, own: WireMeter, uplinks: UplinkMeter, *, counts: bool) -> None:
        """Reduce the gradients of a step, between two moments in which nothing is under way."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        reduced = gradients(rank, step)
        dist.barrier()
        time.sleep(SETTLE_S)
        before, groups_before = own.read(), uplinks.read()
        dist.barrier()
        began = time.perf_counter()
        self.session.reduce_(reduced)
        took = time.perf_counter() - began
        dist.barrier()
        time.sleep(SETTLE_S)
        after, groups_after = own.read(), uplinks.read()
        if not counts:
            return
        self.times_s.append(took)
        self.rank_bytes.append(after.since(before).payload_tx_bytes)
        levels = zip(groups_before, groups_after, strict=True)
        self.group_bytes.append(
            [[b.since(a).payload_tx_bytes for a, b in zip(*level, strict=True)] for level in levels]
        )
        whole = hashlib.sha256(b"".join(each.numpy().tobytes() for each in reduced.values()))
        self.digests.append(whole.hexdigest())
        if len(self.errors) == CHECKED_STEPS:
            return
        everybody = [gradients(other, step) for other in range(ranks)]
        means = {name: torch.stack([each[name] for each in everybody]).double().mean(0) for name in reduced}
        off = max(float((mean - reduced[name]).abs().max()) for name, mean in means.items())
        self.errors.append(off / max(float(mean.abs().max()) for mean in means.values()))

    def figures(self) -> dict[str, Any]:
        """What the rank found, as JSON has it."""
        names = ("found", "predicted", "times_s", "errors", "digests", "rank_bytes", "group_bytes")
        return {name: getattr(self, name) for name in names}


def on_rank(rank: int, world_size: int, name: str, steps: int, warm: int) -> dict[str, Any]:
    """What every rank does: measure the links, then all methods, in turn."""
    kernels.warm_up()
    part, description = PARTS[name], os.environ.get(DESCRIPTION_VARIABLE)
    own, uplinks = WireMeter.from_environment(), UplinkMeter.from_environment()
    group = dist.group.WORLD
    assert group is not None
    profiler = LinkProfiler(
        GroupTransport(group),
        torch.device("cpu"),
        Path(os.environ[LINKS_VARIABLE]),
        Path(description) if description else None,
    )
    topology = profiler.topology().topology
    links = measured_links(profiler, part)
    summary = f"{topology.summary}\n{profiler.axis_links().summary(topology)}"
    contestants = {method: Contestant(method, topology) for method in part.methods}
    idle = [counted(lambda: None, own, uplinks)[1:] for _ in range(steps)]
    for step in range(warm + steps):
        for one in contestants.values():
            one.measure(step, own, uplinks, counts=step >= warm)
    for one in contestants.values():
        one.session.close()
    methods = {method: one.figures() for method, one in contestants.items()}
    return {"summary": summary, "links": links, "idle": idle, "methods": methods}


# Figures --------------------------------------------------------------------------------------------------------------


def rows_of(name: str, by_rank: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The medians of each method of a part."""
    part, flat_ms = PARTS[name], 0.0
    idle = medians_of_levels([found["idle"] for found in by_rank])
    for method in part.methods:
        ranks = [found["methods"][method] for found in by_rank]
        times_ms = [1e3 * max(each) for each in zip(*(found["times_s"] for found in ranks), strict=True)]
        step_ms = statistics.median(times_ms)
        flat_ms = flat_ms or step_ms
        sent = medians_of_levels([[*zip(found["rank_bytes"], found["group_bytes"], strict=True)] for found in ranks])
        counted_bytes = [[a - b for a, b in zip(*each, strict=True)] for each in zip(sent, idle, strict=True)]
        levels = {
            level: {
                "sent": sent,
                "predicted": predicted,
                "of_prediction": sum(sent) / sum(predicted),
                "bytes_ms": 8e3 * max(predicted) / parse_rate(rate),
            }
            for (level, rate), sent, predicted in zip(
                part.rates.items(), counted_bytes, ranks[0]["predicted"], strict=True
            )
        }
        yield {
            "part": name,
            "method": method,
            "found": ranks[0]["found"],
            "step_ms": step_ms,
            "step_ms_of_all": times_ms,
            "smaller_than_flat": flat_ms / step_ms,
            "bytes_ms": max(level["bytes_ms"] for level in levels.values()),
            "error": max(error for found in ranks for error in found["errors"]),
            "same_bits": all(found["digests"] == ranks[0]["digests"] for found in ranks),
            "levels": levels,
            "idle": dict(zip(LEVELS, idle, strict=False)),
        }


def medians_of_levels(by_rank: Sequence[Sequence[tuple[int, list[list[int]]]]]) -> list[list[float]]:
    """Bytes that leave each group of each level, ranks first, in the median step."""
    ranks = [statistics.median(own for own, _ in steps) for steps in by_rank]
    levels = zip(*(groups for _, groups in by_rank[0]), strict=True)
    return [ranks, *([statistics.median(group) for group in zip(*level, strict=True)] for level in levels)]


def show_links(links: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each level, beside plain sockets."""
    for level, each in links.items():
        rate, plain, us, plain_us = (
            each[name] for name in ("bits_per_s", "plain_bits_per_s", "latency_us", "plain_latency_us")
        )
        print(
            f"  between {level}s, {each['emulated']}: {rate / 1e6:.1f} Mbit/s and {us:.0f} us; plain sockets"
            f" {plain / 1e6:.1f} Mbit/s ({rate / plain:.3f}) and {plain_us:.0f} us ({us / plain_us:.2f});"
            f" torch.distributed {each['gloo_latency_us']:.0f} us"
        )


def show(row: Mapping[str, Any]) -> None:
    """A line of the table."""
    levels = "; ".join(
        f"{level} {si_bytes(max(each['sent']))} ({each['of_prediction']:.3f} of the prediction)"
        for level, each in row["levels"].items()
    )
    print(
        f"{row['part']:>8} {row['method']:<16} {row['step_ms']:7.1f} ms {row['smaller_than_flat']:5.2f}x"
        f" bytes take {row['bytes_ms']:6.1f} ms, error {row['error']:.1e}  {levels}",
        flush=True,
    )


def require_means(row: Mapping[str, Any]) -> None:
    """Refuse a mean that is not the flat one, and ranks that differ."""
    if not row["same_bits"]:
        raise SystemExit(f"{row['method']} gave ranks different bits")
    if row["method"].startswith("none") and row["error"] > ROUNDING:
        raise SystemExit(f"{row['method']} is {row['error']:.1e} off the mean, which is more than rounding")


def run_part(name: str, steps: int, warm: int) -> tuple[str, list[dict[str, Any]]]:
    """A network, its ranks, and what each found."""
    part = PARTS[name]
    with (
        tempfile.TemporaryDirectory(prefix="gradwire-") as folder,
        Network(part.ranks, RATE, uplinks=part.uplinks, delay=part.delay) as net,
    ):
        common = {LINKS_VARIABLE: f"{folder}/links.json", "GRADWIRE_TIME_LINK": "0"}
        if part.description:
            Path(folder, "sites.toml").write_text(part.description)
            common[DESCRIPTION_VARIABLE] = f"{folder}/sites.toml"
        own = [{**common, NODE_VARIABLE: f"node{part.uplinks[0].group_of(rank)}"} for rank in range(part.ranks)]
        told = {"name": name, "steps": steps, "warm": warm}
        found = run_function(f"{__file__}:on_rank", part.ranks, told, DEADLINE_S, net, own)
        return net.description, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    parts, loads = dict[str, Any](), [os.getloadavg()[0]]
    for name in options.parts:
        description, found = run_part(name, options.steps, options.warm)
        loads.append(os.getloadavg()[0])
        print(f"{description}\n{found[0]['summary']}")
        show_links(found[0]["links"])
        rows = list(rows_of(name, found))
        for row in rows:
            show(row)
        print(f"  node=auto found: {rows[-1]['found']}")
        for row in rows:
            require_means(row)
        parts[name] = {
            "network": description,
            "delay": PARTS[name].delay,
            "summary": found[0]["summary"],
            "links": found[0]["links"],
            "rows": rows,
        }
    parameters = sum(parameter.numel() for parameter in model().values())
    print(f"{parameters:,} parameters; load {', '.join(f'{load:.1f}' for load in loads)}")
    if options.save:
        print(save_result("levels", {"parameters": parameters, "steps": options.steps, "loads": loads, "parts": parts}))


if __name__ == "__main__":
    main()
