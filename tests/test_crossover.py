"""Below which bandwidth a method pays: the model of a step, its crossing, and what was measured at two rates."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comparisons import comparison, run
from gradwire.compare.crossover import TargetCost, course, measured_rate, method_pays_below, pays_below
from gradwire.core.grammar import renamed

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FALLING = tuple(4.0 - 0.1 * step for step in range(31))

courses = st.builds(
    TargetCost,
    steps=st.floats(1, 1e4),
    busy_s=st.floats(1e-3, 10),
    wait_s=st.floats(0, 10),
    sent_bytes=st.floats(1, 1e9),
    rate=st.floats(1e6, 1e10),
)


def test_what_waits_beyond_its_bytes_goes_on_waiting_and_what_was_hidden_stays_hidden():
    latent = TargetCost(steps=10, busy_s=0.1, wait_s=0.5, sent_bytes=1e6, rate=1e8)  # the bytes alone take 0.08 s
    assert latent.step_s(1e8) == pytest.approx(0.6)
    assert latent.step_s(1e7) == pytest.approx(0.1 + 0.42 + 0.8)
    assert latent.step_s(1e20) == pytest.approx(0.1 + 0.42)
    assert latent.seconds(1e8) == pytest.approx(6.0)
    hidden = TargetCost(steps=10, busy_s=0.1, wait_s=0.02, sent_bytes=1e6, rate=1e8)  # 0.06 s of it is hidden
    assert hidden.step_s(1e9) == pytest.approx(0.1)
    assert hidden.step_s(5e7) == pytest.approx(0.1 + 0.1)
    assert 1 / hidden.kink == pytest.approx(8e6 / 0.06)


@given(courses, courses)
def test_below_the_crossing_a_method_is_sooner_and_just_above_it_is_not(mine: TargetCost, baseline: TargetCost):
    rate = pays_below(mine, baseline)
    if rate is None:
        assert mine.steps * mine.sent_bytes >= baseline.steps * baseline.sent_bytes
        return
    assert all(
        mine.seconds(below) <= baseline.seconds(below) * (1 + 1e-9)
        for below in (0.999 * min(rate, 1e15) / 10**power for power in range(8))
    )
    if rate < 1e15:
        assert mine.seconds(rate) == pytest.approx(baseline.seconds(rate), rel=1e-6)


def test_a_method_that_sends_as_much_never_pays_and_one_that_only_gains_always_does():
    fp32 = TargetCost(steps=100, busy_s=0.1, wait_s=0.8, sent_bytes=1e7, rate=1e8)
    assert pays_below(fp32, fp32) is None
    assert pays_below(TargetCost(steps=200, busy_s=0.1, wait_s=0.1, sent_bytes=6e6, rate=1e8), fp32) is None
    assert pays_below(TargetCost(steps=100, busy_s=0.05, wait_s=0.05, sent_bytes=1e6, rate=1e8), fp32) == math.inf


def test_more_steps_to_the_target_cost_bandwidth():
    fp32 = TargetCost(steps=100, busy_s=0.1, wait_s=0.8, sent_bytes=1e7, rate=1e8)
    small = TargetCost(steps=100, busy_s=0.2, wait_s=0.08, sent_bytes=1e6, rate=1e8)
    # 100 (0.1 + 8e7 x) = 100 (0.2 + 8e6 x)
    assert pays_below(small, fp32) == pytest.approx(7.2e7 / 0.1)
    longer = TargetCost(steps=150, busy_s=0.2, wait_s=0.08, sent_bytes=1e6, rate=1e8)
    # 100 (0.1 + 8e7 x) = 150 (0.2 + 8e6 x)
    assert pays_below(longer, fp32) == pytest.approx((8e9 - 1.2e9) / 20)


def test_a_crossing_between_two_kinks_is_found():
    hidden = TargetCost(steps=1, busy_s=1.0, wait_s=0.0, sent_bytes=1e9, rate=8e9)  # a second of sending, all hidden
    latent = TargetCost(
        steps=1, busy_s=0.9, wait_s=0.2, sent_bytes=1e8, rate=8e9
    )  # sooner only where bytes cost nothing
    between = TargetCost(steps=1, busy_s=0.5, wait_s=0.6, sent_bytes=1e8, rate=8e9)
    # behind by 0.1 s where the first still hides all, 1/B = 1.25e-10; from there its lead grows by 7.2e9 a unit
    for mine in (latent, between):
        assert pays_below(mine, hidden) == pytest.approx(1 / (1.25e-10 + 0.1 / 7.2e9))
    twice = TargetCost(steps=2, busy_s=0.5, wait_s=0.0, sent_bytes=1e8, rate=8e9)  # 1 s as well, and hides 0.1 s a step
    late = TargetCost(steps=1, busy_s=1.05, wait_s=0.0, sent_bytes=1e8, rate=8e9)  # behind by 0.05 s until 1.25e-10
    assert pays_below(twice, hidden) == math.inf
    assert pays_below(late, hidden) == pytest.approx(1 / (1.25e-10 + 0.05 / 8e9), rel=0.2)


def test_a_course_is_read_off_the_runs_of_paired_seeds():
    base = [run("torch.fp32", seed, losses=FALLING, step_s=2.0, sent=1e6) for seed in range(2)]
    mine = [run("int4", 1, losses=(*FALLING, 0.9), step_s=0.5, sent=1e5), run("int4", 7, losses=FALLING, step_s=9.0)]
    both = comparison(*base, *mine)
    # times of `run`: half of a step computes and a tenth codes; the target, 1.005, is met at step 31
    mine_course, base_course = course(both, "int4", {1}), course(both, "torch.fp32", {0, 1})
    assert mine_course is not None
    assert base_course is not None
    assert dataclasses.astuple(mine_course) == pytest.approx((31, 0.3, 0.2, 1e5, 1e8))
    assert dataclasses.astuple(base_course) == pytest.approx((31, 1.2, 0.8, 1e6, 1e8))
    assert method_pays_below(both, "int4") == math.inf
    assert method_pays_below(both, "torch.fp32") is None


def test_without_a_target_met_or_a_rate_known_nothing_is_said():
    runs = [run("torch.fp32", losses=FALLING), run("int4", losses=FALLING[:-5])]
    assert method_pays_below(comparison(*runs), "int4") is None
    assert course(comparison(), "int4", {0}) is None
    odd = comparison(*runs, options={"hosts": 2, "rate": "brisk"})
    assert measured_rate(odd) is None
    assert course(odd, "torch.fp32", {0}) is None


def rows(name: str) -> dict[str, dict[str, str]]:
    with (RESULTS / name).open() as file:
        return {renamed(row["method"]): row for row in csv.DictReader(file)}


def measured(row: dict[str, str], rate: float) -> TargetCost:
    """A method of `results.csv`, its steps to the target told by its seconds."""
    step_ms, busy_ms = float(row["step_ms"]), float(row["compute_ms"]) + float(row["encode_ms"])
    steps = float(row["target_s"]) / step_ms * 1e3
    return TargetCost(steps, busy_ms / 1e3, float(row["wait_ms"]) / 1e3, float(row["bytes_per_step"]), rate)


def told(known: dict[str, dict[str, str]], method: str, rate: float, other: float) -> float:
    """Speed-up over fp32 at another rate than the one it was measured at."""
    return measured(known["torch.fp32"], rate).seconds(other) / measured(known[method], rate).seconds(other)


def found(known: dict[str, dict[str, str]], method: str) -> float:
    """Speed-up over fp32 as measured."""
    return float(known["torch.fp32"]["target_s"]) / float(known[method]["target_s"])


def test_figures_of_one_rate_tell_the_speed_ups_of_another():
    slow = rows("compare_bytes_20mbit_2026-11-21.csv")
    fast = rows("compare_bytes_100mbit_ten_methods_2026-11-21.csv")
    methods = [method for method in slow if slow[method]["reached"] == fast[method]["reached"] == "3"]
    assert len(methods) == 6
    for method in methods:
        assert told(fast, method, 1e8, 2e7) == pytest.approx(found(slow, method), rel=0.16)
        assert told(slow, method, 2e7, 1e8) == pytest.approx(found(fast, method), rel=0.23)
