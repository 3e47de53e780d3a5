"""docs/building/quality.md's table and docs/building/quality.svg, from a result file of `quality.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.report.charts import Scale, label, tag
from gradwire.report.text import NOTHING, significant

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- table of quality.py -->\n", "<!-- end of the table -->\n"
GROWS = 1.1
"""A residual grows where it ends so many times larger than it was half way."""


def write_page(found: Mapping[str, Any], name: str) -> None:
    """Replace the table between the page's marks, and draw the plot."""
    page = DOCS / "building" / "quality.md"
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(found, name)}\n{END}{after}")
    (DOCS / "building" / "quality.svg").write_text(plot(found))


# ------------------------------------------------------------------------------------------------- table


def table(found: Mapping[str, Any], name: str) -> str:
    """One row a method; where a cell has three figures they are early, middle and late."""
    tasks = found["tasks"]
    head = ["method", "bits", "cosine"]
    head += [f"{what}, {task}" for what in ("error", "contraction", "residual") for task in tasks]
    lines = [" | ".join(head), " | ".join(["---"] + ["--:"] * (len(head) - 1))]
    for spec in next(iter(tasks.values()))["methods"]:
        rows = [part["methods"][spec] for part in tasks.values()]
        cells = [f"`{spec}`", bits(rows), " ".join(f"{row['middle']['cosine']:.2f}" for row in rows)]
        cells += [errors(row) for row in rows] + [bound(row) for row in rows] + [residual(row) for row in rows]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + f"\n\nFigures: `benchmarks/results/{name}`.\n"


def stages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The figures of a method early, in the middle and late."""
    return [row[stage] for stage in ("early", "middle", "late")]


def bits(rows: Sequence[Mapping[str, Any]]) -> str:
    """Once, where the tasks agree."""
    return " ".join(dict.fromkeys(significant(row["middle"]["bits"], 3) for row in rows))


def errors(row: Mapping[str, Any]) -> str:
    """Relative errors."""
    return " ".join(significant(stage["error"], 2) for stage in stages(row))


def bound(row: Mapping[str, Any]) -> str:
    """The worst stage against what is declared of it; an unbiased codec declares a variance."""
    worst = min(stages(row), key=lambda stage: stage["contraction"])
    if worst["omega"] is not None:
        return f"ω {significant(1 - worst['contraction'], 2)} ≤ {significant(worst['omega'], 2)}"
    measured = share(worst["contraction"])
    return measured if worst["declared"] is None else f"{measured} ≥ {share(worst['declared'])}"


def share(value: float) -> str:
    """A contraction: near 1 what is missing counts.

    >>> share(0.4023), share(0.00002441), share(0.99985), share(1.0)
    ('0.40', '0.000024', '1 - 0.00015', '1')
    """
    if value < 0.995:
        return significant(value, 2)
    return "1" if value > 1 - 5e-8 else f"1 - {significant(1 - value, 2)}"


def residual(row: Mapping[str, Any]) -> str:
    """Over the gradient's norm, checkpoint by checkpoint; in bold where it grows to the end."""
    if row["residual"] is None:
        return NOTHING
    shown = " ".join(significant(value, 2) for value in row["residual"]["ratio"].values())
    return f"**{shown}**" if grows(row["residual"]["ratio"]) else shown


def grows(ratio: Mapping[str, float]) -> bool:
    """Whether the last checkpoint is well above the one before."""
    *_, before, last = ratio.values()
    return last > GROWS * before


# -------------------------------------------------------------------------------------------------- plot

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 1080, 640, 46, 16, 34, 44
LETTER, LINE = 6.3, 13.0
ERRORS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
BITS = (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 16, 32)
SOME = 0.999
"""Error above which nothing arrives: that few bits do it is no feat."""
STYLE = """
svg { background: #fcfcfa; font: 11.5px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1c1f23; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .tick, .axis { fill: #5d646d; } .head { font-size: 15px; }
.grid { stroke: #e3e4e0; } .base { stroke: #9aa1a9; } .lead { stroke: #b9bec4; stroke-width: .8; }
.front { fill: none; stroke: #0072b2; stroke-opacity: .35; stroke-width: 1.5; }
.fed { fill: #0072b2; } .bare { fill: #fcfcfa; stroke: #d55e00; stroke-width: 1.8; }
"""


class Spot(NamedTuple):
    """A method in the plot, in pixels."""

    spec: str
    x: float
    y: float
    fed: bool


class Place(NamedTuple):
    """Where a label stands."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Place) -> float:
        """Area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)


def plot(found: Mapping[str, Any]) -> str:
    """Bits against error, a panel a task, a labelled point a method."""
    tasks = found["tasks"]
    height = PANEL * len(tasks)
    rows = [row["middle"] for part in tasks.values() for row in part["methods"].values()]
    widest, largest = max(row["bits"] for row in rows), max(row["error"] for row in rows)
    least = min(row["bits"] for row in rows if row["bits"])
    body = [tag("style", STYLE), tag("title", "Bits an element against relative error of every method")]
    for i, (task, part) in enumerate(tasks.items()):
        x = Scale(0.9 * least, 1.15 * widest, LEFT, WIDTH - RIGHT, log=True)
        y = Scale(0.0, 1.03 * largest**0.5, PANEL * (i + 1) - BOTTOM, PANEL * i + TOP)
        body += panel(f"{task}, in the middle of training", part["methods"], x, y)
    return tag("svg", "\n".join(body), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", role="img")


def panel(title: str, methods: Mapping[str, Any], x: Scale, y: Scale) -> Iterator[str]:
    """Axes, the frontier, points and names."""
    yield label(title, x.start, y.end - 14, class_="head")
    note = "filled: with error feedback; the line joins what no other method beats in both"
    yield label(note, x.end, y.end - 14, class_="axis end")
    for value in (v for v in ERRORS if v**0.5 <= y.high):
        at = y(value**0.5)
        yield tag("line", class_="grid" if value else "base", x1=x.start, x2=x.end, y1=at, y2=at)
        yield label(f"{value:g}", x.start - 6, at + 4, class_="tick end")
    for value in (v for v in BITS if x.low <= v <= x.high):
        yield tag("line", class_="grid", x1=x(value), x2=x(value), y1=y.start, y2=y.end)
        yield label(f"{value:g}", x(value), y.start + 16, class_="tick middle")
    yield label("bits an element, as sent", (x.start + x.end) / 2, y.start + 34, class_="axis middle")
    spots = [
        Spot(spec, x(row["middle"]["bits"]), y(row["middle"]["error"] ** 0.5), row["residual"] is not None)
        for spec, row in methods.items()
    ]
    some = [spot for spot in spots if methods[spot.spec]["middle"]["error"] < SOME]
    path = " ".join(f"{spot.x:.1f},{spot.y:.1f}" for spot in frontier(some))
    yield tag("polyline", class_="front", points=path)
    places = arrange(spots, Place(x.start + 2, y.end, x.end, y.start - 2))
    for spot, place in zip(spots, places, strict=True):
        end = nearest(spot, place)
        if math.dist(end, (spot.x, spot.y)) > 9:
            yield tag("line", class_="lead", x1=spot.x, y1=spot.y, x2=end[0], y2=end[1])
    for spot, place in zip(spots, places, strict=True):
        yield tag("circle", class_="fed" if spot.fed else "bare", cx=spot.x, cy=spot.y, r=3.6)
        yield label(spot.spec, place.left + 2, place.bottom - 3)


def frontier(spots: Sequence[Spot]) -> list[Spot]:
    """Those with less error than all that send no more, from few bits to many; y points down."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.x, -spot.y)):
        if not kept or spot.y > kept[-1].y:
            kept.append(spot)
    return kept


def arrange(spots: Sequence[Spot], frame: Place) -> list[Place]:
    """Put each name where it covers neither a point nor another name, as near to its point as can be.

    A greedy choice, gone over until nothing moves: each name in turn takes the cheapest of its places given the others.
    """
    options = [
        sorted(((alone(spot, place, spots), place) for place in candidates(spot, frame)), key=lambda option: option[0])
        for spot in spots
    ]
    places = [choices[0][1] for choices in options]
    for _ in range(12):
        before = list(places)
        for i, spot in enumerate(spots):
            places[i] = cheapest(spot, options[i], places[:i] + places[i + 1 :])
        if places == before:
            break
    return places


def candidates(spot: Spot, frame: Place) -> Iterator[Place]:
    """Places around a point."""
    wide, high = (LETTER * len(spot.spec) + 4) / 2, LINE / 2
    for radius, turn in itertools.product((5, 9, 14, 20, 28, 38, 50, 64, 80, 98, 118, 140), range(24)):
        angle = turn * math.pi / 12
        # the name's nearest edge lies at the radius: its centre is half its size further out
        x = spot.x + math.cos(angle) * (radius + wide)
        y = spot.y + math.sin(angle) * (radius + high)
        place = Place(x - wide, y - high, x + wide, y + high)
        if place.overlap(frame) >= 4 * wide * high - 1e-6:
            yield place


def alone(spot: Spot, place: Place, spots: Sequence[Spot]) -> float:
    """What a place costs whatever other names do: points that it covers or its line passes, and distance."""
    covered = sum(place.overlap(Place(s.x - 5, s.y - 5, s.x + 5, s.y + 5)) for s in spots)
    passed = sum(math.dist((s.x, s.y), p) < 4 for s in spots if s is not spot for p in way(spot, place))
    return 10 * covered + 60 * passed + math.dist(nearest(spot, place), (spot.x, spot.y))


def cheapest(spot: Spot, options: Sequence[tuple[float, Place]], others: Sequence[Place]) -> Place:
    """The best of a name's places, which stand in the order of what they cost alone, beside other names."""
    best, least = options[0][1], math.inf
    for cost, place in options:
        if cost >= least:
            break
        cost += 10 * sum(place.overlap(other) for other in others)
        cost += 40 * sum(o.left < x < o.right and o.top < y < o.bottom for x, y in way(spot, place) for o in others)
        if cost < least:
            best, least = place, cost
    return best


def way(spot: Spot, place: Place) -> list[tuple[float, float]]:
    """Points along the line from a spot to its name."""
    end = nearest(spot, place)
    return [(spot.x + t / 12 * (end[0] - spot.x), spot.y + t / 12 * (end[1] - spot.y)) for t in range(1, 12)]


def nearest(spot: Spot, place: Place) -> tuple[float, float]:
    """The point of a name that is nearest to its spot."""
    return min(max(spot.x, place.left), place.right), min(max(spot.y, place.top + 2), place.bottom - 2)
