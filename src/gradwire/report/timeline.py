"""One step of several ranks against time: the training loop, coding, and collectives under way."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from gradwire.drivers.traced import Span
from gradwire.profiling.records import StepRecord
from gradwire.report.axes import Scale
from gradwire.report.rows import rows_svg
from gradwire.report.svg import tag
from gradwire.report.text import milliseconds

ROW_PITCH = 46
LANE_PITCH, LANE_HEIGHT = 12, 10
LANES = 3


def timeline_svg(title: str, steps: Mapping[str, StepRecord], *, width: int) -> str:
    """Draw a step of each rank.

    Args:
        title: of the picture.
        steps: by the name of their rank, on one clock.
        width: in pixels.
    """
    origin_s = min((step.began_s for step in steps.values()), default=0.0)
    end = 1e3 * max((step.ended_s - origin_s for step in steps.values()), default=0.0)

    def draw(name: str, x: Scale, middle: float) -> Iterator[str]:
        return _rects(name, steps[name], x, middle - LANES * LANE_PITCH / 2, origin_s)

    return rows_svg(title, list(steps), draw, "milliseconds", end=end, pitch=ROW_PITCH, width=width)


def _rects(name: str, step: StepRecord, x: Scale, y: float, origin_s: float) -> Iterator[str]:
    communication: Sequence[Span] = [span for spans in step.communication for span in spans]
    lanes = (
        [*((span.what, span) for span in step.loop), *(("wait", span) for span in step.waits)],
        [(span.kind, span) for span in communication if span.kind in ("encode", "decode")],
        [("wire", span) for span in communication if span.kind == "wire"],
    )
    for lane, drawn in enumerate(lanes):
        for kind, span in drawn:
            start, end = (x(1e3 * (at_s - origin_s)) for at_s in (span.began_s, span.ended_s))
            what = span.what if span.kind in ("train", "wire") else f"{span.kind} {span.what}"
            tip = tag("title", html.escape(f"{name}: {what}, {milliseconds(1e3 * span.length_s)} ms"))
            place = y + lane * LANE_PITCH
            yield tag("rect", tip, class_=kind, x=start, y=place, width=max(0.5, end - start), height=LANE_HEIGHT)
