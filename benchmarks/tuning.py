"""What tuning gains: `python benchmarks/tuning.py [--tasks bytes digits blocks] [--methods int8 ...] [--save]`.

For each task and method, `gradwire.overlap.tune` searches on an emulated network. What it found is then measured once
more, beside the defaults, each on a DDP of its own in the same processes, interleaved: forward and backward passes,
medians over rounds of the slowest rank. PyTorch's own DDP with its default buckets stands beside methods of gradwire.
The task "blocks" has GPT-2's matrices: linear layers of 768 by 3,072 and back, 19 million elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import network_arguments, save_result
from gradwire import kernels
from gradwire.network import Network
from gradwire.overlap import OverlapSettings, Stopwatch, apply, tune
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task

TORCH = "torch.fp32"
METHODS = [TORCH, "int8", "int4"]
TASKS = {"digits": "20mbit", "bytes": "500mbit", "blocks": "2gbit"}
"""Each with a rate at which float32 takes a few times as long as the backward pass."""

BLOCKS, WIDTH, ROWS = 4, 768, 32


class Work(NamedTuple):
    """A fresh model, a batch and a loss."""

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor]


def work(task: str) -> Work:
    """The work of this rank."""
    if task == "blocks":
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
        model = nn.Sequential(*(layer for block in layers for layer in block))
        return Work(model, torch.randn(ROWS, WIDTH), _mean_square)
    made = make_task(task, 0)
    inputs, targets = made.batch(0, dist.get_rank(), dist.get_world_size())

    def loss(outputs: Any) -> Tensor:
        return made.loss(outputs, targets)

    return Work(made.model, inputs, loss)


def _mean_square(outputs: Any) -> Tensor:
    return outputs.square().mean()


class Contestant:
    """Passes of a model of its own."""

    def __init__(self, task: str, method: str, settings: OverlapSettings | None) -> None:
        self._work = work(task)
        self.ddp = DistributedDataParallel(self._work.model)
        self._session = None
        if method != TORCH:
            self._session = gradwire.attach(self.ddp, method, overlap=settings)
        elif settings is not None:
            apply(self.ddp, settings)

    def run(self) -> None:
        """A forward and a backward pass."""
        self.ddp.zero_grad(set_to_none=True)
        self._work.loss(self.ddp(self._work.inputs)).backward()

    def close(self) -> None:
        """Communicate no more."""
        if self._session is not None:
            self._session.close()


def on_rank(rank: int, world_size: int, task: str, methods: list[str], rounds: int, stretch: int) -> dict[str, Any]:
    """Tune each method, and measure what was found."""
    torch.set_num_threads(1)
    kernels.warm_up()
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    watch, rows = Stopwatch(group, torch.device("cpu")), dict[str, Any]()
    for method in methods:
        mine = work(task)
        searched = DistributedDataParallel(mine.model)
        found = tune(searched, (mine.inputs,), None if method == TORCH else method, loss=mine.loss)
        contestants = {
            "default": Contestant(task, method, None),
            "tuned": Contestant(task, method, found.settings),
            "torch": Contestant(task, TORCH, None),
        }
        timings = watch.interleaved({name: each.run for name, each in contestants.items()}, rounds, stretch, untimed=3)
        for each in contestants.values():
            each.close()
        rows[method] = {name: timings.median_s(name) for name in contestants}
        rows[method] |= {"found": str(found), "settings": found.settings.as_dict(), "rounds_s": timings.rounds_s}
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file for each task."""
    parser = network_arguments(__doc__, 2, METHODS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    told = parser.parse_args()
    for task in told.tasks:
        options = {"task": task, "methods": told.methods, "rounds": told.rounds, "stretch": told.stretch}
        with Network(told.hosts, TASKS[task]) as network:
            ranks = run_function(f"{__file__}:on_rank", told.hosts, options, told.deadline, network=network)
            print(f"{task}: {network.description}")
        for method, row in ranks[0].items():
            shares = f"{row['tuned'] / row['default']:.2f} of it, {row['tuned'] / row['torch']:.2f} of PyTorch's DDP"
            print(f"  {method:12} default {1e3 * row['default']:7.1f} ms, tuned {1e3 * row['tuned']:7.1f}: {shares}")
            print(f"  {'':12} {row['found']}", flush=True)
        if told.save:
            results = {task: {"rate": TASKS[task], "methods": ranks[0]}}
            print("wrote", save_result(f"tuning_{task}", {"hosts": told.hosts, "tasks": results}))


if __name__ == "__main__":
    main()
