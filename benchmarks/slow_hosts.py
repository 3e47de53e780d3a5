"""What helps where one host is always slower than the others: seconds until a training loss is reached.

Three ranks train digits over the loopback interface, and the last one computes four times slower, as
`gradwire compare --slow` makes a host. The link has no limit, so what differs is waiting and coding. `DDP`, `int4` and
windows give each rank a batch of 32. With weights the slow rank takes a batch of 8, and counts a quarter: the mean is
that of all examples. Asynchronous ranks push whenever they have stepped. A loss is the mean over the last 60 batches of
32 of all ranks. Methods take turns, seed by seed.

    python benchmarks/slow_hosts.py --seeds 3 --save
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import save_result
from gradwire.network.slow import SlowProcessor
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import measure

RANKS, SLOWER, BATCH, TARGET, WINDOW = 3, 4.0, 32, 0.25, 60
BATCHES = 750
"""Of 32 examples, which all ranks together train on."""

METHODS = {
    "DDP": "equal batches",
    "int4": "equal batches",
    "int4,weights=4/4/1": "a quarter batch on the slow host",
    "local:H=8": "the mean of all models every 8 steps",
    "ssp:4": "asynchronous, at most 5 pushes apart",
    "asgd": "asynchronous",
    "dcasgd:0.5": "asynchronous, compensated",
}


# On the ranks -------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A way to train.

    Attributes:
        call: the model as it is called.
        step: the optimizer's, or what is in its place.
        goes_on: whether there is another step, given how many this rank has made.
        end: leaves all ranks with the same model.
    """

    call: Any
    step: Callable[[], object]
    goes_on: Callable[[int], bool]
    end: Callable[[], object]


def made(method: str, task: Any, processor: SlowProcessor, share: float) -> Way:
    """A way to train by name, for as many examples as every other."""
    model, inner, most = task.model, task.optimizer(task.model.parameters()), math.ceil(BATCHES / RANKS / share)

    def has_steps(steps: int) -> bool:
        return steps < most

    if method == "DDP":
        processor.watch(model)
        return Way(DistributedDataParallel(model), inner.step, has_steps, lambda: None)
    if method.startswith("int4"):
        processor.watch(model)
        ddp = DistributedDataParallel(model)
        handle = gradwire.attach(ddp, method)
        processor.watch_coding(handle.session.engine)
        return Way(ddp, inner.step, has_steps, handle.close)
    if method.startswith("local"):
        averaged: Any = gradwire.wrap(inner, model, method)
        return Way(model, averaged.step, has_steps, averaged.sync)
    pushed: Any = gradwire.wrap(inner, model, method)

    def has_pushes(steps: int) -> bool:
        return pushed.version < BATCHES

    return Way(model, pushed.step, has_pushes, pushed.finish)


def on_rank(rank: int, world_size: int, method: str, seed: int) -> dict[str, Any]:
    """When each batch was trained on, its loss and its share of a whole batch, and the final metric."""
    task = make_task("digits", seed, None)
    processor = SlowProcessor(SLOWER if rank == world_size - 1 else 1.0)
    weights = [4, 4, 1] if "weights" in method else [1] * world_size
    mine = max(1, round(BATCH * weights[rank] / max(weights)))
    way = made(method, task, processor, sum(weights) / max(weights) / world_size)
    dist.barrier()
    began, steps = time.perf_counter(), 0
    trained: list[tuple[float, float, float]] = []
    while way.goes_on(steps):
        processor.begin()
        inputs, targets = (part[:mine] for part in task.batch(steps, rank, world_size))
        task.model.zero_grad()
        loss = task.loss(way.call(inputs), targets)
        processor.pay()
        loss.backward()
        way.step()
        processor.pay()
        steps += 1
        trained.append((time.perf_counter() - began, float(loss.detach()), mine / BATCH))
    way.end()
    task.model.eval()
    return {"trained": trained, "metric": measure(task.metric, task.model).value}


# Here ---------------------------------------------------------------------------------------------------------------


def seconds_to_target(ranks: Sequence[dict[str, Any]]) -> float | None:
    """When the mean loss of the last batches, by their shares, first is low enough; None where it never is."""
    trained = sorted(tuple(one) for rank in ranks for one in rank["trained"])
    begin, loss, share = 0, 0.0, 0.0
    for at_s, its, part in trained:
        loss, share = loss + its * part, share + part
        while share - trained[begin][2] >= WINDOW:
            loss, share, begin = loss - trained[begin][1] * trained[begin][2], share - trained[begin][2], begin + 1
        if share >= WINDOW and loss / share <= TARGET:
            return at_s
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args(arguments)
    rows: dict[str, Any] = {
        method: {"what": METHODS[method], "seconds": [], "metric": []} for method in options.methods
    }
    for seed in range(options.seeds):
        for method, row in rows.items():
            ranks = run_function(f"{__file__}:on_rank", RANKS, {"method": method, "seed": seed}, 300)
            row["seconds"].append(seconds_to_target(ranks))
            row["metric"].append(ranks[0]["metric"])
            reached = row["seconds"][-1]
            said = "not reached" if reached is None else f"{reached:.2f} s"
            print(f"seed {seed}  {method:20} {said:12} accuracy {row['metric'][-1]:.1f}", flush=True)
    for method, row in rows.items():
        reached = [seconds for seconds in row["seconds"] if seconds is not None]
        mean = f"{statistics.fmean(reached):.2f} s" if len(reached) == options.seeds else "not always reached"
        print(f"{method:20} {mean:12} accuracy {statistics.fmean(row['metric']):.1f}  {row['what']}")
    if options.save:
        print(save_result("slow_hosts", {"ranks": RANKS, "slower": SLOWER, "target": TARGET, "methods": rows}))


if __name__ == "__main__":
    main()
