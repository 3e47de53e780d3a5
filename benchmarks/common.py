"""What the benchmark scripts share: training on virtual ranks, and dated result files that say where they come from."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.core.collective import AllGather, AllReduce, AllToAll, Collective
from gradwire.core.messages import SendRecv
from gradwire.drivers.interpreter import Answer
from gradwire.drivers.virtual import Gradients, VirtualRanks
from gradwire.tasks.task import Task, measure

RESULTS = Path(__file__).parent / "results"
COUNTS = 0.9
"""Of an emulated link's rate, which a bare all-reduce must reach for a cell to count."""


class Alone:
    """The transport of a world of one rank, where nothing is copied: a step is the share of the processor in it."""

    rank, world_size = 0, 1

    def issue(self, request: Collective) -> Answer:
        """Answer at once."""
        if isinstance(request, AllGather):
            return Answer(request.tensor.view(1, -1))
        if isinstance(request, SendRecv):
            return Answer(request.like.new_empty(request.length))
        assert isinstance(request, AllReduce | AllToAll)
        return Answer(request.tensor)


def network_arguments(about: str | None, hosts: int, methods: list[str]) -> argparse.ArgumentParser:
    """The options of scripts that train methods in turn on an emulated network.

    Args:
        about: the script's text.
        hosts, methods: by default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="bytes")
    parser.add_argument("--hosts", type=int, default=hosts)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stretch", type=int, default=6, help="steps of a method in a row")
    parser.add_argument("--deadline", type=float, default=600.0)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    return parser


class Steps(Protocol):
    """A method that trains a model of its own."""

    def step(self) -> None:
        """Train a step."""
        ...


def take_turns(trainings: Iterable[Steps], rounds: int, stretch: int) -> None:
    """Train `stretch` steps at a time, each in turn, for so many rounds."""
    trainings = list(trainings)
    for _ in range(rounds):
        for one in trainings:
            dist.barrier()
            for _ in range(stretch):
                one.step()


def bare_rate(numel: int, world_size: int) -> float:
    """Bits a second that a rank sends in an all-reduce of so many fp32 values at once; the quickest of three."""
    flat, taken = torch.zeros(numel), list[float]()
    for _ in range(3):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(flat)
        taken.append(time.perf_counter() - began_s)
    return 8 * 2 * (world_size - 1) / world_size * flat.nbytes / min(taken)


def training(task: Task, ranks: VirtualRanks, steps: int) -> Iterator[list[Gradients]]:
    """Train `task` for so many steps on virtual ranks, as `gradwire compare` does.

    Yields every rank's gradients before each step is made of them. Who iterates may put others in their place.
    """
    optimizer = task.optimizer(task.model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(step, step / steps)
        gradients = [rank_gradients(task, optimizer, step, rank, ranks.world_size) for rank in range(ranks.world_size)]
        yield gradients
        ranks.step(gradients)
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
        optimizer.step()


def train_noting(spec: str, task: Task, steps: int, world_size: int) -> tuple[VirtualRanks, list[float]]:
    """Train `task` by a method on virtual ranks; return these, and the loss of every rank in every step, in order."""
    losses: list[float] = []

    def noted(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = task.loss(outputs, targets)
        losses.append(float(loss.detach()))
        return loss

    ranks = VirtualRanks(gradwire.parse(spec), task.model, world_size)
    for _ in training(replace(task, loss=noted), ranks, steps):
        pass
    return ranks, losses


def rank_gradients(task: Task, optimizer: torch.optim.Optimizer, step: int, rank: int, world_size: int) -> Gradients:
    """One rank's gradients at a step."""
    inputs, targets = task.batch(step, rank, world_size)
    optimizer.zero_grad()
    task.loss(task.model(inputs), targets).backward()
    return {name: p.grad.detach().clone() for name, p in task.model.named_parameters() if p.grad is not None}


def final_metric(task: Task) -> float:
    """The metric of the trained model."""
    return measure(task.metric, task.model.eval()).value


def processor() -> str:
    """The processor's name, from the kernel."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def save_result(name: str, figures: dict[str, Any]) -> Path:
    """Write figures with the date, the hardware and the versions; return the file."""
    RESULTS.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    whole = {
        "benchmark": name,
        "date": today,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        **figures,
    }
    path = RESULTS / f"{name}_{today}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path
