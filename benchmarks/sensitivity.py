"""Widths by measured sensitivity beside one width for all layers, at equal bytes.

    python benchmarks/sensitivity.py [--tasks digits bytes] [--seeds 3] [--save]

Trains with virtual ranks in lockstep, which run the same programs as real ones. Seeds are paired: with the same seed
every method starts from the same weights and sees the same batches. For each method it tells the held-out metric and
the training loss at the end, the difference to the uniform width of the same bytes, seed by seed, and the bytes that a
rank sends a step.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

import torch

from common import final_metric, save_result, train_noting
from gradwire.reducers.measured import chosen_bits
from gradwire.tasks.builtin import make_task

PAIRS = {
    "int4,layers=measured,measure=25": "int4",
    "int4,layers=default": "int4",
    "int3,layers=measured,measure=25": "int3",
}
"""The methods with a policy by layer, and the uniform width that each is compared with."""
LAST = 10
"""Steps at the end whose training losses are averaged."""


class Trained(NamedTuple):
    """How a run ended."""

    metric: float
    loss: float
    wire_bytes: float
    bits: dict[str, int]


def train(spec: str, task_name: str, seed: int, steps: int | None, world_size: int) -> Trained:
    """Train once."""
    task = make_task(task_name, seed, None)
    ranks, seen = train_noting(spec, task, steps or task.steps, world_size)
    engine = ranks.engines[0]
    sent = engine.stats.wire_bytes / engine.stats.steps
    return Trained(final_metric(task), statistics.mean(seen[-LAST * world_size :]), sent, chosen_bits(engine.states()))


def measure(task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every method with every seed, print and return what came of it."""
    pairs = {spec: PAIRS[spec] for spec in arguments.methods}
    specs = list(dict.fromkeys(["none", *(name for pair in pairs.items() for name in reversed(pair))]))
    runs: dict[str, list[Trained]] = {spec: [] for spec in specs}
    for seed in range(arguments.seeds):
        for spec in specs:
            runs[spec].append(train(spec, task, seed, arguments.steps or None, arguments.ranks))
            print(f"{task} seed {seed} {spec:36s} {runs[spec][-1][:3]}", flush=True)
    rows: dict[str, Any] = {}
    for spec, found in runs.items():
        row: dict[str, Any] = {
            "metrics": [run.metric for run in found],
            "training_losses": [run.loss for run in found],
            "wire_bytes": [run.wire_bytes for run in found],
        }
        if found[0].bits:
            row["bits"] = [run.bits for run in found]
        if spec in pairs:
            row["beside"] = pairs[spec]
            others = runs[pairs[spec]]
            row["metric_differences"] = [a.metric - b.metric for a, b in zip(found, others, strict=True)]
            row["loss_differences"] = [a.loss - b.loss for a, b in zip(found, others, strict=True)]
        rows[spec] = row
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits", "bytes"])
    parser.add_argument("--methods", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="default: the task's own")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/sensitivity_TASK_DATE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for task in arguments.tasks:
        rows = measure(task, arguments)
        for spec, row in rows.items():
            kept = {name: [round(value, 4) for value in row[name]] for name in row if name not in ("bits", "beside")}
            print(spec, kept)
        if arguments.save:
            figures = {"ranks": arguments.ranks, "steps": arguments.steps, "task": task, "methods": rows}
            print("wrote", save_result(f"sensitivity_{task}", figures))


if __name__ == "__main__":
    main()
