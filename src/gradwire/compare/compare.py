"""The main job: train one task with several methods on a slow network, and keep what was measured.

A comparison is a grid of runs, seeds outermost, so that slow drifts of the machine fall on every method alike. Each
finished run is stored at once; the same command run again goes on where the last one stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gradwire.compare import storage, verdict
from gradwire.compare.one_run import run_once
from gradwire.compare.options import CompareOptions
from gradwire.compare.plan import ComparisonPlan, make_network, make_plan
from gradwire.compare.results import Comparison, Run
from gradwire.compare.run_folder import prepare_folder, store_run, stored_runs
from gradwire.compare.warm_hosts import WarmHosts
from gradwire.network import Network
from gradwire.network.delay_process import LineUse
from gradwire.network.environment import environment
from gradwire.option_fields import stored
from gradwire.ranks.news import News
from gradwire.tasks.task import count


class View(Protocol):
    """Someone who watches a comparison."""

    def begin(self, plan: ComparisonPlan, network: str, kept: Sequence[tuple[str, int]]) -> None:
        """Runs are about to start; those `kept` are there already, as (method, seed)."""
        ...

    def start(self, method: str, seed: int) -> None:
        """A run of the comparison starts."""
        ...

    def news(self, method: str, seed: int, news: News) -> None:
        """The run in progress has come a little further."""
        ...

    def finish(self, run: Run) -> None:
        """A run has finished, or failed."""
        ...


# ------------------------------------------------------------------------------------------- comparing


def compare(options: CompareOptions, view: View) -> Comparison:
    """Run a comparison, or what is left of it, and store runs, results and tables in its folder.

    Args:
        options: what to compare.
        view: told what happens.

    Returns:
        All runs, failed ones included.

    Raises:
        GradwireError: the options are wrong, or clash with what the folder holds.
        OSError: the folder cannot be written.
    """
    plan = make_plan(options)
    folder = prepare_folder(options.out, fresh=options.fresh)
    with make_network(plan.options) as network:
        kept = stored_runs(folder, plan.grid, lambda method: plan.conditions(network.mode, method))
        view.begin(plan, network.description, [(run.method, run.seed) for run in kept])
        runs = {(run.method, run.seed): run for run in kept}
        missing = [cell for cell in plan.grid if cell not in runs]
        hosts = warm_hosts(plan, network, folder) if missing else contextlib.nullcontext()
        with hosts as warm:
            for method, seed in missing:
                view.start(method, seed)
                assert warm is not None
                run = run_beside_line(plan, network, warm, method, seed, folder, view)
                run = dataclasses.replace(run, conditions=plan.conditions(network.mode, method))
                store_run(folder, run)
                runs[method, seed] = run
                view.finish(run)
        ordered = [runs[cell] for cell in sorted(plan.grid, key=lambda cell: _place(plan, cell))]
        comparison = assemble(plan, network, ordered)
    storage.save(comparison, folder / "results.json")
    write_derived(comparison, folder)
    return comparison


def write_derived(comparison: Comparison, folder: Path) -> None:
    """Write what follows from `results.json`: the tables and the verdict."""
    storage.write_tables(comparison, folder)
    verdict.write(verdict.judge(comparison), folder / "verdict.json")


def _place(plan: ComparisonPlan, cell: tuple[str, int]) -> tuple[int, int]:
    return plan.options.methods.index(cell[0]), cell[1]


def assemble(plan: ComparisonPlan, network: Network, runs: list[Run]) -> Comparison:
    """Put runs and their conditions together."""
    task = plan.task
    return Comparison(
        task={
            "name": plan.options.task,
            "description": task.description,
            "parameters": count(task.model),
            "metric_name": task.metric_name,
            "higher_is_better": task.higher_is_better,
        },
        options=stored(plan.options),
        environment=environment(network),
        smoothing=plan.smoothing,
        target=plan.options.target,
        runs=runs,
    )


def warm_hosts(plan: ComparisonPlan, network: Network, folder: Path) -> WarmHosts:
    """Processes that make every run of this comparison start at once."""
    options = plan.options
    return WarmHosts(network, plan.ranks, options.task, options.text, folder / "logs")


def run_beside_line(
    plan: ComparisonPlan, network: Network, warm: WarmHosts, method: str, seed: int, folder: Path, view: View
) -> Run:
    """`run_once`, with what the network's delay line has used as long as the links had their limits."""
    uses = [_line_use(network)]

    def lift() -> None:
        uses.append(_line_use(network))
        network.lift()

    run = run_once(plan, network, warm, method, seed, folder, lambda news: view.news(method, seed, news), lift)
    uses.append(_line_use(network))
    network.limit()
    (begun, before), (ended, after) = uses[:2]
    if before is None or after is None:
        return run
    cores = (after.cpu_s - before.cpu_s) / (ended - begun)
    return dataclasses.replace(run, line_cores=cores, line_missed=after.missed - before.missed)


def _line_use(network: Network) -> tuple[float, LineUse | None]:
    """What the network's delay line has used, and when that was."""
    return time.monotonic(), network.line_use()
