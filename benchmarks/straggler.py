"""A straggler, with a server and with DDP; a part of `asynchronous.py`, whose text says what is measured."""

from __future__ import annotations

import functools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gradwire.asynchronous import ASGD, AdaptiveDCASGD, Bounded, Free, Gradient, Grant, Pace, Result, ServerRule, Work
from gradwire.asynchronous.processes import Job, hogwild, run
from gradwire.asynchronous.work import trained_of
from gradwire.network.slow import SlowProcessor
from gradwire.tasks.builtin import digits
from pages import markdown, shown

WORKERS, SLOWER, TARGET, WINDOW, RATE, PUSHES = 3, 4.0, 0.25, 60, 0.3, 750
SERVED: dict[str, tuple[ServerRule, Pace]] = {
    "SSP 4": (ASGD(RATE / WORKERS), Bounded(4)),
    "ASGD": (ASGD(RATE / WORKERS), Free()),
    "DC-ASGD-a": (AdaptiveDCASGD(RATE / WORKERS), Free()),
}
Losses = Sequence[tuple[float, float]]
"""When a batch's gradient was applied, in seconds, and its loss; in the order of time."""


def slow_processor(worker: int) -> SlowProcessor:
    """The last worker's processor is slower, as `gradwire compare --slow` makes a host."""
    return SlowProcessor(SLOWER if worker == WORKERS - 1 else 1.0)


# A server -------------------------------------------------------------------------------------------------------


def digits_work(seed: int, worker: int) -> Work:
    """A worker of the digits task."""
    task, slow = digits(seed), slow_processor(worker)

    def batch_loss(model: nn.Module, worker: int, step: int) -> Tensor:
        inputs, targets = task.batch(step, worker, WORKERS)
        return functional.cross_entropy(model(inputs), targets)

    gradient = Gradient(task.model, batch_loss)

    def slowed(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        slow.begin()
        result = gradient(parameters, grant)
        slow.pay()
        return result

    return slowed


def served(name: str, seed: int) -> Losses:
    """Train with a server."""
    rule, pace = SERVED[name]
    start = {n: p.detach().clone() for n, p in trained_of(digits(seed).model).items()}
    work = functools.partial(digits_work, seed)
    outcome = run(Job(start, rule, work, workers=WORKERS, pushes=PUSHES, pace=pace, seed=seed))
    return [(one.at_s, one.loss) for one in outcome.history]


# DDP ------------------------------------------------------------------------------------------------------------


def ddp_work(seed: int, folder: str, shared: Mapping[str, Tensor], rank: int, ranks: int) -> None:
    """A rank: the same model, batches, rate and slowness, with DDP over Gloo in place of the server."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    task, slow = digits(seed), slow_processor(rank)
    slow.watch(task.model)
    model = DistributedDataParallel(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    dist.barrier()
    for step in range(len(shared["at_s"])):
        slow.begin()
        inputs, targets = task.batch(step, rank, ranks)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        slow.pay()
        loss.backward()
        optimizer.step()
        slow.pay()
        shared["loss"][step, rank] = loss.detach()
        if rank == 0:
            shared["at_s"][step] = time.perf_counter()
    dist.barrier()
    dist.destroy_process_group()


def by_ddp(seed: int) -> Losses:
    """Train with DDP. `hogwild` is what starts processes that fill tensors, and ends them."""
    zeros = functools.partial(torch.zeros, dtype=torch.float64)
    start = {"loss": zeros(PUSHES // WORKERS, WORKERS), "at_s": zeros(PUSHES // WORKERS)}
    with tempfile.TemporaryDirectory() as folder:
        shared = hogwild(start, functools.partial(ddp_work, seed, folder), processes=WORKERS, deadline_s=300.0)
    steps = zip(shared["at_s"].tolist(), shared["loss"].tolist(), strict=True)
    return [(at_s, loss) for at_s, losses in steps for loss in losses]


# Both -----------------------------------------------------------------------------------------------------------

METHODS: dict[str, Callable[[int], Losses]] = {
    "DDP": by_ddp,
    **{name: functools.partial(served, name) for name in SERVED},
}


def seconds_to_target(found: Losses) -> float:
    """From the first update to the one whose window of losses is low enough; infinite where none is."""
    for end in range(WINDOW, len(found) + 1):
        if statistics.mean(loss for _, loss in found[end - WINDOW : end]) <= TARGET:
            return found[end - 1][0] - found[0][0]
    return math.inf


def straggler(seeds: int) -> dict[str, Any]:
    """All methods in turn, for each seed."""
    found: dict[str, Any] = {name: [] for name in METHODS}
    for seed in range(seeds):
        for name, method in METHODS.items():
            load, losses = os.getloadavg()[0], method(seed)
            rate = len(losses) / (losses[-1][0] - losses[0][0])
            row = {"seconds": seconds_to_target(losses), "batches_a_second": rate, "load": load}
            found[name].append(row)
            shown = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
            print(f"straggler, seed {seed}: {name:10} {shown}", flush=True)
    for name, rows in found.items():
        shown = ", ".join(f"{row['seconds']:.1f}" for row in rows)
        print(f"straggler: {name:10} {statistics.mean(row['seconds'] for row in rows):6.1f} s to the target ({shown})")
    return found


def table(found: dict[str, Any]) -> str:
    """What docs/asynchronous.md has."""
    cells = list[list[str]]()
    for name, rows in found.items():
        seconds = [row["seconds"] for row in rows]
        rate, load = (statistics.mean(row[column] for row in rows) for column in ("batches_a_second", "load"))
        each = ", ".join(f"{value:.1f}" for value in seconds)
        cells.append([name, f"{statistics.mean(seconds):.1f}", each, shown(rate), shown(load)])
    return markdown(["", "seconds", "by seed", "batches a second", "load before"], cells)
