"""The page of a pipeline's schedule: what each rank does against time."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

from gradwire.core.atomic_file import write_atomically
from gradwire.core.version import VERSION
from gradwire.parallel.pipelines import SCHEDULES, ScheduleShape, WorkTimeline
from gradwire.report import text
from gradwire.report.axes import Scale
from gradwire.report.bars import across
from gradwire.report.svg import label, tag, width_of
from gradwire.report.template import rendered

WIDTHS = (1096, 350)
"""Of pictures, in pixels: on a screen, and on a phone."""

ROW_PITCH, ROW_HEIGHT = 30, 22
KINDS = {"F": "compute", "B": "encode", "I": "encode", "W": "decode"}
"""Classes of the style sheet for forward passes, backward passes with gradients of inputs, and gradients of weights."""

_NAMES = {"F": "forward pass", "B": "backward pass", "I": "gradients of inputs", "W": "gradients of weights"}


def write_schedule_page(shape: ScheduleShape, timeline: WorkTimeline, path: Path) -> None:
    """Write a page of one file that loads nothing from anywhere.

    Args:
        shape: the schedule.
        timeline: computed, or measured.
        path: of the page.
    """
    write_atomically(path, render(shape, timeline))


def render(shape: ScheduleShape, timeline: WorkTimeline) -> str:
    """The page as HTML."""
    formula = [] if shape.formula is None else [("formula", f"{shape.formula:.1%}")]
    kept = zip(range(shape.ranks), timeline.busy, timeline.kept, strict=True)
    return rendered(
        "schedule.html",
        command="schedule",
        task=shape.name,
        headline=f"{shape.name}: ranks wait {timeline.idle:.1%} of a step",
        lede=f"{SCHEDULES[shape.name].what}; {text.counted(shape.ranks, 'rank')}, "
        f"{text.counted(shape.stages, 'stage')}, {shape.micro_batches} micro-batches.",
        findings=[],
        pictures=tuple(schedule_svg(shape.name, timeline, width=width) for width in WIDTHS),
        headings=("rank", "stages", "works", "waits", "activations kept"),
        rows=[
            (
                "",
                [
                    f"{rank}",
                    ", ".join(map(str, shape.stages_of(rank))),
                    f"{busy:g}",
                    f"{timeline.length - busy:g}",
                    most,
                ],
            )
            for rank, busy, most in kept
        ],
        conditions=[
            ("bubble", f"{timeline.bubble:.1%} of the work of a rank"),
            *formula,
            ("length of a step", f"{timeline.length:g}"),
            ("software", f"gradwire {VERSION}"),
        ],
    )


def schedule_svg(title: str, timeline: WorkTimeline, *, width: int) -> str:
    """Draw what each rank does against time.

    Args:
        title: of the picture.
        timeline: computed, or measured.
        width: in pixels.
    """
    top, bottom = 8, 38
    height = top + ROW_PITCH * len(timeline.ranks) + bottom
    left = 24 + width_of(f"rank {len(timeline.ranks) - 1}")
    x = Scale(0.0, timeline.length, left, width - 14)
    body = [tag("title", html.escape(title)), *across(x, "time", width, top, height - bottom)]
    several = any(len({span.work.stage for span in rank}) > 1 for rank in timeline.ranks)
    for rank in range(len(timeline.ranks)):
        y = top + ROW_PITCH * rank + (ROW_PITCH - ROW_HEIGHT) / 2
        body.append(label(f"rank {rank}", left - 10, y + ROW_HEIGHT - 6, class_="name end"))
        body += _rects(timeline, rank, x, y, several)
    return tag("svg", "".join(body), class_="timeline", viewBox=f"0 0 {width} {height}", role="img")


def _rects(timeline: WorkTimeline, rank: int, x: Scale, y: float, several: bool) -> Iterator[str]:
    for work, began, ended in timeline.ranks[rank]:
        start, stop = x(began - timeline.began), x(ended - timeline.began)
        name = f"{_NAMES[work.kind]} of micro-batch {work.micro_batch} in stage {work.stage}"
        tip = tag("title", f"rank {rank}: {name}, {ended - began:g}")
        yield tag(
            "rect", tip, class_=KINDS[work.kind], x=start, y=y, width=max(0.5, stop - start - 1), height=ROW_HEIGHT
        )
        shown = f"{work.stage}.{work.micro_batch}" if several else str(work.micro_batch)
        if width_of(shown) < stop - start:
            yield label(shown, (start + stop) / 2, y + ROW_HEIGHT - 6, class_="tick middle")
