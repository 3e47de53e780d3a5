"""The page of a pipeline's schedule: what each rank does against time."""

from __future__ import annotations

from pathlib import Path

from gradwire.core.atomic_file import write_atomically
from gradwire.core.version import VERSION
from gradwire.parallel.pipelines import SCHEDULES, ScheduleShape, WorkTimeline
from gradwire.parallel.pipelines.orders import StageWork
from gradwire.report import text
from gradwire.report.rows import PASSES, DrawnBlock, blocks_svg, pass_blocks, shown_kinds
from gradwire.report.svg import WIDTHS
from gradwire.report.template import rendered


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
    rows = {f"rank {rank}": _blocks(shape, timeline, rank) for rank in range(shape.ranks)}
    pictures = tuple(blocks_svg(shape.name, rows, "time", "{:g}".format, width=width) for width in WIDTHS)
    formula = [] if shape.formula is None else [("formula", f"{shape.formula:.1%}")]
    what = SCHEDULES[shape.name].what
    return rendered(
        "schedule.html",
        command="schedule",
        task=shape.name,
        headline=f"{shape.name}: ranks wait {timeline.idle:.1%} of a step",
        lede=f"{what[0].upper()}{what[1:]}. {text.counted(shape.ranks, 'rank')}, "
        f"{text.counted(shape.stages, 'stage')}, {text.counted(shape.micro_batches, 'micro-batch')}.",
        findings=[],
        pictures=pictures,
        kinds=shown_kinds(PASSES, pictures),
        numbered='class="inside' in "".join(pictures),
        headings=("rank", "stages", "works", "waits", "activations kept"),
        rows=_rows(shape, timeline),
        conditions=[
            ("bubble", f"{timeline.bubble:.1%} of the work of a rank"),
            *formula,
            ("length of a step", f"{timeline.length:g}"),
            ("software", f"gradwire {VERSION}"),
        ],
    )


def _blocks(shape: ScheduleShape, timeline: WorkTimeline, rank: int) -> list[DrawnBlock]:
    def short(work: StageWork) -> str:
        return f"{work.stage}.{work.micro_batch}" if shape.parts > 1 else f"{work.micro_batch}"

    return list(pass_blocks(timeline, rank, 1.0, lambda work: f" in stage {work.stage}", short))


def _rows(shape: ScheduleShape, timeline: WorkTimeline) -> list[tuple[str, list[str]]]:
    """The table of ranks."""
    rows: list[tuple[str, list[str]]] = []
    for rank, (busy, kept) in enumerate(zip(timeline.busy, timeline.kept, strict=True)):
        stages = ", ".join(map(str, shape.stages_of(rank)))
        rows.append(("", [f"{rank}", stages, f"{busy:g}", f"{timeline.length - busy:g}", f"{kept}"]))
    return rows
