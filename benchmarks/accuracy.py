"""Final accuracy of every method on a task: `python benchmarks/accuracy.py [--task digits] [--seeds 5] [--save]`.

Trains with virtual ranks in lockstep, which run the same programs as real ones, so the figures are those of a real run
and need no network. Seeds are paired: with the same seed every method starts from the same weights and sees the same
batches. For each method: the mean metric over seeds and its gap to uncompressed.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

import gradwire
from common import final_metric, save_result, training
from gradwire.bench.tasks import make_task
from gradwire.drivers.virtual import VirtualRanks

DEFAULT = ["fp16", "bf16", "randomk:0.1", "sign", "int8", "int4", "int2", "qsgd:15", "topk:0.01", "powersgd:4"]


def train(spec: str, task_name: str, seed: int, steps: int | None, world_size: int) -> float:
    """Train once and return the final metric."""
    torch.set_num_threads(1)
    task = make_task(task_name, seed, None)
    ranks = VirtualRanks(gradwire.parse(spec), task.model, world_size)
    for _ in training(task, ranks, steps or task.steps):
        pass
    return final_metric(task)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every method with every seed; print and return what came of it."""
    run = partial(train, task_name=arguments.task, steps=arguments.steps, world_size=arguments.ranks)
    rows: dict[str, Any] = {}
    baseline: list[float] = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        print(
            f"{'method':20s} {'mean':>9s} {'spread':>8s} {'gap':>8s}   {arguments.task}, {arguments.seeds} paired seeds"
        )
        for spec in ["none", *arguments.methods]:
            jobs = [pool.submit(run, spec, seed=seed) for seed in range(arguments.seeds)]
            values = [job.result() for job in jobs]
            baseline = baseline or values
            gap = statistics.mean(v - b for v, b in zip(values, baseline, strict=True))
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            rows[spec] = {"values": values, "mean": statistics.mean(values), "gap": gap}
            print(f"{spec:20s} {statistics.mean(values):9.3f} {spread:8.3f} {gap:+8.3f}", flush=True)
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
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/accuracy_TASK_DATE.json")
    arguments = parser.parse_args()
    rows = measure(arguments)
    if arguments.save:
        print("wrote", save_result(f"accuracy_{arguments.task}", {"ranks": arguments.ranks, "methods": rows}))


if __name__ == "__main__":
    main()
