"""The page of a profile: what each rank's steps were spent on, one step against time, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from gradwire.core.atomic_file import write_atomically
from gradwire.profiling import Account, RankRecord, RankShares, StepRecord, account, by_method
from gradwire.profiling.account import KINDS, common_steps
from gradwire.profiling.summary import findings
from gradwire.profiling.tensors import HEADINGS as TENSOR_HEADINGS
from gradwire.report import text
from gradwire.report.bars import Bar, bar_svg
from gradwire.report.svg import WIDTHS
from gradwire.report.template import rendered
from gradwire.report.timeline import timeline_svg

MOST_DRAWN = 8
"""Ranks of which a step is drawn: those that the others wait for most come first."""

MOST_TENSORS = 30
"""Tensors of the page: those of which most is sent."""

HEADINGS = ("rank", "host", "step", *KINDS, "of it", "sent", "overlap", "waits for")


def write_profile_page(records: Sequence[RankRecord], path: Path, skip: int) -> None:
    """Write a page of one file that loads nothing from anywhere.

    Args:
        records: of the ranks of one run.
        path: of the page.
        skip: first steps that do not count.
    """
    write_atomically(path, render(records, skip))


def render(records: Sequence[RankRecord], skip: int) -> str:
    """The page as HTML."""
    found = account(records, skip)
    index, steps = _typical_step(records, found, skip)
    title = f"Step {index}, rank by rank"
    of_all = len(steps) == len(records)
    return rendered(
        "profile.html",
        command="profile",
        task=", ".join(found.methods),
        headline=headline(found),
        lede=lede(found),
        findings=[("caveat", said) for said in findings(found)],
        kinds=[(kind, kind) for kind in KINDS],
        bars=tuple(bar_svg("What a step was spent on", _bars(found), None, width=width) for width in WIDTHS),
        step=index,
        timeline=tuple(timeline_svg(title, steps, width=width) for width in WIDTHS),
        shown="" if of_all else f"Shown are {len(steps)} of {len(records)} ranks, the most waited for first.",
        headings=HEADINGS,
        rows=[("", _cells(rank)) for rank in found.ranks],
        tensor_headings=("tensor", "method", *TENSOR_HEADINGS),
        tensor_rows=_tensor_rows(found),
        conditions=_conditions(records, found),
    )


def headline(found: Account) -> str:
    """What steps take, and the largest part of it that is no computation."""
    shares = {kind: statistics.fmean(rank.seconds[kind] for rank in found.ranks) for kind in KINDS if kind != "compute"}
    largest = max(shares, key=lambda kind: shares[kind])
    words = {
        "data": "waits for data",
        "encode": "is coding",
        "decode": "is decoding",
        "transfer": "waits for bytes",
        "wait": "waits for other ranks",
    }
    took = f"A step takes {text.milliseconds(1e3 * found.step_s)} ms"
    share = shares[largest] / found.step_s if found.step_s > 0 else 0.0
    return f"{took}, and {share:.0%} of it {words[largest]}"


def lede(found: Account) -> str:
    """What was looked at."""
    return f"{text.counted(len(found.ranks), 'rank')}, {text.counted(found.steps, 'step')}, {', '.join(found.methods)}."


def _bars(found: Account) -> list[Bar]:
    return [Bar(f"rank {rank.rank}", {kind: 1e3 * rank.seconds[kind] for kind in KINDS}) for rank in found.ranks]


def _cells(rank: RankShares) -> list[str]:
    times = [text.milliseconds(1e3 * seconds) for seconds in (rank.step_s, *(rank.seconds[kind] for kind in KINDS))]
    late = sorted(rank.waited_for.items(), key=lambda each: -each[1])[:3]
    waits = ", ".join(f"rank {other} {text.milliseconds(1e3 * seconds)}" for other, seconds in late)
    rest = [f"{rank.accounted:.1%}", text.si_bytes(rank.sent_bytes), f"{rank.efficiency:.0%}", waits or text.NOTHING]
    return [f"rank {rank.rank}", rank.host, *times, *rest]


def _tensor_rows(found: Account) -> list[tuple[str, list[str]]]:
    """The sum of each method, and the tensors of which most is sent."""
    sums = [("", ["all", share.method, *share.cells()]) for share in by_method(found.tensors)]
    return sums + [("", [share.name, share.method, *share.cells()]) for share in found.tensors[:MOST_TENSORS]]


def _typical_step(records: Sequence[RankRecord], found: Account, skip: int) -> tuple[int, dict[str, StepRecord]]:
    """The step of median length that all ranks have, of the ranks that others wait for most."""
    moved = {record.rank: record.steps_on_common_clock() for record in records}
    kept = common_steps(records, skip)
    lengths = {index: max(steps[index].length_s for steps in moved.values()) for index in kept}
    by_length: list[int] = sorted(kept, key=lengths.__getitem__)
    typical = by_length[len(kept) // 2]
    drawn = sorted(sorted(moved, key=lambda rank: -found.caused_s(rank))[:MOST_DRAWN])
    return typical, {f"rank {rank}": moved[rank][typical] for rank in drawn}


def _conditions(records: Sequence[RankRecord], found: Account) -> list[tuple[str, str]]:
    """How sure the page is."""
    trips = [reading.round_trip_s for record in records for reading in record.clock if record.rank]
    error = f"at most {text.milliseconds(1e3 * max(trips) / 2)} ms" if trips else "not read"
    pairs = [("ranks", str(len(records))), ("steps", str(found.steps)), ("error of clocks", error)]
    if found.missing:
        pairs.append(("missing", text.counted(len(found.missing), "rank")))
    if found.unfinished:
        pairs.append(("ended in mid-profile", text.counted(len(found.unfinished), "rank")))
    return pairs
