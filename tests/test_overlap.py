"""Overlap: what is measured of it, models that nobody wraps, optimizers that step early, and what `tune` finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradwire.bench.ranks import run_function
from gradwire.drivers.traced import Span
from gradwire.overlap import Overlap, covered_s, hidden_share

CASES = str(Path(__file__).with_name("overlap_cases.py"))

pytestmark = pytest.mark.one_of("ranks")


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 120)


# Figures ----------------------------------------------------------------------------------------------------------


def test_exposed_and_hidden_add_up_to_the_isolated_time_where_something_is_hidden() -> None:
    found = Overlap(0.15, 0.10, 0.08)
    assert found.exposed_s + found.hidden_s == pytest.approx(found.isolated_s)
    assert found.exposed_share + found.efficiency == pytest.approx(1.0)


def test_figures_stay_in_their_range_where_noise_does_not() -> None:
    assert Overlap(0.09, 0.10, 0.08)[:] == (0.09, 0.10, 0.08)
    assert Overlap(0.09, 0.10, 0.08).exposed_s == 0.0
    assert Overlap(0.09, 0.10, 0.08).efficiency == 1.0
    worse = Overlap(0.30, 0.10, 0.08)  # communication slows computation down by more than it takes itself
    assert (worse.hidden_s, worse.efficiency) == (0.0, 0.0)
    assert worse.exposed_share == pytest.approx(2.5)
    assert Overlap(0.1, 0.1, 0.0).efficiency == 1.0
    assert Overlap(0.1, 0.1, 0.0).exposed_share == 0.0


def test_a_trace_counts_each_moment_once() -> None:
    computing = Span("train", "backward", 10.0, 20.0)
    wire = [Span("wire", "x", 5.0, 12.0), Span("wire", "y", 11.0, 13.0), Span("wire", "z", 18.0, 24.0)]
    assert covered_s(wire, computing) == 5.0
    assert covered_s([], computing) == 0.0
    assert hidden_share(wire, computing) == pytest.approx(5 / 14)
    assert hidden_share([], computing) == 1.0


def test_jobs_take_turns_and_the_slowest_rank_counts_on_all() -> None:
    first, second = run("slowest_counts", 2)
    assert first["calls"] == (["slow"] * 3 + ["quick"] * 3) * 3
    assert first["rounds_s"] == second["rounds_s"]
    assert all(seconds >= 0.03 for seconds in first["rounds_s"]["slow"])
    assert first["median_s"] >= 0.03
    step_s, floor_s, isolated_s = first["overlap"]
    assert (step_s >= 0.05, floor_s >= 0.03, isolated_s >= 0.04) == (True, True, True)
    assert first["overlap"] == second["overlap"]


def test_communication_by_itself_is_that_of_a_step() -> None:
    for found in run("alone", 2):
        assert found["same"]
        assert found["twice"] == 2 * found["sent"]
        assert found["reduced"] == found["numel"]
