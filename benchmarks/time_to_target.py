"""How soon methods reach fp32's loss, beside a link without cost: `python benchmarks/time_to_target.py METHOD ...`.

fp32 (PyTorch's DDP) trains for --steps steps. Its ends with the same seed are the targets: the metric on held-out data,
and the smoothed training loss, each to 0.5%. Where ranks train alone the training loss is that of their own models and
the metric that of the global copy, so the metric decides; it is looked at every ten steps. A link without cost would
take --steps steps of `torch.noop`, whose ranks send nothing; these are measured on the same hosts. Methods that talk
less often need more steps, and a learning rate that falls over as many: a method is written `165=local:H=8,outer=int4`
to train for 165 steps. Losses do not depend on the link, so fp32 trains on links without limit; its time at --rate is
told from its bytes.

Printed for each method: steps of a run, bytes and milliseconds a step, the step and the second at which the metric was
reached, that time over the free link's, the same by the training loss, and the metric at the end. Runs are kept in
--out and made once.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import save_result
from gradwire.compare import figures
from gradwire.compare.compare import compare
from gradwire.compare.figures import Hit, mean
from gradwire.compare.options import CompareOptions
from gradwire.compare.plan import ComparisonPlan
from gradwire.compare.results import Comparison, Run
from gradwire.network import parse_rate
from gradwire.ranks.news import News

FP32, FLOOR = "torch.fp32", "torch.noop"
FREE = "10gbit"


class Entry(NamedTuple):
    """A method and how long it trains."""

    steps: int
    method: str


class Row(NamedTuple):
    """A method's means over seeds, and its times over the free link's by seed; None where a target was not reached."""

    entry: Entry
    sent_bytes: float
    step_ms: float
    hit_steps: float | None
    hit_s: float | None
    ratios: list[float | None]
    loss_ratios: list[float | None]
    metrics: list[float]


class Quiet:
    """Says one line a run."""

    def begin(self, plan: ComparisonPlan, network: str, kept: Sequence[tuple[str, int]]) -> None:
        """Say where runs train."""
        print(f"# {network}; {len(kept)} runs are there already", flush=True)

    def start(self, method: str, seed: int) -> None:
        """Say nothing yet."""

    def news(self, method: str, seed: int, news: News) -> None:
        """Say nothing yet."""

    def finish(self, run: Run) -> None:
        """Say what came of it."""
        took = f"{run.times_s[-1]:.0f} s" if run.times_s else run.reason
        print(f"#   {run.method}, seed {run.seed}: {run.steps} steps, {took}", flush=True)


def entries(texts: Sequence[str], steps: int) -> list[Entry]:
    """Read `165=METHOD`, or `METHOD` for as many steps as fp32 makes."""
    found: list[Entry] = []
    for text in texts:
        number, equals, method = text.partition("=")
        found.append(Entry(int(number), method) if equals and number.isdigit() else Entry(steps, text))
    return found


def trained(options: CompareOptions, methods: Sequence[str], steps: int, out: Path) -> Comparison:
    """Runs of these methods for so many steps; those that are there already are not made again."""
    return compare(dataclasses.replace(options, methods=tuple(methods), steps=steps, out=out), Quiet())


class Targets(NamedTuple):
    """What is to be reached, by seed."""

    loss: dict[int, float]
    metric: dict[int, float]


def targets(baseline: Comparison) -> Targets:
    """What fp32 ends at, made easier by the tolerance."""
    ease = -baseline.tolerance if baseline.task["higher_is_better"] else baseline.tolerance
    losses = {run.seed: figures.target_loss(baseline, run.seed) for run in baseline.finished(FP32)}
    metrics = {run.seed: run.evaluations[-1].value for run in baseline.finished(FP32)}
    return Targets(
        {seed: loss for seed, loss in losses.items() if loss is not None},
        {seed: value + ease * abs(value) for seed, value in metrics.items()},
    )


def row(entry: Entry, found: Comparison, target: Targets, window: int, floor_s: dict[int, float]) -> Row:
    """What the seeds of a method come to."""
    runs, better = found.finished(entry.method), found.task["higher_is_better"]
    hits = [figures.hit_of_metric(run, target.metric[run.seed], higher_is_better=better) for run in runs]
    losses = [figures.hit_of_loss(run, target.loss[run.seed], window) for run in runs]

    def ratios(hits: list[Hit | None]) -> list[float | None]:
        return [hit.time_s / floor_s[run.seed] if hit else None for run, hit in zip(runs, hits, strict=True)]

    reached = [hit for hit in hits if hit]
    return Row(
        entry,
        mean(run.wire.total / run.steps for run in runs),
        mean(1e3 * run.times_s[-1] / run.steps for run in runs),
        mean(hit.steps for hit in reached) if len(reached) == len(runs) else None,
        mean(hit.time_s for hit in reached) if len(reached) == len(runs) else None,
        ratios(hits),
        ratios(losses),
        [run.evaluations[-1].value for run in runs],
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train what is missing; return the figures."""
    plain = CompareOptions(
        task=arguments.task, hosts=arguments.hosts, seeds=arguments.seeds, rate=FREE, bucket_mb=1.0, evaluate_every=10
    )
    base = trained(plain, [FP32], arguments.steps, arguments.out / "fp32")
    target, window = targets(base), base.smoothing
    link = dataclasses.replace(plain, rate=arguments.rate, delay=arguments.delay)
    where = arguments.out / f"{arguments.rate}-{arguments.delay}"
    floor = trained(plain, [FLOOR], arguments.steps, arguments.out / "floor").finished(FLOOR)
    floor_s = {run.seed: run.times_s[-1] for run in floor}
    rows: list[Row] = []
    wanted = entries(arguments.methods, arguments.steps)
    for steps in dict.fromkeys(entry.steps for entry in wanted):
        mine = [entry for entry in wanted if entry.steps == steps]
        found = trained(link, [entry.method for entry in mine], steps, where / str(steps))
        rows += [row(entry, found, target, window, floor_s) for entry in mine]
    dense = mean(run.wire.total / run.steps for run in base.finished(FP32))
    return {
        "link": {"hosts": arguments.hosts, "rate": arguments.rate, "delay": arguments.delay},
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "floor_s": floor_s,
        "fp32_bytes": dense,
        "fp32_told_s": mean(floor_s.values()) + arguments.steps * 8 * dense / parse_rate(arguments.rate),
        "fp32_metrics": [run.evaluations[-1].value for run in base.finished(FP32)],
        "rows": [r._asdict() | {"entry": r.entry._asdict()} for r in sorted(rows, key=_order)],
    }


def _order(row: Row) -> float:
    return row.hit_s or float("inf")


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    floor = mean(figures["floor_s"].values())
    print(f"free link: {figures['steps']} steps in {floor:.1f} s; fp32 told: {figures['fp32_told_s']:.0f} s")
    print(f"fp32's metric at the end: {', '.join(f'{value:.3f}' for value in figures['fp32_metrics'])}")
    print(
        f"steps {'method':80s} {'kB':>6s} {'ms':>5s} {'reached':>7s} {'after s':>7s} {'ratio (seeds)':22s} "
        f"{'by training loss':22s} metric"
    )
    for found in figures["rows"]:
        print(line(found))


def line(found: dict[str, Any]) -> str:
    """One method's row."""
    entry = found["entry"]
    hit = ("-", "-") if found["hit_s"] is None else (f"{found['hit_steps']:.0f}", f"{found['hit_s']:.1f}")
    costs = f"{found['sent_bytes'] / 1e3:6.0f} {found['step_ms']:5.0f} {hit[0]:>7s} {hit[1]:>7s}"
    ratios = f"{spread(found['ratios']):22s} {spread(found['loss_ratios']):22s}"
    return f"{entry['steps']:5d} {entry['method']:80s} {costs} {ratios} {mean(found['metrics']):.3f}"


def spread(ratios: Sequence[float | None]) -> str:
    """The mean, where there is one, and the seeds."""
    numbers = [ratio for ratio in ratios if ratio is not None]
    whole = f"{mean(numbers):.2f}" if len(numbers) == len(ratios) else "-"
    return f"{whole} ({' '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in ratios)})"


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="[STEPS=]METHOD")
    parser.add_argument("--task", default="bytes")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--steps", type=int, default=150, help="that fp32 makes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("time-to-target"), help="keeps the runs")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    figures = measure(arguments)
    show(figures)
    if arguments.save:
        print("wrote", save_result(f"time_to_target_{arguments.task}_{arguments.rate}_{arguments.delay}", figures))


if __name__ == "__main__":
    main()
