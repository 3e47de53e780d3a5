"""Accuracy under bad gradients: `python benchmarks/robust.py [--bad 2] [--seeds 3] [--save]`.

Ten virtual ranks in lockstep train on a task, and some of them send bad gradients at every step: by default two, that
send their own negated and ten times as large. For each rule: the mean metric over paired seeds, and its gap to the
uncompressed mean of ten honest ranks. "mean, clean" is that; "mean" is the same mean with the bad ranks among the ten.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradwire
from common import final_metric, save_result, training
from gradwire.drivers.virtual import Gradients, VirtualRanks
from gradwire.tasks.builtin import make_task

DEFAULT = [
    *("median", "trimmed:2", "krum:2", "multikrum:2", "rfa", "clip:3", "signsgd_mv"),
    *("krum:2,worker_momentum=0.5", "signsgd_mv,worker_momentum=0.5"),
]
Attack = Callable[[Tensor], Tensor]
ATTACKS: dict[str, Attack] = {"negated10": lambda g: -10 * g, "negated": torch.neg, "zero": torch.zeros_like}


def known(specs: list[str]) -> list[str]:
    """Those specs whose method is registered."""
    return [spec for spec in specs if spec.split(":")[0].split(",")[0] in gradwire.methods()]


def attacked(gradients: Gradients, attack: Attack) -> Gradients:
    """What a bad rank sends in place of its gradients."""
    return {name: attack(gradient) for name, gradient in gradients.items()}


def train(spec: str, seed: int, bad: int, task_name: str, steps: int | None, attack: str, world_size: int) -> float:
    """Train once, the last `bad` ranks sending bad gradients; return the final metric."""
    torch.set_num_threads(1)
    task = make_task(task_name, seed, None)
    ranks = VirtualRanks(gradwire.parse(spec), task.model, world_size)
    for gradients in training(task, ranks, steps or task.steps):
        gradients[world_size - bad :] = [attacked(own, ATTACKS[attack]) for own in gradients[world_size - bad :]]
    return final_metric(task)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with every rule and seed; print and return what came of it."""
    run = partial(
        train,
        task_name=arguments.task,
        steps=arguments.steps,
        attack=arguments.attack,
        world_size=arguments.ranks,
    )
    rows: dict[str, Any] = {}
    clean: list[float] = []
    runs = [("mean, clean", "none", 0), ("mean", "none", arguments.bad)]
    runs += [(spec, spec, arguments.bad) for spec in known(arguments.methods)]
    print(f"{'rule':34s} {'mean':>9s} {'spread':>8s} {'gap':>8s}   {arguments.task}, {arguments.seeds} paired seeds")
    with ProcessPoolExecutor(arguments.processes) as pool:
        for name, spec, bad in runs:
            jobs = [pool.submit(run, spec, bad=bad, seed=seed) for seed in range(arguments.seeds)]
            values = [job.result() for job in jobs]
            clean = clean or values
            gap = statistics.mean(v - c for v, c in zip(values, clean, strict=True))
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            rows[name] = {"spec": spec, "values": values, "mean": statistics.mean(values), "gap": gap}
            print(f"{name:34s} {statistics.mean(values):9.3f} {spread:8.3f} {gap:+8.3f}", flush=True)
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--methods", nargs="+", default=DEFAULT)
    parser.add_argument("--attack", choices=ATTACKS, default="negated10")
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--bad", type=int, default=2, help="how many of the ranks send bad gradients")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="rules that use few of the gradients take longer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/robust_TASK_DATE.json")
    arguments = parser.parse_args()
    rows = measure(arguments)
    if arguments.save:
        settings = {name: getattr(arguments, name) for name in ("ranks", "bad", "attack", "steps")}
        print("wrote", save_result(f"robust_{arguments.task}", {**settings, "rules": rows}))


if __name__ == "__main__":
    main()
