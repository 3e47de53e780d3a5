"""Which window, outer learning rate and outer momentum DiLoCo wants, in short runs and in long ones.

Two ranks train the byte-level GPT over the loopback interface, without a limit on the link: what is measured is the
held-out loss after so many steps, and nothing of time. Seeds are paired. The first stage trains every setting once for
few steps. The second one trains the best of them with several seeds for more steps, beside all-reduce in every step,
plain averaging, and the paper's own setting (Douillard et al. 2023: rate 0.7, Nesterov momentum 0.9). Methods of
`--also` come with these, and in a third stage of few steps.

    python benchmarks/outer_settings.py --long 1500 --also "local:H=2,last=8,double_after=27%,steps={steps}" --save NAME
    python benchmarks/outer_settings.py --page benchmarks/results/NAME_2026-11-23.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradwire
from common import save_result
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import measure
from pages import DOCS, markdown, write
from plots import Line, Panel, figure

RANKS = 2
WINDOWS, RATES, MOMENTA = (10, 30), (0.4, 0.7, 1.0), (0.0, 0.5, 0.9)
ALL_REDUCE = "all-reduce"
EVALUATIONS = 10
GAP = "above all-reduce at the end"


def diloco(H: int, rate: float, momentum: float) -> str:
    """Its spec."""
    return f"diloco:H={H},lr={rate:g},momentum={momentum:g}"


PAPER = [diloco(H, 0.7, 0.9) for H in WINDOWS]
MEANS = [f"local:H={H}" for H in WINDOWS]


# On the ranks -------------------------------------------------------------------------------------------------------


def trained(rank: int, world_size: int, method: str, seed: int, steps: int) -> list[tuple[int, float]]:
    """Steps and held-out losses of the model that all ranks agreed on last, as one rank sees it."""
    task = make_task("bytes", seed, None)
    inner = task.optimizer(task.model.parameters())
    optimizer: Any = inner if method == ALL_REDUCE else gradwire.wrap(inner, task.model, method)
    session = gradwire.Session(task.model, "none") if method == ALL_REDUCE else None
    rates = [group["lr"] for group in inner.param_groups]
    curve: list[tuple[int, float]] = []
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(step, step / steps)
        inputs, targets = task.batch(step, rank, world_size)
        optimizer.zero_grad()
        task.loss(task.model(inputs), targets).backward()
        if session is not None:
            session.reduce_(task.model)
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
        optimizer.step()
        if (step + 1) % max(steps // EVALUATIONS, 1) == 0:
            if session is None and step + 1 == steps:
                optimizer.sync()
            view: AbstractContextManager[object] = nullcontext() if session else optimizer.evaluating()
            with view, torch.no_grad():
                curve.append((step + 1, measure(task.metric, task.model).value))
    (session or optimizer).close()
    return curve


# Here ---------------------------------------------------------------------------------------------------------------


def measured(methods: Sequence[str], seeds: int, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train each method with each seed; print a line of each."""
    for method in methods:
        curves: list[list[tuple[int, float]]] = []
        for seed in range(seeds):
            arguments = {"method": method, "seed": seed, "steps": steps}
            curves.append(run_function(f"{__file__}:trained", RANKS, arguments, 120 + 10.0 * steps)[0])
        ends = [curve[-1][1] for curve in curves]
        spread = statistics.stdev(ends) if seeds > 1 else None
        row = {"loss": statistics.fmean(ends), "spread": spread, "losses": ends, "curves": curves}
        said = "" if spread is None else f" ± {spread:.3f}"
        print(f"{steps:5} steps  {method:34} {row['loss']:.3f}{said}", flush=True)
        yield method, row


def survivors(rows: dict[str, dict[str, Any]], count: int) -> list[str]:
    """The settings of DiLoCo that ended best, apart from the paper's."""
    found = [method for method in rows if method.startswith("diloco") and method not in PAPER]
    return sorted(found, key=lambda method: rows[method]["loss"])[:count]


# Page ---------------------------------------------------------------------------------------------------------------


def means(row: dict[str, Any]) -> list[tuple[float, float]]:
    """Steps, and the held-out loss at these as the mean over seeds."""
    return [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*row["curves"], strict=True)]


def above(row: dict[str, Any], base: dict[str, Any]) -> str:
    """How much higher a method ends than all-reduce with the same seeds, and the standard error of that."""
    gaps = [mine - other for mine, other in zip(row["losses"], base["losses"], strict=True)]
    return f"{statistics.fmean(gaps):+.3f} ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.3f}"


def show(path: Path) -> None:
    """Write all stages of a result into docs/results.md, and the curves beside it."""
    found = json.loads(path.read_text())
    screen, long = found["stages"]["screen"], found["stages"]["long"]
    head = ["window, outer rate", *(f"momentum {momentum:g}" for momentum in MOMENTA)]
    rows = [
        [f"H={H}, {rate:g}", *(f"{screen[diloco(H, rate, momentum)]['loss']:.3f}" for momentum in MOMENTA)]
        for H in WINDOWS
        for rate in RATES
    ]
    alone = ", ".join(f"`{name}` {screen[name]['loss']:.3f}" for name in [ALL_REDUCE, *MEANS])
    marks = [mark for mark, _ in means(long[ALL_REDUCE])]
    places = [0, len(marks) // 2 - 1, len(marks) - 1]
    columns = ["method", *(f"after {marks[place]:.0f} steps" for place in places), GAP]
    table = [
        [f"`{name}`", *(f"{means(row)[place][1]:.3f}" for place in places), above(row, long[ALL_REDUCE])]
        for name, row in long.items()
    ]
    short = found["stages"]["short"]
    ends = [[f"`{name}`", f"{row['loss']:.3f}", above(row, short[ALL_REDUCE])] for name, row in short.items()]
    steps, seeds = found["steps"], len(next(iter(long.values()))["losses"])
    said = (
        f"Held-out loss after {steps['screen']} steps, one seed ({alone}):\n\n{markdown(head, rows)}\n\n"
        f"Longer runs, {seeds} seeds; the gap to all-reduce is paired by seed, with its standard error:\n\n"
        f"{markdown(columns, table)}\n\nRuns that are {steps['short']} steps long:\n\n"
        f"{markdown(['method', 'held-out loss', GAP], ends)}\n\nFigures: `benchmarks/results/{path.name}`."
    )
    write("results.md", "outer_settings.py", said)
    lines = [Line(name if len(name) < 60 else f"{name[:40]}…", means(row), dots=True) for name, row in long.items()]
    panel = Panel("Held-out loss, mean over seeds", "steps", lines, high=max(means(r)[1][1] for r in long.values()))
    (DOCS / "outer_settings.svg").write_text(figure("DiLoCo's outer rate and momentum over steps", [panel]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screen", type=int, default=300, metavar="STEPS", help="of the first stage")
    parser.add_argument("--long", type=int, default=1000, metavar="STEPS", help="of the second stage")
    parser.add_argument("--seeds", type=int, default=3, help="of the second stage")
    parser.add_argument("--survivors", type=int, default=4)
    parser.add_argument("--methods", nargs="+", help="of the second stage; there is no first one then")
    parser.add_argument("--short", type=int, default=150, metavar="STEPS", help="of the third stage")
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="SPEC", help="more methods; {steps} in a spec is the length of the run"
    )
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME_<date>.json after each method")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="put a result into docs/results.md, and train nothing"
    )
    options = parser.parse_args(arguments)
    if options.page:
        show(options.page)
        return
    steps = {"screen": options.screen, "long": options.long, "short": options.short}
    stages: dict[str, dict[str, dict[str, Any]]] = {}
    chosen = options.methods

    def fill(stage: str, methods: Sequence[str], seeds: int) -> None:
        stages[stage] = {}
        for method, row in measured(methods, seeds, steps[stage]):
            stages[stage][method] = row
            if options.save:
                save_result(options.save, {"ranks": RANKS, "steps": steps, "stages": stages})

    if chosen is None:
        every = [diloco(H, rate, momentum) for H in WINDOWS for rate in RATES for momentum in MOMENTA]
        fill("screen", [ALL_REDUCE, *MEANS, *every], 1)
        chosen = [ALL_REDUCE, *MEANS, *PAPER, *survivors(stages["screen"], options.survivors)]
    if options.long:
        fill("long", [*chosen, *(spec.format(steps=options.long) for spec in options.also)], options.seeds)
    if options.also:
        fill("short", [ALL_REDUCE, *(spec.format(steps=options.short) for spec in options.also)], options.seeds)


if __name__ == "__main__":
    main()
