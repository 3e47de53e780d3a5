"""What communication costs a run, and what a method saves of that: one row a method, and time by bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from gradwire.compare.crossover import TargetCost, course, measured_rate, pays_below
from gradwire.compare.figures import Row, mean, paired
from gradwire.compare.results import FLOOR, FP32, Comparison, Run

POINTS = 61
"""Of a curve over rates."""
AROUND = 100.0
"""How many times slower and faster than the measured links a curve goes at least."""


class Efficiency(NamedTuple):
    """How efficiently a method communicates.

    Attributes:
        row: its other figures; ratio and iso-accuracy speed-ups are there.
        coding: share of a step that codes and was not hidden.
        exposed: share of a step that waits for the network and other ranks.
        samples_per_s: that all ranks train on in a second.
        samples_per_j: for each joule that the machine uses; None where it does not tell its power.
        pays_below: bit/s below which the target is reached sooner than by fp32; infinite if on every link, None if on
            none or where that is not known.
    """

    row: Row
    coding: float
    exposed: float
    samples_per_s: float | None
    samples_per_j: float | None
    pays_below: float | None

    @property
    def overhead(self) -> float:
        """Share of a step that is not computing."""
        return self.coding + self.exposed


class RatePoint(NamedTuple):
    """Seconds to the target on links of so many bit/s."""

    rate: float
    seconds: float


class RateCurve(NamedTuple):
    """Time to the target against bandwidth.

    Attributes:
        method: whose.
        points: by rising rate.
        crossing: where it crosses fp32's curve; None where it does not, and of fp32 itself.
    """

    method: str
    points: tuple[RatePoint, ...]
    crossing: RatePoint | None = None


def efficiencies(comparison: Comparison, rows: Iterable[Row]) -> list[Efficiency]:
    """Return the efficiency of each method that has finished a run.

    Args:
        comparison: what was measured.
        rows: its figures, as `summarise` gives them.
    """
    return [_efficiency(comparison, row) for row in rows if row.step_ms]


def _efficiency(comparison: Comparison, row: Row) -> Efficiency:
    runs, step_ms = comparison.finished(row.method), row.step_ms or math.nan
    costs = _courses(comparison, row.method)
    return Efficiency(
        row,
        coding=(row.encode_ms or 0.0) / step_ms,
        exposed=(row.wait_ms or 0.0) / step_ms,
        samples_per_s=_rate(runs, [run.times_s[-1] for run in runs]),
        samples_per_j=_rate(runs, [run.energy_j for run in runs]),
        pays_below=None if costs is None or row.method == FP32 else pays_below(*costs),
    )


def _rate(runs: list[Run], spent: list[float] | list[float | None]) -> float | None:
    """Samples for each unit that was spent, the mean over runs; None where a run does not tell."""
    told = [run.samples / amount for run, amount in zip(runs, spent, strict=True) if amount and run.samples]
    return mean(told) if told and len(told) == len(runs) else None


def _courses(comparison: Comparison, method: str) -> tuple[TargetCost, TargetCost] | None:
    """What the target costs a method and fp32, over the seeds with which both have finished."""
    seeds = {pair.mine.seed for pair in paired(comparison, comparison.finished(method), FP32)}
    mine, base = course(comparison, method, seeds), course(comparison, FP32, seeds)
    return None if not seeds or mine is None or base is None else (mine, base)


def rate_curves(comparison: Comparison) -> list[RateCurve]:
    """Return time against bandwidth, of each method that reached the target with all seeds that it shares with fp32.

    The model is that of `crossover`: what bytes take grows as the link slows, all else stays. It is exact at the
    measured rate alone. Rates go from a hundredth of the measured one to its hundredfold, and as far as the crossings.
    """
    measured = measured_rate(comparison)
    methods = [method for method in comparison.methods if method != FLOOR]
    costs = {method: found for method in methods if (found := _courses(comparison, method)) is not None}
    if measured is None or not costs:
        return []
    crossings = {method: pays_below(*pair) for method, pair in costs.items() if method != FP32}
    finite = [rate for rate in crossings.values() if rate is not None and rate < math.inf]
    low, high = min([measured / AROUND, *finite]), max([measured * AROUND, *finite])
    rates = [low * (high / low) ** (number / (POINTS - 1)) for number in range(POINTS)]
    curves: list[RateCurve] = []
    for method, (mine, _) in costs.items():
        rate = crossings.get(method)
        crossing = RatePoint(rate, mine.seconds(rate)) if rate is not None and rate < math.inf else None
        curves.append(RateCurve(method, tuple(RatePoint(at, mine.seconds(at)) for at in rates), crossing))
    return curves
