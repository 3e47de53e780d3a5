"""What to say of a run: how far it is, and what to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradwire.core.figures import listed, milliseconds, si_bytes, significant
from gradwire.profiling.summary import LATE_SHARE
from gradwire.session.report import LARGE_RESIDUAL
from gradwire.watch.view import RankView, RunView

LONG_S, LONG_STEPS = 10.0, 5.0
"""A step that is under way is long after so many seconds, if that is so many usual steps too."""


MOST_NAMED = 8
"""Ranks that a sentence names."""


class Said(NamedTuple):
    """A sentence on a run, and whether it tells of a fault."""

    text: str
    is_fault: bool


def headline(view: RunView) -> str:
    """How far the run is, in one sentence."""
    failed = view.failed
    if failed is not None:
        return f"Rank {failed.rank} failed in step {failed.steps}: {failed.error}"
    if view.is_over:
        return f"The run has ended well after {view.steps:,} steps"
    if all(rank.is_silent for rank in view.ranks):
        least_s = min(rank.silent_s for rank in view.ranks if rank.state == "running")
        return f"Nothing has come for {duration(least_s)}, after {view.steps:,} steps"
    if not view.steps:
        return "The run has begun, and no step has ended"
    took = f", {milliseconds(view.mean_step_ms)} ms each" if view.mean_step_ms else ""
    return f"{view.steps:,} steps{took}"


def figures(view: RunView) -> str:
    """The last loss, bytes, and how much less they are than without compression."""
    parts = [f"{name} {shown(course[-1][1])}" for name, course in view.scalars.items() if course]
    sent = [rank for rank in view.ranks if rank.sent_bytes > 0]
    if sent:
        most = max(sent, key=lambda rank: rank.sent_bytes)
        times = most.ratio or 1.0
        ratio = f", {significant(times, 3)}x less than uncompressed" if times > 1.05 else ""
        parts.append(f"{si_bytes(most.sent_bytes)} a step{ratio}")
    return ", ".join(parts)


def findings(view: RunView) -> Iterator[Said]:
    """What to look at, faults first."""
    yield from _deaths(view)
    yield from _stuck(view)
    for name, course in view.scalars.items():
        bad = next((index for index, value in course if not math.isfinite(value)), None)
        if bad is not None:
            yield Said(f"{name} is not finite from about step {bad} on.", True)
    yield from _late(view)
    for rank in view.ranks:
        if rank.residual_norm is not None and rank.gradient_norm and math.isfinite(rank.residual_norm):
            ratio = rank.residual_norm / rank.gradient_norm
            if ratio >= LARGE_RESIDUAL:
                times = f"{significant(ratio, 2)} times the norm of its gradient"
                yield Said(f"What rank {rank.rank} owes is {times}: see session.report().", False)
                break
    if view.missing and view.ranks:
        yield Said(f"{_who(view.missing, 'has', 'have')} told nothing in this folder.", False)
    for problem in view.problems:
        yield Said(problem, False)


def now(rank: RankView) -> str:
    """What a rank does, in a few words."""
    if rank.state != "running":
        return rank.state
    return f"silent for {duration(rank.silent_s)}" if rank.is_silent else DOING.get(rank.doing, rank.doing)


def _deaths(view: RunView) -> Iterator[Said]:
    first = view.failed
    for rank in view.ranks:
        if rank.state == "failed" and rank is not first:
            yield Said(f"Rank {rank.rank} on {rank.host} failed too: {rank.error}", True)
    silent = [rank.rank for rank in view.ranks if rank.is_silent]
    if silent:
        least_s = min(rank.silent_s for rank in view.ranks if rank.is_silent)
        who = _who(silent, "has", "have")
        why = "killed or stopped, or the folder can be written to no more"
        yield Said(f"{who} written nothing for {duration(least_s)}: {why}.", True)


def _who(ranks: Sequence[int], one: str, several: str) -> str:
    """Ranks and a verb; of many only the first are named.

    >>> _who([3], "has", "have"), _who(range(40), "has", "have")
    ('Rank 3 has', 'Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more have')
    """
    if len(ranks) == 1:
        return f"Rank {ranks[0]} {one}"
    if len(ranks) <= MOST_NAMED:
        return f"Ranks {listed(ranks)} {several}"
    return f"Ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more {several}"


def _stuck(view: RunView) -> Iterator[Said]:
    """Ranks whose step takes much longer than steps do, those that do the same together, the fewest first."""
    stuck: dict[str, list[RankView]] = {}
    for rank in view.ranks:
        is_long = rank.doing_s >= LONG_S and 1e3 * rank.doing_s >= LONG_STEPS * view.mean_step_ms
        if rank.state == "running" and not rank.is_silent and is_long:
            stuck.setdefault(rank.doing, []).append(rank)
    for doing, ranks in sorted(stuck.items(), key=lambda item: len(item[1])):
        least_s = duration(min(rank.doing_s for rank in ranks))
        host = f" on {ranks[0].host}" if len(ranks) == 1 else ""
        who = _who([rank.rank for rank in ranks], f"{host} is".strip(), "are")
        yield Said(f"{who} {DOING.get(doing, f'in {doing}')} for {least_s}; gradwire stacks tells where.", True)


DOING = {
    "": "between two steps",
    "data": "waiting for data",
    "forward": "in the forward pass",
    "loss": "between forward and backward pass",
    "backward": "in the backward pass",
    "gradients": "between backward pass and optimizer",
    "optimizer": "in the optimizer",
}
"""What a training loop does, as one says it."""


def _late(view: RunView) -> Iterator[Said]:
    for rank in sorted(view.ranks, key=lambda rank: -rank.caused_ms):
        if view.mean_step_ms <= 0 or rank.caused_ms < LATE_SHARE * view.mean_step_ms:
            return
        share = rank.caused_ms / view.mean_step_ms
        took = f"{milliseconds(rank.caused_ms)} ms a step ({share:.0%} of it)"
        yield Said(f"The others wait {took} for rank {rank.rank} on {rank.host}.", False)


def shown(value: float) -> str:
    """A number of a script: four digits, or what it is if it is not finite."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    return f"{value:.3e}" if value and not 1e-3 <= abs(value) < 1e6 else significant(value, 4)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours in whole numbers.

    >>> duration(42.4), duration(150), duration(7300)
    ('42 s', '2 min 30 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
