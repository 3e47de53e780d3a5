"""Megatron's sequence parallelism over a slow link, beside PyTorch's: `python benchmarks/sequence_linear.py`.

A feed-forward block is split over emulated hosts of one rank each, weights and positions. Its forward and backward
pass is timed in turn with PyTorch's styles, with those of `gradwire.parallel.sequences`, and with positions and
gradients that are gathered in eight bits. Printed are the median of each, how many times as fast as PyTorch's it is,
and how far its output is from PyTorch's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from common import save_result
from gradwire.network import Network
from gradwire.parallel.sequences import (
    Contiguous,
    ExchangeAxis,
    OverlappedColwiseParallel,
    OverlappedRowwiseParallel,
)
from gradwire.ranks.supervised import run_function

POSITIONS, WIDTH, INNER = 2048, 512, 2048
BLOCKS = ("PyTorch's styles", "overlapped", "overlapped, int8")
CODEC = "int8:128"


def block(name: str, mesh: Any, axis: ExchangeAxis, layout: Contiguous) -> nn.Module:
    """The same block in each form."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    codec = CODEC if name.endswith("int8") else None
    styles: dict[str, ParallelStyle] = {
        "0": SequenceParallel(),
        "1": OverlappedColwiseParallel(axis, layout, codec=codec),
        "3": OverlappedRowwiseParallel(axis, layout, gradient_codec=codec),
    }
    if name == BLOCKS[0]:
        styles |= {"1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel(output_layouts=Shard(1))}
    return parallelize_module(made, mesh, styles)


def on_rank(rank: int, world_size: int, rounds: int) -> dict[str, Any]:
    """Seconds of passes of each form on this rank, in turn, and how far outputs are from those of PyTorch's styles."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))["tp"]
    axis, layout = ExchangeAxis(mesh), Contiguous(POSITIONS, world_size)
    blocks = {name: block(name, mesh, axis, layout) for name in BLOCKS}
    x = layout.shard(torch.randn(1, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1)), rank)
    times_s: dict[str, list[float]] = {name: [] for name in BLOCKS}
    outputs = dict[str, Tensor]()
    for turn in range(2 + rounds):
        for name, each in blocks.items():
            given = x.clone().requires_grad_()
            dist.barrier()
            began = time.perf_counter()
            out = each(given)
            out.sum().backward()
            dist.barrier()
            times_s[name] += [time.perf_counter() - began] if turn >= 2 else []
            outputs[name] = out.to_local().detach() if isinstance(out, DTensor) else out.detach()
    first = outputs[BLOCKS[0]]
    off = {name: float((output - first).norm() / first.norm()) for name, output in outputs.items()}
    return {"times_s": times_s, "off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deadline", type=float, default=600.0)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    loads, rows = [os.getloadavg()[0]], list[dict[str, Any]]()
    for rate in options.rates:
        with Network(options.hosts, rate) as network:
            print(network.description)
            told = {"rounds": options.rounds}
            ranks = run_function(f"{__file__}:on_rank", options.hosts, told, options.deadline, network)
        base_s = 0.0
        for name in BLOCKS:
            slowest = [max(each) for each in zip(*(rank["times_s"][name] for rank in ranks), strict=True)]
            median_s, off = statistics.median(slowest), max(rank["off"][name] for rank in ranks)
            base_s = base_s or median_s
            row = {"rate": rate, "block": name, "times_s": slowest, "times_as_fast": base_s / median_s, "off": off}
            rows.append(row)
            print(
                f"{name:18} {1e3 * median_s:6.0f} ms, {base_s / median_s:.2f} times as fast, {off:.1e} off", flush=True
            )
    loads.append(os.getloadavg()[0])
    if options.save:
        print(save_result("sequence_linear", {"options": vars(options), "loads": loads, "rows": rows}))


if __name__ == "__main__":
    main()
