"""`gradwire schedule`: what the ranks of a pipeline do when, and how long they wait."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add
from gradwire.core.errors import SpecError

if TYPE_CHECKING:
    from gradwire.parallel.pipelines import ScheduleShape, WorkTimeline

OK = 0

SCHEDULE_HELP = """\
The schedules are those of torch.distributed.pipelining. F, B, I and W are a forward pass, a backward pass, and its two
halves: gradients of inputs and of weights. Times are in units of your choice. docs/pipelines.md tells more.

examples
  gradwire schedule --ranks 4 --micro-batches 8
  gradwire schedule --ranks 4 --micro-batches 8 --schedule Interleaved1F1B --message 0.5
  gradwire schedule --ranks 4 --micro-batches 8 --schedule all
  gradwire schedule --ranks 8 --micro-batches 16 --schedule ZBVZeroBubble --page schedule.html
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    schedule = add(
        commands,
        "schedule",
        help="when each rank of a pipeline works and waits, in a terminal or as a page",
        description="Print and draw a schedule of a pipeline, with the share of time in which its ranks wait.",
        epilog=SCHEDULE_HELP,
    )
    schedule.add_argument("--schedule", default="1F1B", metavar="NAME", help="of PyTorch's, or all (default: 1F1B)")
    schedule.add_argument("--ranks", type=int, default=4, metavar="N", help="of the pipeline (default: 4)")
    schedule.add_argument("--micro-batches", type=int, default=8, metavar="N", help="of a step (default: 8)")
    schedule.add_argument("--parts", type=int, default=0, metavar="N", help="stages a rank (default: the schedule's)")
    times = schedule.add_argument_group("what a pass through one stage takes with one micro-batch")
    times.add_argument("--forward", type=float, default=1.0, metavar="T", help="forward (default: 1)")
    times.add_argument("--inputs", type=float, default=1.0, metavar="T", help="gradients of inputs (default: 1)")
    times.add_argument("--weights", type=float, default=1.0, metavar="T", help="gradients of weights (default: 1)")
    times.add_argument("--message", type=float, default=0.0, metavar="T", help="to another rank (default: 0)")
    shown = schedule.add_argument_group("how to show it")
    shown.add_argument("--unit", type=float, default=1.0, metavar="T", help="time of a column (default: 1)")
    shown.add_argument("--page", type=Path, metavar="FILE", help="draw it as a page")
    shown.add_argument("--json", action="store_true", help="print what a program reads")
    schedule.set_defaults(run=run_schedule)


def run_schedule(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire schedule` and return its exit status.

    Raises:
        SpecError: numbers that the schedule cannot have.
    """
    from gradwire.parallel.pipelines import PassTimes, ScheduleShape, computed_timeline
    from gradwire.parallel.pipelines.printing import printed

    times = PassTimes(arguments.forward, arguments.inputs, arguments.weights, arguments.message)
    if arguments.schedule == "all":
        if arguments.page is not None:
            raise SpecError("--page draws one schedule: name it by --schedule")
        shapes, refused = _all(arguments)
    else:
        shape = ScheduleShape(arguments.schedule, arguments.ranks, arguments.micro_batches, arguments.parts)
        shapes, refused = [shape], []
    found = [(shape, computed_timeline(shape.order, times)) for shape in shapes]
    if arguments.json:
        print(json.dumps([_as_dict(shape, timeline) for shape, timeline in found], indent=1))
        return OK
    if arguments.schedule != "all":
        console.print(printed(found[0][1], arguments.unit), soft_wrap=True, highlight=False)
        console.print()
    console.print(_table(found))
    for why in refused:
        console.print(f"\nleft out: {why}", soft_wrap=True, highlight=False, markup=False)
    if arguments.page is not None:
        from gradwire.report.schedule import write_schedule_page

        write_schedule_page(found[0][0], found[0][1], arguments.page)
    return OK


def _all(arguments: argparse.Namespace) -> tuple[list[ScheduleShape], list[str]]:
    """Those schedules that these numbers allow, and why the others are refused.

    `--parts` is for schedules whose number of stages can be chosen.

    Raises:
        SpecError: numbers that no schedule allows, or parts that none has.
    """
    from gradwire.parallel.pipelines import SCHEDULES, ScheduleShape

    shapes: list[ScheduleShape] = []
    refused: list[SpecError] = []
    for name, kind in SCHEDULES.items():
        parts = 0 if kind.fixed else arguments.parts
        try:
            shapes.append(ScheduleShape(name, arguments.ranks, arguments.micro_batches, parts))
        except SpecError as error:
            refused.append(error)
    if not shapes:
        raise refused[0]
    return shapes, list(map(str, refused))


def _as_dict(shape: ScheduleShape, timeline: WorkTimeline) -> dict[str, object]:
    return {
        "schedule": shape.name,
        "runs_as": shape.runs_as,
        "ranks": shape.ranks,
        "micro_batches": shape.micro_batches,
        "stages": shape.stages,
        "length": timeline.length,
        "bubble": timeline.bubble,
        "formula": shape.formula,
        "idle": timeline.idle,
        "kept": timeline.kept,
        "work": [[[*span.work, span.began, span.ended] for span in rank] for rank in timeline.ranks],
    }


def _table(found: list[tuple[ScheduleShape, WorkTimeline]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages", "length", "bubble", "by formula", "ranks wait", "activations kept"):
        table.add_column(heading, justify="right")
    for shape, timeline in found:
        formula = "" if shape.formula is None else f"{shape.formula:.1%}"
        ran = shape.name if shape.runs_as == shape.name else f"{shape.name} (as {shape.runs_as})"
        kept = f"{min(timeline.kept)} to {max(timeline.kept)}"
        figures = (f"{timeline.length:g}", f"{timeline.bubble:.1%}", formula, f"{timeline.idle:.1%}", kept)
        table.add_row(ran, f"{shape.stages}", *figures)
    return table
