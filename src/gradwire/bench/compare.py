"""The main job: train one task with several methods on a slow network, and keep what was measured.

A comparison is a grid of runs, seeds outermost, so that slow drifts of the machine fall on every method alike. Each
finished run is stored at once; the same command run again goes on where the last one stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gradwire.bench import storage, verdict
from gradwire.bench.compare_options import CompareOptions
from gradwire.bench.environment import environment
from gradwire.bench.merging import merge
from gradwire.bench.net import Network
from gradwire.bench.news import News, read_news
from gradwire.bench.option_fields import stored
from gradwire.bench.plan import ComparisonPlan, make_network, make_plan
from gradwire.bench.ranks import RankFailure, run_ranks
from gradwire.bench.results import Comparison, Run
from gradwire.bench.run_folder import prepare_folder, slug, store_run, stored_runs
from gradwire.bench.slow import parse_slow
from gradwire.bench.task import count
from gradwire.bench.trainer import Job
from gradwire.bench.warm import WarmHosts


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
    with make_network(options) as network:
        conditions = plan.conditions(network.mode)
        kept = stored_runs(folder, plan.grid, conditions)
        view.begin(plan, network.description, [(run.method, run.seed) for run in kept])
        runs = {(run.method, run.seed): run for run in kept}
        missing = [cell for cell in plan.grid if cell not in runs]
        hosts = warm_hosts(plan, network, folder) if missing else contextlib.nullcontext()
        with hosts as warm:
            for method, seed in missing:
                view.start(method, seed)
                assert warm is not None
                run = run_beside_line(plan, network, warm, method, seed, folder, view)
                run = dataclasses.replace(run, conditions=conditions)
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
    return WarmHosts(network, options.hosts, options.task, options.text, folder / "logs")


def run_beside_line(
    plan: ComparisonPlan, network: Network, warm: WarmHosts, method: str, seed: int, folder: Path, view: View
) -> Run:
    """`run_once`, with what the network's delay line has used meanwhile."""
    before, begun = network.line_use(), time.monotonic()
    run = run_once(plan, network, warm, method, seed, folder, view)
    after, seconds = network.line_use(), time.monotonic() - begun
    if before is None or after is None:
        return run
    cores = (after.cpu_s - before.cpu_s) / seconds
    return dataclasses.replace(run, line_cores=cores, line_missed=after.missed - before.missed)


def run_once(
    plan: ComparisonPlan, network: Network, warm: WarmHosts, method: str, seed: int, folder: Path, view: View
) -> Run:
    """Train with one method and one seed on every host; a failure becomes a failed `Run`."""
    place = folder / "logs" / f"{slug(method)}-seed{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    mine = make_job(plan, method, seed, place)
    job = place / "job.json"
    job.write_text(json.dumps(dataclasses.asdict(mine)))
    ranks = range(plan.options.hosts)

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and (news := read_news(line, mine.token)):
            view.news(method, seed, news)

    try:
        run_ranks(
            [warm.command(rank, job.resolve()) for rank in ranks],
            [network.environment(rank) for rank in ranks],
            log_dir=place,
            deadline_s=run_deadline(plan),
            on_line=on_line,
        )
        return merge(method, seed, [_written(place, rank) for rank in ranks])
    except RankFailure as failure:
        return Run(method, seed, status="failed", reason=str(failure))
    finally:
        for leftover in [*place.glob("rank*.json"), *place.glob("rendezvous*")]:
            leftover.unlink(missing_ok=True)


def _written(place: Path, rank: int) -> dict[str, Any]:
    """What a rank wrote down; one that a task ended early, with `os._exit`, wrote nothing."""
    try:
        return json.loads((place / f"rank{rank}.json").read_text())
    except (OSError, ValueError) as error:
        text = f"rank {rank} ended with status 0, but before it had finished: does the task end the process?"
        raise RankFailure(text, rank, 0) from error


def make_job(plan: ComparisonPlan, method: str, seed: int, place: Path) -> Job:
    """What each rank of a run is told."""
    options = plan.options
    return Job(
        method=method,
        seed=seed,
        task=options.task,
        text=str(options.text.resolve()) if options.text else None,
        steps=options.steps,
        seconds=plan.seconds,
        bucket_mb=options.bucket_mb,
        evaluate_every=plan.evaluate_every,
        deadline_s=plan.deadline_s,
        folder=str(place.resolve()),
        engine=options.engine,
        token=secrets.token_hex(8),
        slow=parse_slow(options.slow, options.hosts),
    )


def run_deadline(plan: ComparisonPlan) -> float:
    """Upper limit on a whole run; a rank that hangs is found by its peers' collectives long before."""
    if plan.seconds is not None:
        return 3 * plan.seconds + 10 * plan.deadline_s
    return (plan.options.steps or 1) * plan.deadline_s + 10 * plan.deadline_s
