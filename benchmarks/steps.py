"""What a step costs: `python benchmarks/steps.py [--task bytes] [--hosts 4] [--rate 100mbit] [--methods ...] [--save]`.

Every method trains a model of its own, all in the same processes on the same emulated network, a few steps each in
turn, so that whatever else the machine does falls on all alike. Printed: the time of a step, what it is above the
floor (`torch.noop`, which sends nothing), and the bytes sent. The time is a median over stretches of `--stretch` steps:
methods of windows want stretches of whole windows. Evaluation and start-up are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import network_arguments, save_result, take_turns
from gradwire import kernels
from gradwire.compare.engines import Replicated
from gradwire.network import Network
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task

DEFAULT = ["torch.noop", "torch.powersgd:4", "torch.fp16", "int4", "sign", "topk:0.01", "powersgd:4"]
SKIPPED = 4
"""First steps of each method that do not count: buckets are rebuilt, factors start."""


class Training:
    """One method on a model of its own."""

    def __init__(self, method: str, task_name: str, bucket_mb: float) -> None:
        self.task = make_task(task_name, 0)
        engine = Replicated()
        model = engine.wrap(self.task.model, method, bucket_mb)
        self.side = engine.attach(model, self.task.optimizer(self.task.model.parameters()), method)
        self.index, self.times_s = 0, list[float]()

    def step(self) -> None:
        """Train a step on the clock."""
        begun = time.perf_counter()
        inputs, targets = self.task.batch(self.index, dist.get_rank(), dist.get_world_size())
        self.side.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.side.model(inputs), targets).backward()
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.task.model.parameters(), self.task.clip_norm)
        self.side.optimizer.step()
        self.index += 1
        if self.index > SKIPPED:
            self.times_s.append(time.perf_counter() - begun)


def train_all(
    rank: int, world_size: int, *, task: str, methods: list[str], rounds: int, stretch: int, bucket_mb: float
) -> dict[str, Any]:
    """Train with every method, `stretch` steps at a time, for so many rounds; return times and sizes."""
    torch.set_num_threads(1)
    kernels.warm_up()
    trainings = {method: Training(method, task, bucket_mb) for method in methods}
    take_turns(trainings.values(), rounds, stretch)
    sent = {method: training.side.predicted_bytes() / training.index for method, training in trainings.items()}
    for training in trainings.values():
        training.side.close()
    dist.barrier()
    return {"times_s": {method: training.times_s for method, training in trainings.items()}, "sent": sent}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run on the emulated network; return the figures of each method."""
    options = {
        "task": arguments.task,
        "methods": arguments.methods,
        "rounds": arguments.rounds,
        "stretch": arguments.stretch,
        "bucket_mb": arguments.bucket_mb,
    }
    with Network(arguments.hosts, arguments.rate) as network:
        target = f"{__file__}:train_all"
        ranks = run_function(target, arguments.hosts, options, deadline_s=arguments.deadline, network=network)
        description = network.description
    rows: dict[str, Any] = {}
    for method in arguments.methods:
        slowest = [max(times) for times in zip(*(rank["times_s"][method] for rank in ranks), strict=True)]
        size = arguments.stretch
        stretches = [statistics.mean(slowest[i : i + size]) for i in range(0, len(slowest) - size + 1, size)]
        rows[method] = {"step_s": statistics.median(stretches), "sent_bytes": ranks[0]["sent"][method]}
    return {"network": description, "task": arguments.task, "steps": rows}


def show(rows: dict[str, Any]) -> None:
    """Print the table."""
    floor = rows.get("torch.noop", {"step_s": 0.0})["step_s"]
    print(f"{'method':40s} {'ms a step':>10s} {'above floor':>12s} {'kB a step':>10s}")
    for method, row in rows.items():
        above = 1e3 * (row["step_s"] - floor)
        print(f"{method:40s} {1e3 * row['step_s']:10.1f} {above:12.1f} {row['sent_bytes'] / 1e3:10.1f}")


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = network_arguments(__doc__, 4, DEFAULT)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    arguments = parser.parse_args()
    figures = measure(arguments)
    show(figures["steps"])
    if arguments.save:
        print("wrote", save_result(f"steps_{arguments.task}", figures))


if __name__ == "__main__":
    main()
