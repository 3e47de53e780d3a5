"""Charts: labels that tell values apart and stand clear of each other, and curves that stay inside."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comparisons import comparison, run
from gradwire.report.axes import NARROW, WIDE, DrawingSize, Scale, byte_labels, number_labels
from gradwire.report.bars import Bar, bar_svg
from gradwire.report.charts import LineChart, Point, Series, stretches
from gradwire.report.page import render
from gradwire.report.room import LEADER, Room
from gradwire.report.svg import LABEL_GAP, LETTER, Box

NAMES = ("torch.fp32", "torch.fp16", "int4", "topk:0.05+int8", "powersgd:8,factors=fp16", "sign:64")


class Texts(HTMLParser):
    """The boxes of all texts of a drawing, by their class."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: list[tuple[str, str, Box]] = []
        self._open: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = dict(attrs) if tag == "text" else None

    def handle_data(self, data: str) -> None:
        if self._open is None:
            return
        classes = self._open.get("class") or ""
        width = LETTER * len(data)
        shift = width if "end" in classes.split() else width / 2 if "middle" in classes.split() else 0.0
        left, base = float(self._open["x"] or 0), float(self._open["y"] or 0)
        self.boxes.append((classes, data, Box(left - shift, base - 11, width)))
        self._open = None


def texts(svg: str) -> list[tuple[str, str, Box]]:
    parser = Texts()
    parser.feed(svg)
    return parser.boxes


def clash(one: Box, other: Box) -> bool:
    beside = one.left + one.width <= other.left or other.left + other.width <= one.left
    return not beside and abs(one.top - other.top) < 11


def chart(
    ends: list[tuple[float, float]], target: float | None = None, unit: str = "s", top: float | None = None
) -> LineChart:
    series = [
        Series(NAMES[i % len(NAMES)] + "x" * (i // len(NAMES)), "tone0", [Point(1, 5.5, 5.5, 5.5), Point(x, y, y, y)])
        for i, (x, y) in enumerate(ends)
    ]
    return LineChart("losses", series, unit, "seconds", target, top)


# --------------------------------------------------------------------------------------------- labels

values = st.floats(-1e7, 1e7, allow_subnormal=False)


@given(values, st.floats(1e-4, 1e7))
def test_no_two_marks_of_an_axis_are_written_alike_and_each_is_what_it_says(low: float, height: float):
    axis = Scale(low, low + height, 0, 100)
    ticks = axis.ticks(5)
    labels = number_labels(ticks)
    assert len(set(labels)) == len(labels)
    for value, shown in zip(ticks, labels, strict=True):
        assert float(shown.replace(",", "")) == pytest.approx(value, abs=height / 100)
    assert 2 <= len(ticks) <= 12


def test_losses_near_each_other_are_told_apart():
    assert number_labels(Scale(2.34, 2.44, 0, 100).ticks(5)) == ["2.34", "2.36", "2.38", "2.40", "2.42", "2.44"]


@given(st.floats(1, 1e12), st.floats(1.01, 1e12))
def test_no_two_marks_of_bytes_are_written_alike(low: float, factor: float):
    ticks = Scale(low, low * factor, 0, 100, log=True).ticks(6)
    labels = byte_labels(ticks)
    assert len(set(labels)) == len(labels)
    assert 1 < len(ticks) <= 12


ends = st.lists(st.tuples(st.floats(2, 1e6), st.floats(0.01, 10)), min_size=1, max_size=8)


@given(
    ends, st.one_of(st.none(), st.floats(0.01, 10)), st.sampled_from([WIDE, NARROW]), st.sampled_from(["s", "bytes"])
)
def test_labels_do_not_overlap_and_stay_inside(
    found: list[tuple[float, float]], target: float | None, frame: DrawingSize, unit: str
):
    boxes = texts(chart(found, target, unit).svg(frame))
    for (_, one, a), (_, other, b) in itertools.combinations(boxes, 2):
        assert not clash(a, b), (one, other)
    for classes, shown, box in boxes:
        assert 0 <= box.top <= frame.height - 5, shown
        assert "axis" in classes or (box.left >= -1 and box.left + box.width <= frame.width + 1), shown


def on_a_line(svg: str) -> list[str]:
    """Names and notes that a curve or the target's line runs through, as seen at every pixel or so."""
    lines = [stretch.split() for stretch in re.findall(r'<polyline class="line" points="([^"]*)"', svg)]
    curves = [[(float(x), float(y)) for x, y in (spot.split(",") for spot in line)] for line in lines]
    for x1, x2, y1, y2 in re.findall(r'<line class="target" x1="(.*?)" x2="(.*?)" y1="(.*?)" y2="(.*?)"/>', svg):
        curves.append([(float(x1), float(y1)), (float(x2), float(y2))])
    spots = [
        (a[0] + (b[0] - a[0]) * i / 600, a[1] + (b[1] - a[1]) * i / 600)
        for curve in curves
        for a, b in itertools.pairwise(curve)
        for i in range(601)
    ]
    top, bottom = WIDE.top, 10_000
    return [
        shown
        for classes, shown, box in texts(svg)
        if {"name", "note"} & set(classes.split())
        and any(
            box.left < x < box.left + box.width and box.top + 2 < y < box.top + 13 and top <= y <= bottom
            for x, y in spots
        )
    ]


@given(
    ends, st.one_of(st.none(), st.floats(0.01, 10)), st.sampled_from([WIDE, NARROW]), st.sampled_from(["s", "bytes"])
)
def test_labels_do_not_stand_on_curves_nor_on_the_target(
    found: list[tuple[float, float]], target: float | None, frame: DrawingSize, unit: str
):
    assert on_a_line(chart(found, target, unit).svg(frame)) == []


def test_curves_that_end_together_at_the_target_are_all_named():
    """Six methods that come near the target, as they do in most comparisons."""
    series = [
        Series(name, "tone0", [Point(x, y, y, y) for x in range(1, 60 + 20 * i) for y in [0.24 + 2 * 0.94**x]])
        for i, name in enumerate(NAMES)
    ]
    for frame, unit in itertools.product((WIDE, NARROW), ("s", "bytes")):
        svg = LineChart("losses", series, unit, "seconds", 0.3).svg(frame)
        assert on_a_line(svg) == []
        assert sum("name" in classes for classes, _, _ in texts(svg)) == len(NAMES)
        assert "target 0.300" in svg


def test_a_label_goes_where_there_is_room_or_nowhere():
    room = Room(0, 0, 60, 75)
    room.take_line([(0, 20), (60, 20)])
    placed = room.place(Box(0, 14, 50), named=(5, 20))
    assert placed is not None
    assert 20 < placed.box.top <= 30
    assert placed.leader is None
    other = room.place(Box(0, 14, 50), named=(5, 20))
    assert other is not None
    assert not other.box.overlaps(placed.box)
    assert room.place(Box(0, 0, 61)) is None
    assert [room.place(Box(0, 30, 50)) for _ in range(5)][-1] is None


def test_lines_that_leave_the_plot_are_followed_inside_it_alone():
    room = Room(0, 0, 200, 100)
    room.take_line([(0, 50), (100, -1e30), (200, -1e30)])
    room.take_line([(0, -5), (200, -5)])
    placed = room.place(Box(100, 2, 50))
    assert placed is not None
    assert placed.box == Box(100, 2, 50)


def test_a_label_far_from_what_it_names_is_joined_to_it_by_a_line():
    room = Room(0, 0, 200, 200)
    for height in range(0, 60, 4):
        room.take_line([(0, height), (200, height)])
    placed = room.place(Box(10, 10, 50), named=(20, 10))
    assert placed is not None
    assert placed.leader is not None
    start, end = placed.leader
    assert start == (20, 10)
    assert math.dist(start, end) > LEADER
    assert end[1] == placed.box.top
    assert LABEL_GAP < placed.box.top < 80


def test_many_bars_with_long_names_keep_to_their_frame():
    long = {"compute": 3.0, "encode": 1.0, "wait": 1e6}
    bars = [Bar("topk:0.05+int8,exchange=twoshot,residual=bf16,ef=ef21", long), Bar("int4", {**long, "wait": 2.0})]
    for width in (1096, 350):
        for _, shown, box in texts(bar_svg("steps", bars, 4.0, width=width)):
            assert box.left >= -1, shown
            assert box.left + box.width <= width + 1, shown
    assert "ef=ef21" in bar_svg("steps", bars, None, width=350)


# --------------------------------------------------------------------------------------------- curves


def places(svg: str) -> list[tuple[float, float]]:
    lines = re.findall(r'<polyline class="line" points="([^"]*)"', svg)
    return [(float(x), float(y)) for line in lines for x, y in (point.split(",") for point in line.split())]


def test_a_loss_that_is_not_finite_cuts_the_line():
    line = [Point(float(x), y, y, y) for x, y in enumerate([3.0, 2.0, math.nan, 1.0, math.inf])]
    assert [[point.x for point in stretch] for stretch in stretches(line)] == [[0.0, 1.0], [3.0]]
    svg = LineChart("losses", [Series("int4", "tone0", line)], "s", "seconds").svg(WIDE)
    assert svg.count("<polyline") == 2
    assert "nan" not in svg.lower()
    assert "inf" not in svg.replace("infinite", "").lower()


@pytest.mark.parametrize(
    "losses", [(2.30, 2.31, 2.33, 2.29), (4, 3, 2, 1), (1e-9, 2e-9, 1e-9, 1e-9), (1e30, 1e29, 1e30, 1e28)]
)
def test_curves_stay_inside(losses: tuple[float, ...]):
    base = tuple(loss for loss in losses for _ in range(10))
    svg = re.findall(r"<svg.*?</svg>", render(comparison(run("torch.fp32", losses=base), run("int4", losses=base))))
    wide = next(drawing for drawing in svg if 'class="chart"' in drawing)
    inside = [WIDE.top <= y <= WIDE.height - WIDE.bottom for _, y in places(wide)[2:]]
    assert len(inside) > 70
    assert all(inside)


def test_a_run_that_diverges_does_not_flatten_the_others():
    good = tuple(4.0 - 0.1 * step for step in range(31))
    bad = (*good[:10], *(10.0**power for power in range(21)))
    page = render(comparison(run("torch.fp32", losses=good), run("sign", losses=bad)))
    wide = next(drawing for drawing in re.findall(r"<svg.*?</svg>", page) if 'class="chart"' in drawing)
    line = re.findall(r'<polyline class="line" points="([^"]*)"', wide)[0].split()
    heights = [float(point.split(",")[1]) for point in line]
    assert max(heights) - min(heights) > 20
    assert "clip-path" in wide


def test_where_nothing_was_sent_a_sentence_stands():
    page = render(comparison(run("torch.fp32", sent=0.0), run("int4", sent=0.0), hosts=1))
    assert "Nothing was sent." in page
    assert "There is one host" in page


def test_a_report_of_no_runs_at_all_can_be_written():
    assert "No conclusion" in render(comparison())
