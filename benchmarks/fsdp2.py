"""FSDP2 alone and under gradwire, on hosts of this machine: `python benchmarks/fsdp2.py --rate 100mbit --seeds 3`.

The byte-GPT, each of its blocks a group of `fully_shard`. Kinds of runs: FSDP2 alone; identity codecs over gradwire's
transport, which tell what is owed to the transport and not to compression; gradients alone in 8 bits; gradients and
parameters in 8 bits. Printed for each: milliseconds and bytes a step, as the interface counts them on the busiest host,
and the held-out loss at the end, beside those of FSDP2 alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire
from common import save_result
from gradwire.bench.net import Network
from gradwire.bench.ranks import run_function
from gradwire.bench.tasks import make_task
from gradwire.bench.wire import WireMeter

WARM_STEPS = 5


class Kind(NamedTuple):
    """A way to communicate: a method, or none, and a codec for parameters, or none."""

    name: str
    method: str | None
    parameters: str | None


KINDS = (
    Kind("FSDP2 alone", None, None),
    Kind("identity", "none", "none"),
    Kind("int8 gradients", "int8", None),
    Kind("int8 gradients and parameters", "int8", "int8"),
    Kind("int8 by chance and int8 parameters", "int8,stochastic=on,ef=off", "int8"),
    Kind("int4 gradients, int8 parameters", "int4", "int8"),
)


def on_rank(rank: int, world_size: int, method: str | None, parameters: str | None, seed: int, steps: int) -> Any:
    """Train; return seconds a step, bytes a step, and the metric."""
    task = make_task("bytes", seed)
    model, mesh = task.model, init_device_mesh("cpu", (world_size,))
    for block in cast(nn.ModuleList, model.get_submodule("blocks")):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = task.optimizer(list(model.parameters()))
    handle = gradwire.attach(model, method, parameters=parameters) if method else None
    meter, before, began = WireMeter.from_environment(), None, 0.0
    for step in range(steps):
        if step == WARM_STEPS:
            dist.barrier()
            before, began = meter.read(), time.perf_counter()
        inputs, targets = task.batch(step, rank, world_size)
        torch.autograd.backward(task.loss(model(inputs), targets))
        if task.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) * task.schedule(step, step / steps)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    counted, assumed = steps - WARM_STEPS, handle.stats().ratio if handle else 1.0
    assert before is not None
    sent = meter.read().since(before).payload_tx_bytes / counted
    took = (time.perf_counter() - began) / counted
    if handle:
        handle.close()
    with torch.no_grad():
        metric = task.metric(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {"step_s": took, "sent_bytes": sent, "metric": metric, "ratio": assumed}


def main() -> None:
    """Run all kinds, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hosts", type=int, default=4)
    options.add_argument("--rate", default="100mbit")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--kinds", nargs="*", type=int, default=list(range(len(KINDS))))
    given = options.parse_args()
    rows: dict[str, list[dict[str, float]]] = {}
    with Network(given.hosts, given.rate) as network:
        for seed in range(given.seeds):
            for kind in (KINDS[i] for i in given.kinds):
                arguments = {"method": kind.method, "parameters": kind.parameters, "seed": seed, "steps": given.steps}
                ranks = run_function(f"{__file__}:on_rank", given.hosts, arguments, 1800, network)
                row = {key: max(float(one[key]) for one in ranks) for key in ranks[0]}
                rows.setdefault(kind.name, []).append(row)
                print(f"seed {seed}, {kind.name}: {row}", flush=True)
    show(rows)
    save_result("fsdp2", {"options": vars(given), "rows": rows})


def show(rows: dict[str, list[dict[str, float]]]) -> None:
    """Print the table."""
    first = next(iter(rows.values()))
    print("| | ms a step | sent a step | held-out loss | shorter | fewer bytes | loss |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, runs in rows.items():
        ms, sent = (statistics.median(run[key] for run in runs) for key in ("step_s", "sent_bytes"))
        alone_s, alone = (statistics.median(run[key] for run in first) for key in ("step_s", "sent_bytes"))
        loss, plain = (statistics.fmean(run["metric"] for run in some) for some in (runs, first))
        print(
            f"| {name} | {1000 * ms:,.0f} | {sent / 1e6:.2f} MB | {loss:.4f} | {alone_s / ms:.2f}x "
            f"| {alone / sent:.2f}x | {loss / plain - 1:+.2%} |"
        )


if __name__ == "__main__":
    main()
