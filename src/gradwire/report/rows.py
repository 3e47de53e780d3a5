"""Rows against time: what each rank or stage does when, with its name before it and an axis below."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gradwire.parallel.pipelines.orders import StageWork
from gradwire.parallel.pipelines.timeline import WorkTimeline
from gradwire.report.axes import Scale
from gradwire.report.bars import MOST_LEFT, across
from gradwire.report.svg import label, shortened, tag, width_of

BLOCK_PITCH, BLOCK_HEIGHT = 28, 20
NARROWEST = 5.0
"""Pixels that a pass needs to be drawn by itself. Narrower ones that follow each other are drawn as one."""

PASSES = {
    "forward": "forward",
    "backward": "backward",
    "inputs": "gradients of inputs",
    "weights": "gradients of weights",
    "both": "passes in turn",
}
"""Classes of the style sheet for passes, and what they are called."""

KINDS = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
_WORDS = {"F": "forward pass", "B": "backward pass", "I": "gradients of inputs", "W": "gradients of weights"}


class DrawnBlock(NamedTuple):
    """What a row is busy with for a while.

    Attributes:
        kind: the class of its colour.
        began, ended: in the unit of the picture.
        said: of it, where the mouse rests.
        short: written on it, where there is room.
    """

    kind: str
    began: float
    ended: float
    said: str
    short: str = ""


def rows_svg(
    title: str,
    names: Sequence[str],
    draw: Callable[[str, Scale, float], Iterable[str]],
    what: str,
    *,
    end: float,
    pitch: float,
    width: int,
) -> str:
    """Draw rows from time zero to the end.

    Args:
        title: of the picture.
        names: of the rows, from the top.
        draw: gives what stands in the row of a name, by the scale of time and the pixel of the row's middle.
        what: the axis has.
        end: of time; 0 where nothing is drawn.
        pitch: of the rows, in pixels.
        width: in pixels.
    """
    top, bottom = 8, 38
    height = top + pitch * len(names) + bottom
    left = 14 + max((width_of(name) for name in names), default=0.0)
    x = Scale(0.0, end or 1.0, min(left, MOST_LEFT * width), width - 14)
    body = [tag("title", html.escape(title)), *across(x, what, width, top, height - bottom)]
    for place, name in enumerate(names):
        middle = top + pitch * (place + 0.5)
        body.append(label(shortened(name, x.start - 10), x.start - 10, middle + 4, class_="name end"))
        body += draw(name, x, middle)
    return tag("svg", "".join(body), class_="timeline", viewBox=f"0 0 {width} {height}", role="img")


def blocks_svg(
    title: str, rows: Mapping[str, Sequence[DrawnBlock]], what: str, spoken: Callable[[float], str], *, width: int
) -> str:
    """Draw rows of blocks.

    Args:
        title: of the picture.
        rows: the blocks of each, in their order, by its name.
        what: the axis has.
        spoken: writes a length of time.
        width: in pixels.
    """
    end = max((block.ended for blocks in rows.values() for block in blocks), default=0.0)

    def draw(name: str, x: Scale, middle: float) -> Iterator[str]:
        for run in _runs(rows[name], x):
            yield from _rect(name, run, spoken, x, middle)

    return rows_svg(title, list(rows), draw, what, end=end, pitch=BLOCK_PITCH, width=width)


def pass_blocks(
    timeline: WorkTimeline,
    rank: int,
    scale: float,
    place: Callable[[StageWork], str],
    short: Callable[[StageWork], str],
) -> Iterator[DrawnBlock]:
    """The passes of a rank as blocks.

    Args:
        timeline: of all ranks.
        rank: whose passes.
        scale: units of the picture in one of the timeline.
        place: where a pass is, added to what is said of it.
        short: what is written on it.
    """
    for work, *times in timeline.ranks[rank]:
        began, ended = (scale * (at - timeline.began) for at in times)
        said = f"{_WORDS[work.kind]} of micro-batch {work.micro_batch}{place(work)}"
        yield DrawnBlock(KINDS[work.kind], began, ended, said, short(work))


def shown_kinds(names: Mapping[str, str], pictures: Iterable[str]) -> list[tuple[str, str]]:
    """Those classes that some picture has, each with what it is called, for the key of the pictures."""
    drawn = "".join(pictures)
    return [(kind, said) for kind, said in names.items() if f'class="{kind}"' in drawn]


def drawn_rows(count: int, most: int) -> Sequence[int]:
    """Which rows to draw where there are too many: the first, the last, and others evenly between them.

    >>> list(drawn_rows(16, 4))
    [0, 5, 10, 15]
    """
    if count <= most:
        return range(count)
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _runs(blocks: Iterable[DrawnBlock], x: Scale) -> Iterator[list[DrawnBlock]]:
    """Blocks that are drawn together: narrow passes without a wait that could be seen between them."""
    run: list[DrawnBlock] = []
    for block in blocks:
        narrow = block.kind in PASSES and x(block.ended) - x(block.began) < NARROWEST
        if run and not (narrow and x(block.began) - x(run[-1].ended) < NARROWEST / 6):
            yield run
            run = []
        run.append(block)
        if not narrow:
            yield run
            run = []
    if run:
        yield run


def _rect(
    name: str, run: Sequence[DrawnBlock], spoken: Callable[[float], str], x: Scale, middle: float
) -> Iterator[str]:
    (first, last), kinds = (run[0], run[-1]), {block.kind for block in run}
    start, width = x(first.began), max(0.5, x(last.ended) - x(first.began))
    said = first.said if len(run) == 1 else f"{len(run)} passes"
    tip = tag("title", html.escape(f"{name}: {said}, {spoken(last.ended - first.began)}"))
    kind = kinds.pop() if len(kinds) == 1 else "both"
    gap = 0.6 if width >= NARROWEST and first.short else 0.0  # so that equal passes can be told apart
    y = middle - BLOCK_HEIGHT / 2
    yield tag("rect", tip, class_=kind, x=start, y=y, width=width - gap, height=BLOCK_HEIGHT)
    if len(run) == 1 and first.short and width_of(first.short) < width:
        yield label(first.short, start + width / 2, middle + 4, class_="inside middle")
