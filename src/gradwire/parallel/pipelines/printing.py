"""A schedule as text: one line a rank, one column a unit of time."""

from __future__ import annotations

from gradwire.core.errors import SpecError
from gradwire.parallel.pipelines.timeline import WorkTimeline

MOST_COLUMNS = 400


def printed(timeline: WorkTimeline, unit: float = 1.0) -> str:
    """Return what each rank does in each unit of time.

    F, B, I and W are a forward pass, a backward pass, and the gradients of inputs and of weights alone, with the number
    of the micro-batch; where a rank has several stages, the stage stands before. A pass that takes longer than a unit
    goes on as dashes, and a rank that waits has a dot.

    Args:
        timeline: computed or measured.
        unit: of time, in that of the timeline.

    Raises:
        SpecError: a unit that would give more than 400 columns, or is not positive.

    >>> from gradwire.parallel.pipelines import ScheduleShape, computed_timeline
    >>> print(printed(computed_timeline(ScheduleShape("1F1B", 2, 2).order)))
    rank 0  F0 F1 .  .  B0 -- .  B1 --
    rank 1  .  F0 B0 -- F1 B1 -- .  .
    """
    if unit <= 0 or timeline.length / unit > MOST_COLUMNS:
        raise SpecError(f"a unit of {unit:g} for a step of {timeline.length:g}: take one that gives 1 to 400 columns")
    several = any(len({span.work.stage for span in rank}) > 1 for rank in timeline.ranks)
    columns = max(1, round(timeline.length / unit))
    rows: list[list[str]] = []
    for rank in timeline.ranks:
        row = ["."] * columns
        for work, began, ended in rank:
            start, stop = (round((at - timeline.began) / unit) for at in (began, ended))
            for column in range(start, min(stop, columns)):
                row[column] = "--" if column > start else f"{work.stage}{work}" if several else str(work)
        rows.append(row)
    width = max(len(cell) for row in rows for cell in row)
    names = [f"rank {rank}" for rank in range(len(rows))]
    longest = max(map(len, names))
    lines = (
        "  ".join((name.ljust(longest), " ".join(cell.ljust(width) for cell in row)))
        for name, row in zip(names, rows, strict=True)
    )
    return "\n".join(line.rstrip() for line in lines)
