"""Final accuracy of every method on a task: `python benchmarks/accuracy.py [--task digits] [--seeds 5] [--save]`.

Trains with virtual ranks in lockstep, which run the same programs as real ones, so the figures are those of a real run
and need no network. Seeds are paired: with the same seed every method starts from the same weights and sees the same
batches. For each method: the mean metric over seeds and its gap to uncompressed; with --reach SPEC also how many steps
each takes to the smoothed training loss that SPEC ends at with the same seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from common import final_metric, save_result, train_noting
from gradwire.compare.figures import smooth
from gradwire.tasks.builtin import make_task

DEFAULT = ["fp16", "bf16", "randomk:0.1", "sign", "int8", "int4", "int2", "qsgd:15", "topk:0.01", "powersgd:4"]


SMOOTHING = 10
"""Steps in the moving average of training losses."""


class Trained(NamedTuple):
    """The final metric of a run, and the smoothed training loss of each step: the mean over ranks."""

    metric: float
    losses: list[float]


def train(spec: str, task_name: str, seed: int, steps: int | None, world_size: int) -> Trained:
    """Train once."""
    torch.set_num_threads(1)
    task = make_task(task_name, seed, None)
    _, seen = train_noting(spec, task, steps or task.steps, world_size)
    means = [statistics.mean(seen[i : i + world_size]) for i in range(0, len(seen), world_size)]
    return Trained(final_metric(task), smooth(means, SMOOTHING))


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """How many steps until the loss first is at or below the target; None where it never is."""
    return next((step for step, loss in enumerate(losses, start=1) if loss <= target), None)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every method with every seed; print and return what came of it."""
    run = partial(train, task_name=arguments.task, steps=arguments.steps, world_size=arguments.ranks)
    rows: dict[str, Any] = {}
    runs: dict[str, list[Trained]] = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        print(
            f"{'method':20s} {'mean':>9s} {'spread':>8s} {'gap':>8s}   {arguments.task}, {arguments.seeds} paired seeds"
        )
        for spec in ["none", *arguments.methods]:
            jobs = [pool.submit(run, spec, seed=seed) for seed in range(arguments.seeds)]
            runs[spec] = [job.result() for job in jobs]
            values = [trained.metric for trained in runs[spec]]
            gap = statistics.mean(v - b.metric for v, b in zip(values, runs["none"], strict=True))
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            ends = [trained.losses[-1] for trained in runs[spec]]
            rows[spec] = {"values": values, "mean": statistics.mean(values), "gap": gap, "training_losses": ends}
            print(f"{spec:20s} {statistics.mean(values):9.3f} {spread:8.3f} {gap:+8.3f}", flush=True)
    if arguments.reach:
        targets = [trained.losses[-1] for trained in runs[arguments.reach]]
        print(f"steps to the training loss that {arguments.reach} ends at, by seed:", *(f"{t:.3f}" for t in targets))
        for spec, found in runs.items():
            rows[spec]["steps"] = [steps_to(r.losses, target) for r, target in zip(found, targets, strict=True)]
            print(f"{spec:20s}", *rows[spec]["steps"])
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--methods", nargs="+", default=DEFAULT)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="default: the task's own")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--reach", metavar="SPEC", help="one of the methods: steps to the training loss it ends at")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/accuracy_TASK_DATE.json")
    arguments = parser.parse_args()
    if arguments.reach and arguments.reach not in ("none", *arguments.methods):
        parser.error(f"--reach {arguments.reach} is not among the methods")
    rows = measure(arguments)
    if arguments.save:
        print("wrote", save_result(f"accuracy_{arguments.task}", {"ranks": arguments.ranks, "methods": rows}))


if __name__ == "__main__":
    main()
