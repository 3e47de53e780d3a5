"""The page of a run that goes on: its course, what a step is spent on, and a table of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from gradwire.report import text
from gradwire.report.axes import NARROW, WIDE
from gradwire.report.bars import Bar, bar_svg
from gradwire.report.charts import LineChart, Point, Series
from gradwire.report.svg import WIDTHS
from gradwire.report.template import rendered
from gradwire.watch import words
from gradwire.watch.view import LAST, PARTS, RankView, RunView

MOST_DRAWN = 16
"""Ranks that bars are drawn of: those that the others wait for most."""

HEADINGS = ("rank", "host", "steps", "ms a step", *PARTS, "others wait", "sent a step", "ratio", "residual", "now")


def page(view: RunView, token: str) -> str:
    """Return the page, which asks for `body` every second.

    Args:
        view: of the run.
        token: that its requests need.
    """
    return rendered("watch.html", token=token, **_parts(view))


def body(view: RunView) -> str:
    """Return what the page shows, as HTML; whatever ranks have told is escaped."""
    return rendered("watch_body.html", **_parts(view))


@cache
def file_of_page(name: str) -> bytes:
    """Return `style.css`, `script.js` or `watch.js`."""
    return resources.files("gradwire.report").joinpath(name).read_bytes()


def _parts(view: RunView) -> dict[str, object]:
    has_steps = any(rank.step_ms for rank in view.ranks)
    drawn = sorted(sorted(view.ranks, key=lambda rank: -rank.caused_ms)[:MOST_DRAWN], key=lambda rank: rank.rank)
    bars = [Bar(f"rank {rank.rank}", rank.parts_ms) for rank in drawn]
    some = f"Shown are {len(drawn)} of {len(view.ranks)} ranks, those that the others wait for most."
    return {
        "headline": words.headline(view),
        "lede": lede(view),
        "findings": list(words.findings(view)),
        "charts": _charts(view),
        "bars": tuple(bar_svg("What a step was spent on", bars, None, width=w) for w in WIDTHS) if has_steps else (),
        "parts": [(part, part) for part in PARTS],
        "counted": text.counted(min(LAST, view.steps), "step"),
        "shown": some if len(drawn) < len(view.ranks) else "",
        "headings": HEADINGS,
        "rows": [("", cells(rank)) for rank in view.ranks],
    }


def lede(view: RunView) -> str:
    """Ranks and method, and the last figures."""
    who = f"{text.counted(view.world_size, 'rank')}, {', '.join(view.methods)}"
    figures = words.figures(view)
    return f"{who}. {figures[:1].upper()}{figures[1:]}." if figures else f"{who}."


def _charts(view: RunView) -> list[tuple[str, tuple[str, str]]]:
    courses = [(name, course, False) for name, course in view.scalars.items()]
    courses.append(("Milliseconds a step", view.step_ms, True))
    courses.append(("Residual: norm of what a rank owes, the largest", view.residual, True))
    return [(title, _chart(title, course, from_zero)) for title, course, from_zero in courses if course]


def _chart(title: str, course: Sequence[tuple[int, float]], from_zero: bool) -> tuple[str, str]:
    line = Series("", "tone0", [Point(index, value, value, value) for index, value in course])
    chart = LineChart(title, [line], "steps", "steps", nothing="No value was finite.", from_zero=from_zero)
    return chart.svg(WIDE), chart.svg(NARROW)


def cells(rank: RankView) -> list[str]:
    """A rank's figures, in the order of `HEADINGS`."""
    times = [rank.step_ms, *(rank.parts_ms[part] for part in PARTS), rank.caused_ms]
    residual = text.NOTHING if rank.residual_norm is None else words.shown(rank.residual_norm)
    written = [text.milliseconds(time_ms) for time_ms in times] if rank.step_ms else [text.NOTHING] * len(times)
    sent = text.si_bytes(rank.sent_bytes) if rank.step_ms else text.NOTHING
    rest = [sent, text.times(rank.ratio), residual, words.now(rank)]
    return [f"rank {rank.rank}", rank.host, f"{rank.steps:,}", *written, *rest]
