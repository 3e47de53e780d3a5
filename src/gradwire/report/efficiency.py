"""The section of a comparison's report on how efficiently methods communicate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradwire.compare.crossover import measured_rate
from gradwire.compare.efficiency import Efficiency, RateCurve, efficiencies, rate_curves
from gradwire.compare.figures import Row
from gradwire.compare.results import FP32, Comparison
from gradwire.compare.verdict import FARTHEST, Verdict
from gradwire.core.figures import si_bits_per_s
from gradwire.report import text
from gradwire.report.axes import NARROW, DrawingSize
from gradwire.report.charts import LineChart, Mark, Point, Series

BROAD = DrawingSize(1096, 420, left=34, right=44)
HEADINGS = (
    "method", "ratio", "coding, of a step", "exposed, of a step", "both", "vs fp32", "vs 16 bit", "samples a second",
    "samples a joule", "pays below",
)  # fmt: skip


class EfficiencySection(NamedTuple):
    """What the page shows.

    Attributes:
        headings, rows: of the table.
        curves: time to the target against bandwidth, in two widths; None where no conclusion is carried.
        note: what the figures are.
    """

    headings: Sequence[str]
    rows: list[tuple[str, list[str]]]
    curves: tuple[str, str] | None
    note: str


def efficiency_section(
    comparison: Comparison, rows: Sequence[Row], verdict: Verdict, tones: Mapping[str, str]
) -> EfficiencySection:
    """Return the table, the picture and the note of the section.

    Args:
        comparison: what was measured.
        rows: its figures, as `summarise` gives them.
        verdict: what may be concluded; no speed-up is shown that it forbids.
        tones: the colour of each method.
    """
    found = efficiencies(comparison, rows)
    curves = [] if verdict.unsound else [c for c in rate_curves(comparison) if verdict.why_not(c.method) is None]
    return EfficiencySection(
        HEADINGS,
        [(each.row.label, [each.row.method, *_cells(each, verdict)]) for each in found],
        _picture(curves, tones) if len(curves) > 1 else None,
        _note(comparison, found, curves),
    )


def _cells(found: Efficiency, verdict: Verdict) -> list[str]:
    row = found.row
    sound = row.loss is not None and verdict.unsound is None
    gains = (row.speed_up, row.speed_up_16bit) if sound else (None, None)
    why_not = verdict.why_not(row.method) if sound else None
    return [
        text.times(row.ratio),
        *(text.percent(100 * share) for share in (found.coding, found.exposed, found.overhead)),
        *(text.speed_up(gain, why_not) for gain in gains),
        text.NOTHING if found.samples_per_s is None else text.significant(found.samples_per_s, 3),
        text.NOTHING if found.samples_per_j is None else text.significant(found.samples_per_j, 3),
        _rate(found.pays_below) if sound and why_not is None else text.NOTHING,
    ]


def _rate(value: float | None) -> str:
    if value is None:
        return text.NOTHING
    return "any rate" if math.isinf(value) else si_bits_per_s(value)


def _picture(curves: Sequence[RateCurve], tones: Mapping[str, str]) -> tuple[str, str]:
    chart = LineChart(
        title="Time to the target against bandwidth",
        series=[
            Series(
                curve.method,
                tones[curve.method],
                [Point(at.rate, at.seconds, *[at.seconds] * 2) for at in curve.points],
            )
            for curve in curves
        ],
        unit="bit/s",
        x_title="rate of each host's link; seconds to the target, both on log scales",
        log_y=True,
        marks=[
            Mark(curve.method, curve.crossing.rate, curve.crossing.seconds, si_bits_per_s(curve.crossing.rate))
            for curve in curves
            if curve.crossing is not None
        ],
    )
    return chart.svg(BROAD), chart.svg(NARROW)


def _note(comparison: Comparison, found: Sequence[Efficiency], curves: Sequence[RateCurve]) -> str:
    """What the columns and the picture are, and what the machine does not tell."""
    said = [
        "Coding and exposed communication are shares of a step: what the backward pass did not hide. Samples "
        "are those of all ranks."
    ]
    told = [each for each in found if each.samples_per_j is not None]
    if told:
        said.append("Joules are those of the whole machine's processors and memory, whatever else runs on it.")
    else:
        said.append(
            "No samples a joule: this machine does not tell its power, or only to root (/sys/class/powercap), or the "
            "results are older than the count."
        )
    rate = measured_rate(comparison)
    if len(curves) > 1 and rate is not None:
        said.append(
            f"Dots mark where a method crosses {FP32}: it pays below that rate. All was measured at "
            f"{si_bits_per_s(rate)}; elsewhere the time of the bytes alone changes (docs/results.md compares that with "
            f"runs at two rates, {FARTHEST:g} times apart). Farther away the curves are a guess."
        )
    return " ".join(said)
