"""How often `gradwire compare` finds a difference: `python benchmarks/compare_verdicts.py [--comparisons 12] [--save]`.

Trains digits on two virtual ranks, without a network, and has the verdict judge comparisons of five seeds each:

- fp32 with itself: the same method with other seeds, under another name. Whatever is found is a false alarm.
- fp32 with `WORSE`, a method whose final accuracy is two to three standard errors lower, as training with other seeds
  shows beforehand. By accuracy alone such a difference may not be told from chance; by training loss it is to be.

A step takes one second with each method, so that a time to the target is a number of steps. About ten minutes on one
core.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common import save_result, train_noting
from gradwire.compare.evidence import Shortfall, shortfall
from gradwire.compare.findings import FindingKind
from gradwire.compare.results import FP32, Comparison, Evaluation, Run
from gradwire.compare.verdict import Verdict, judge
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import measure

WORSE = "randomk:0.25"
RANKS = 2
SEEDS = 5
BEFOREHAND = 2
"""Comparisons with other seeds that tell beforehand how much worse `WORSE` is."""
STEPS, SMOOTHING = 200, 20
FOUND = (FindingKind.WORSE_METRIC, FindingKind.WORSE_LOSS)
"""Findings that claim a difference."""


def train(method: str, seed: int) -> Run:
    """Train digits once, with `method` between virtual ranks."""
    torch.set_num_threads(1)
    task = make_task("digits", seed)
    _, seen = train_noting(method, task, STEPS, RANKS)
    losses = [statistics.fmean(seen[i : i + RANKS]) for i in range(0, len(seen), RANKS)]
    value, by_example = measure(task.metric, task.model.eval())
    return Run(
        method,
        seed,
        losses=losses,
        times_s=[float(step) for step in range(1, STEPS + 1)],
        tx_bytes=[0.0] * STEPS,
        evaluations=[Evaluation(STEPS, float(STEPS), value)],
        metric_values=by_example,
    )


def compared(base: Sequence[Run], other: Sequence[Run], name: str) -> Comparison:
    """A comparison of fp32 with other runs, numbered as its seeds are."""
    runs = [replace(run, method=FP32, seed=seed) for seed, run in enumerate(base)]
    runs += [replace(run, method=name, seed=seed) for seed, run in enumerate(other)]
    return Comparison(
        task={"name": "digits", "description": "", "metric_name": "accuracy %", "higher_is_better": True},
        options={"hosts": RANKS, "rate": "1gbit", "steps": STEPS, "minutes": None},
        environment={},
        smoothing=SMOOTHING,
        target=str(make_task("digits", 0).target),
        runs=runs,
    )


def claims(verdict: Verdict) -> list[str]:
    """What a verdict claims to differ."""
    found = [finding.kind.value for finding in verdict.findings if finding.kind in FOUND]
    gain = verdict.speed_up
    claimed = gain is not None and verdict.apart and not gain.low < 1 < gain.high
    return [*found, "time to target"] if claimed else found


def in_errors(found: Shortfall) -> float:
    """A shortfall in its standard errors."""
    return found.worse_by.mean / found.worse_by.error if found.worse_by.error else 0.0


def told(name: str, comparison: Comparison) -> dict[str, Any]:
    """Judge, print and return what came of it."""
    verdict = judge(comparison)
    ends, claimed = verdict.ends["other"], claims(verdict)
    print(f"{name:6s} {ends.worse_by.mean:+7.3f} {in_errors(ends):+6.2f}   {', '.join(claimed) or '-'}", flush=True)
    return {
        "worse_by": ends.worse_by.mean,
        "standard_error": ends.worse_by.error,
        "claims": claimed,
        "headline": verdict.headline,
        "findings": [finding.text for finding in verdict.findings],
    }


def measured(comparisons: int, processes: int) -> dict[str, Any]:
    """Train, judge and print."""
    with ProcessPoolExecutor(processes) as pool:
        run = partial(pool.map, train)

        def runs(method: str, first: int, number: int) -> list[Run]:
            return list(run([method] * number, range(first, first + number)))

        wanted = SEEDS * comparisons
        known_base, known = runs("none", 10_000, BEFOREHAND * SEEDS), runs(WORSE, 10_000, BEFOREHAND * SEEDS)
        parts = [slice(SEEDS * i, SEEDS * (i + 1)) for i in range(BEFOREHAND)]
        beforehand = [shortfall(compared(known_base[p], known[p], "other"), "other") for p in parts]
        errors = [in_errors(found) for found in beforehand if found]
        print(
            f"{WORSE}: {statistics.fmean(errors):.2f} standard errors worse with {BEFOREHAND} times {SEEDS} other seeds"
        )
        base, again, worse = runs("none", 0, wanted), runs("none", 5_000, wanted), runs(WORSE, 0, wanted)
    print(f"       worse by, in standard errors, claimed; accuracy %, {SEEDS} seeds")
    parts = [slice(SEEDS * i, SEEDS * (i + 1)) for i in range(comparisons)]
    selves = [told("itself", compared(base[p], again[p], "other")) for p in parts]
    worses = [told("worse", compared(base[p], worse[p], "other")) for p in parts]
    return {
        "comparisons": comparisons,
        "seeds": SEEDS,
        "worse_method": WORSE,
        "beforehand_in_standard_errors": errors,
        "with_itself_found": sum(bool(one["claims"]) for one in selves),
        "worse_found_by_metric": sum(FindingKind.WORSE_METRIC.value in one["claims"] for one in worses),
        "worse_found_by_loss": sum(FindingKind.WORSE_LOSS.value in one["claims"] for one in worses),
        "with_itself": selves,
        "with_worse": worses,
    }


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=12)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/compare_verdicts_DATE.json")
    arguments = parser.parse_args()
    figures = measured(arguments.comparisons, arguments.processes)
    for name in ("with_itself_found", "worse_found_by_metric", "worse_found_by_loss"):
        print(f"{name}: {figures[name]} of {arguments.comparisons}")
    if arguments.save:
        print("wrote", save_result("compare_verdicts", figures))


if __name__ == "__main__":
    main()
