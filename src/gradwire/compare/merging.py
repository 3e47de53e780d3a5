"""One run of what its ranks wrote down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradwire.compare.figures import mean
from gradwire.compare.results import Evaluation, Run, Split, Wire
from gradwire.compare.step_time import extended

Ranks = Sequence[dict[str, Any]]


class Course(NamedTuple):
    """What happened step by step, see `Run`."""

    losses: list[float]
    times_s: list[float]
    tx_bytes: list[float]


def merge(method: str, seed: int, ranks: Ranks) -> Run:
    """Make one run of what its ranks wrote: means over ranks, and times by the slowest."""

    def over_ranks(name: str) -> float:
        return mean(float(rank[name]) for rank in ranks)

    course, timed = _interleaved(ranks) if ranks[0]["apart"] else _in_step(ranks), ranks[0]["timed_steps"]
    total, framing, payload, buffers = (over_ranks(n) for n in ("total", "framing", "payload", "buffers"))
    run = Run(
        method=method,
        seed=seed,
        label=ranks[0]["label"],
        **course._asdict(),
        evaluations=[Evaluation(*evaluation) for evaluation in ranks[0]["evaluations"]],
        metric_values=ranks[0]["metric_values"],
        wire=Wire(
            total,
            framing,
            payload,
            buffers,
            other=total - framing - payload - buffers,
            setup=over_ranks("setup"),
            between=over_ranks("between"),
        ),
        split=Split(*(over_ranks(f.name) for f in dataclasses.fields(Split))),
        residual_norm=ranks[0]["residual_norm"],
        report=ranks[0]["report"],
        samples=sum(rank["samples"] for rank in ranks),
        energy_j=ranks[0]["energy_j"],
    )
    return run if timed is None else estimated(run, timed)


def estimated(run: Run, timed: int) -> Run:
    """A run of which only the first `timed` steps were timed and counted: what all would have taken and sent.

    Every step sends as much. A step takes what those after the warm-up took in the mean, and has the same parts.
    """
    times_s = extended(run.times_s[:timed], run.steps)
    longer, more = times_s[-1] / times_s[timed - 1], run.steps / timed
    seconds = {name: longer * value for name, value in dataclasses.asdict(run.split).items()}
    sent = {name: more * value for name, value in dataclasses.asdict(run.wire).items()} | {"setup": run.wire.setup}
    return dataclasses.replace(
        run,
        timed_steps=timed,
        times_s=times_s,
        tx_bytes=extended(run.tx_bytes[:timed], run.steps),
        evaluations=[one._replace(time_s=times_s[one.steps - 1]) for one in run.evaluations],
        wire=Wire(**sent),
        split=Split(**seconds),
        energy_j=None if run.energy_j is None else longer * run.energy_j,
    )


def _in_step(ranks: Ranks) -> Course:
    """Of ranks that make each step together."""

    def columns(name: str) -> list[tuple[float, ...]]:
        return list(zip(*(rank[name] for rank in ranks), strict=True))

    return Course(
        losses=[mean(losses) for losses in columns("losses")],
        times_s=[max(times) for times in columns("times_s")],
        tx_bytes=[mean(sent) for sent in columns("tx_bytes")],
    )


def _interleaved(ranks: Ranks) -> Course:
    """Of n ranks that step when they can: each n steps, in the order of time, are one of the run.

    >>> quick = {"losses": [8, 6, 4], "times_s": [1, 2, 3], "tx_bytes": [10, 20, 30]}
    >>> slow = {"losses": [7], "times_s": [2.5], "tx_bytes": [10]}
    >>> _interleaved([quick, slow])
    Course(losses=[7.0, 5.5], times_s=[2, 3], tx_bytes=[10.0, 20.0])
    """
    course = Course([], [], [])
    steps = sorted(
        (time, number, loss, sent)
        for number, rank in enumerate(ranks)
        for time, loss, sent in zip(rank["times_s"], rank["losses"], rank["tx_bytes"], strict=True)
    )
    sent_by = [0.0] * len(ranks)
    losses: list[float] = []
    for time, number, loss, sent in steps:
        sent_by[number] = sent
        losses.append(loss)
        if len(losses) == len(ranks):
            course.losses.append(mean(losses))
            course.times_s.append(time)
            course.tx_bytes.append(mean(sent_by))
            losses.clear()
    return course
