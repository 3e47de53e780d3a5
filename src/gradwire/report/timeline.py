"""One step of several ranks against time: the training loop, coding, and collectives under way."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from gradwire.drivers.traced import Span
from gradwire.profiling.records import StepRecord
from gradwire.report.axes import Scale
from gradwire.report.bars import MOST_LEFT, across
from gradwire.report.svg import label, shortened, tag, width_of
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
    top, bottom = 8, 38
    height = top + ROW_PITCH * len(steps) + bottom
    origin_s = min((step.began_s for step in steps.values()), default=0.0)
    longest_ms = 1e3 * max((step.ended_s - origin_s for step in steps.values()), default=0.0) or 1.0
    left = 14 + max((width_of(name) for name in steps), default=0.0)
    x = Scale(0.0, longest_ms, min(left, MOST_LEFT * width), width - 14)
    body = [tag("title", html.escape(title)), *across(x, "milliseconds", width, top, height - bottom)]
    for place, (name, step) in enumerate(steps.items()):
        y = top + ROW_PITCH * place + (ROW_PITCH - LANES * LANE_PITCH) / 2
        body.append(label(shortened(name, x.start - 10), x.start - 10, y + 1.7 * LANE_PITCH, class_="name end"))
        body += _rects(name, step, x, y, origin_s)
    return tag("svg", "".join(body), class_="timeline", viewBox=f"0 0 {width} {height}", role="img")


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
