"""One run of a comparison: a method trained with a seed, on every host."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.compare.merging import merge
from gradwire.compare.plan import ComparisonPlan
from gradwire.compare.results import Run
from gradwire.compare.run_folder import slug
from gradwire.compare.step_time import PRECISION
from gradwire.compare.trainer import RankJob
from gradwire.compare.warm_hosts import WarmHosts
from gradwire.network import Network
from gradwire.ranks.news import News, read_news, write_timed
from gradwire.ranks.supervised import RankFailure, run_ranks


def run_once(
    plan: ComparisonPlan,
    network: Network,
    warm: WarmHosts,
    method: str,
    seed: int,
    folder: Path,
    tell: Callable[[News], None],
    lift: Callable[[], None],
) -> Run:
    """Train with one method and one seed on every host; a failure becomes a failed `Run`.

    Args:
        plan: of the comparison.
        network: where the hosts are.
        warm: the processes of the hosts.
        method: its spec.
        seed: of weights and of the order of the data.
        folder: of the comparison.
        tell: told how far the run has come.
        lift: called once the rest of the run is to be trained without a limit on the links.
    """
    place = folder / "logs" / f"{slug(method)}-seed{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    mine = make_job(plan, method, seed, place)
    job = place / "job.json"
    job.write_text(json.dumps(dataclasses.asdict(mine)))
    ranks = range(plan.ranks)

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and (news := read_news(line, mine.token, News)):
            tell(news)
        elif rank == 0 and line == write_timed(mine.token):
            lift()

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


def make_job(plan: ComparisonPlan, method: str, seed: int, place: Path) -> RankJob:
    """What each rank of a run is told."""
    options = plan.options
    return RankJob(
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
        slow=plan.slow,
        smoothing=plan.smoothing,
        precision=PRECISION if plan.estimates_time(method) else None,
    )


def run_deadline(plan: ComparisonPlan) -> float:
    """Upper limit on a whole run; a rank that hangs is found by its peers' collectives long before."""
    if plan.seconds is not None:
        return 3 * plan.seconds + 10 * plan.deadline_s
    return (plan.options.steps or 1) * plan.deadline_s + 10 * plan.deadline_s
