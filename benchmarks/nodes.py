"""Nodes with fast links inside: `python benchmarks/nodes.py [--nodes 2x2] [--rate 50mbit] [--parts ddp hsdp sync]`.

Nodes are network namespaces whose ranks reach each other without a limit; the link between them has that rate. Each
method trains a perceptron of its own, all in the same processes, in turn. Parts: DDP; FSDP2 whose shards lie inside a
node, with copies between nodes (HSDP); and averages of models every four steps (`gradwire.sync`). A step's time is the
slowest rank's; each figure is the median over steps, or over windows of four. Printed beside it: what a node sends to
others in a step, by the counters of its link, and what is predicted of it; and how many times smaller a step's time
above the floor is than that of flat fp32. The floor is the same training without any communication.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import gradwire
from common import save_result
from gradwire import kernels
from gradwire.compare.engines import make_engine
from gradwire.compare.options import parse_nodes
from gradwire.core.figures import si_bytes
from gradwire.network import Network
from gradwire.network.wire import WireMeter
from gradwire.ranks.supervised import run_function

WIDTHS = (512, 1024, 1024, 512)
BATCH = 16
WINDOW = 4
FLOOR, FP32, NODES = "torch.noop", "torch.fp32", "int4,node=auto"
NESTED, BESIDE = "HSDP in fp32", "int4, replicate="
FLAT_SYNC, NODES_SYNC = f"local:{WINDOW},outer=none", f"local:{WINDOW},outer=({NODES})"
PARTS = {
    "ddp": (FLOOR, FP32, "none", "int4", NODES),
    "hsdp": (FLOOR, FP32, NESTED, BESIDE),
    "sync": (FLOOR, FLAT_SYNC, f"local:{WINDOW},outer=int4", NODES_SYNC),
}
"""The floor first, then flat fp32; the last one is the one that is judged."""

SETTLE_S = 0.1


class Part(NamedTuple):
    """What a rank of one part is told."""

    name: str
    ranks_per_node: int
    rounds: int
    warm: int


class Contestant:
    """One method on a model of its own, and what its steps took and sent."""

    def __init__(self, method: str, part: Part) -> None:
        torch.manual_seed(0)
        layers = [layer for sizes in itertools.pairwise(WIDTHS) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.model: nn.Module = nn.Sequential(*layers[:-1])
        self.window = WINDOW if part.name == "sync" else 1
        self.close: Callable[[], None] = lambda: None
        self.sent_bytes: Callable[[], float] = lambda: 0.0
        self.coded_s: Callable[[], float] = lambda: 0.0
        if part.name == "hsdp" and method != FLOOR:
            self._shard(method, part.ranks_per_node)
        else:
            self._replicate(method)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(BATCH, WIDTHS[0], generator=generator)
        self.times_s, self.node_bytes = list[float](), list[float]()
        self.predicted, self.coded = list[float](), list[float]()

    def _replicate(self, method: str) -> None:
        engine = make_engine("ddp")
        self.model = engine.wrap(self.model, method, 25.0)
        side = engine.attach(self.model, SGD(self.model.parameters(), 1e-3), method)
        self.optimizer, self.close = side.optimizer, side.close
        if not method.startswith("torch."):
            self.sent_bytes, self.coded_s = side.predicted_bytes, side.codec_cpu_s

    def _shard(self, method: str, ranks_per_node: int) -> None:
        """Flat over all ranks, over both dimensions of a mesh, or inside nodes with gradwire between copies."""
        ranks = dist.get_world_size()
        nodes = (ranks // ranks_per_node, ranks_per_node)
        if method == FP32:
            mesh = init_device_mesh("cpu", (ranks,))
        else:
            mesh = init_device_mesh("cpu", nodes, mesh_dim_names=("replicate", "shard"))
        over = mesh["shard"] if method == BESIDE else mesh
        for layer in self.model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=over)
        fully_shard(self.model, mesh=over)
        if method == BESIDE:
            session = gradwire.attach(self.model, "int4", replicate=mesh["replicate"])
            self.close, self.sent_bytes = session.close, lambda: float(session.stats().wire_bytes)
            self.coded_s = lambda: session.stats().encode_s
        self.optimizer = SGD(self.model.parameters(), 1e-3)

    def step(self) -> None:
        """Train a step, or a window."""
        for _ in range(self.window):
            self.optimizer.zero_grad(set_to_none=True)
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()

    def measure(self, meter: WireMeter, *, counts: bool) -> None:
        """Make a step, between two moments in which nothing is under way."""
        sent, coded = self.sent_bytes(), self.coded_s()
        before = settled(meter)
        began = time.perf_counter()
        self.step()
        took = time.perf_counter() - began
        after = settled(meter)
        if counts:
            self.times_s.append(took / self.window)
            self.node_bytes.append(after.since(before).tx_bytes / self.window)
            self.predicted.append((self.sent_bytes() - sent) / self.window)
            self.coded.append((self.coded_s() - coded) / self.window)


def settled(meter: WireMeter) -> Any:
    """The counters once nothing is under way, and all ranks ready to begin."""
    dist.barrier()
    time.sleep(SETTLE_S)
    reading = meter.read()
    dist.barrier()
    return reading


def on_rank(rank: int, world_size: int, part: Sequence[Any]) -> dict[str, Any]:
    """What every rank does: all methods of a part, in turn."""
    told = Part(*part)
    kernels.warm_up()
    meter = WireMeter.from_environment()
    contestants = {method: Contestant(method, told) for method in PARTS[told.name]}
    for turn in range(told.warm + told.rounds):
        for one in contestants.values():
            one.measure(meter, counts=turn >= told.warm)
    for one in contestants.values():
        one.close()
    names = ("times_s", "node_bytes", "predicted", "coded")
    return {method: {name: getattr(one, name) for name in names} for method, one in contestants.items()}


def predicted_between(part: Part, method: str, ranks: int, rank_sent: float) -> float | None:
    """Bytes that a node is predicted to send to others in a step; None where the route decides.

    With `node=` it is what `gradwire.cost` says of each rank of a node. Between copies of a sharded model, it is all
    that the sessions of a node's ranks say they sent.
    """
    if method == BESIDE:
        return part.ranks_per_node * rank_sent
    if NODES in method:
        model = [layer for sizes in itertools.pairwise(WIDTHS) for layer in nn.Linear(*sizes).parameters()]
        spec = NODES.replace("auto", str(part.ranks_per_node))
        each = gradwire.cost(spec, model, ranks).between_bytes
        return part.ranks_per_node * each / (WINDOW if part.name == "sync" else 1)
    return 0.0 if method == FLOOR else None


def figures_of(part: Part, by_rank: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The medians of each method of a part."""
    floor_ms = flat_ms = 0.0
    for method in PARTS[part.name]:
        ranks = [found[method] for found in by_rank]
        step_ms = 1e3 * statistics.median(map(max, zip(*(found["times_s"] for found in ranks), strict=True)))
        floor_ms = step_ms if method == FLOOR else floor_ms
        flat_ms = flat_ms or (step_ms if method != FLOOR else 0.0)
        sent = statistics.mean(statistics.median(found["node_bytes"]) for found in ranks)
        said = statistics.mean(statistics.median(found["predicted"]) for found in ranks)
        predicted = predicted_between(part, method, len(ranks), said)
        yield {
            "part": part.name,
            "method": method,
            "step_ms": step_ms,
            "step_ms_of_all": [1e3 * max(each) for each in zip(*(found["times_s"] for found in ranks), strict=True)],
            "above_floor_ms": step_ms - floor_ms,
            "smaller_than_flat": None if method == FLOOR else (flat_ms - floor_ms) / (step_ms - floor_ms),
            "node_bytes": sent,
            "predicted_node_bytes": predicted,
            "of_prediction": sent / predicted if predicted else None,
            "coded_ms": 1e3 * statistics.mean(statistics.median(found["coded"]) for found in ranks),
        }


def show(row: Mapping[str, Any]) -> None:
    """A line of the table."""
    ratio = "" if row["smaller_than_flat"] is None else f"{row['smaller_than_flat']:5.2f}x"
    share = "" if row["of_prediction"] is None else f"{row['of_prediction']:.3f} of the prediction"
    print(
        f"{row['part']:>5} {row['method']:<32} {row['step_ms']:8.1f} ms {row['above_floor_ms']:8.1f} above {ratio:>7}"
        f"  {si_bytes(row['node_bytes']):>8} {share}  coded {row['coded_ms']:.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2x2")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    nodes, ranks = parse_nodes(options.nodes)
    rows = list[dict[str, Any]]()
    description = ""
    loads = [os.getloadavg()[0]]
    for name in options.parts:
        part = Part(name, ranks, options.rounds, options.warm)
        with Network(nodes, options.rate, ranks_per_host=ranks) as network:
            by_rank = run_function(f"{__file__}:on_rank", nodes * ranks, {"part": part}, 560, network)
            description = network.description
        for row in figures_of(part, by_rank):
            show(row)
            rows.append(row)
        loads.append(os.getloadavg()[0])
    parameters = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
    print(f"{description}; {parameters:,} parameters; load {', '.join(f'{load:.1f}' for load in loads)}")
    if options.save:
        told = {"network": description, "nodes": options.nodes, "rate": options.rate, "parameters": parameters}
        print(save_result("nodes", {**told, "rounds": options.rounds, "loads": loads, "rows": rows}))


if __name__ == "__main__":
    main()
