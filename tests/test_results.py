"""What follows from measurements: smoothing, targets, speed-ups, rows, files."""

from __future__ import annotations

import dataclasses
import math

import pytest

from comparisons import comparison, failed, run
from gradwire.compare import figures
from gradwire.compare.evidence import shortfall
from gradwire.compare.figures import Hit, Spread
from gradwire.compare.results import Evaluation, ResultsError, Run, Split, Wire


def test_a_mean_of_what_is_not_finite_is_not_finite_and_no_exception():
    assert figures.mean([1.0, 2.0, 4.5]) == 2.5
    assert figures.mean([1e308, 1e308]) == math.inf
    assert math.isnan(figures.mean([math.inf, -math.inf]))
    assert math.isnan(figures.mean([1.0, math.nan]))


def test_smoothing_looks_back_only():
    assert figures.smooth([3.0, 1.0, 5.0, 7.0], 3) == [3.0, 2.0, 3.0, pytest.approx(13 / 3)]


def test_by_default_the_target_is_where_fp32_ends_within_a_tolerance():
    slow, fast = run("torch.fp32"), run("int4", step_s=0.25, losses=(4, 3, 2, 1.004))
    both = comparison(slow, fast)
    assert figures.target_loss(both, 0) == pytest.approx(1.005)
    (_, row) = figures.summarise(both)
    assert row.target_s is not None
    assert row.target_s.mean == 1.0
    assert row.speed_up is not None
    assert row.speed_up.mean == 4.0


def test_a_method_can_set_the_target():
    both = comparison(run("torch.fp32"), run("int4", losses=(4, 3, 2.5, 2)), target="method:int4")
    fp32, int4 = figures.summarise(both)
    assert fp32.target_s is not None
    assert fp32.target_s.mean == 3.0
    assert int4.target_s is not None
    assert int4.target_s.mean == 4.0


def test_a_hit_is_the_first_step_at_or_below_the_target():
    assert figures.hit_of_loss(run("int4", step_s=0.5), 3.0, window=1) == Hit(2, 1.0)
    assert figures.hit_of_loss(run("int4"), 2.9, window=1) == Hit(3, 3.0)
    assert figures.hit_of_loss(run("int4"), 2.9, window=4) == Hit(4, 4.0)
    assert figures.hit_of_loss(run("int4"), 0.9, window=1) is None
    assert figures.hit_of_loss(run("int4", losses=(math.nan, 3, math.nan)), 3.0, window=1) == Hit(2, 2.0)


def test_a_metric_can_be_the_target_and_direction_counts():
    assert figures.hit_of_metric(run("int4"), 85, higher_is_better=True) == Hit(4, 4.0)
    assert figures.hit_of_metric(run("int4"), 80, higher_is_better=True) == Hit(2, 2.0)
    assert figures.hit_of_metric(run("int4"), 85, higher_is_better=False) == Hit(2, 2.0)
    assert figures.hit_of_metric(run("int4"), 79, higher_is_better=False) is None
    (row,) = figures.summarise(comparison(run("int4"), target="metric:75"))
    assert row.target_s is not None
    assert row.target_s.mean == 2.0
    task = {"name": "toy", "description": "", "metric_name": "error", "higher_is_better": False}
    (row,) = figures.summarise(comparison(run("int4"), target="metric:75", task=task))
    assert row.target_s is None


def test_a_number_can_be_the_target():
    assert figures.target_loss(comparison(run("torch.fp32"), target="2.5"), 0) == 2.5
    assert figures.target_loss(comparison(run("torch.fp32"), target="metric:2.5"), 0) is None
    assert figures.target_loss(comparison(run("torch.fp32")), 1) is None


def test_a_tolerance_is_on_the_worse_side_of_a_loss_below_zero_too():
    below = comparison(run("torch.fp32", losses=(0, -1, -2)), run("int4", losses=(0, -1, -1.995)))
    assert figures.target_loss(below, 0) == pytest.approx(-1.99)
    assert [row.reached for row in figures.summarise(below)] == [1, 1]


def test_the_final_loss_is_the_mean_of_the_last_window():
    assert figures.final_loss(run("int4", losses=(8, 4, 2, 1)), 2) == 1.5
    assert figures.final_loss(run("int4", losses=(8, 4, 2, 1)), 9) == 3.75


def test_a_spread_has_extremes_and_the_deviation_of_a_sample():
    assert Spread.of([1.0, 2.0, 6.0]) == Spread(3.0, 1.0, 6.0, pytest.approx(math.sqrt(7)))  # pyright: ignore[reportArgumentType]
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 0.0)
    assert Spread.of([]) is None
    odd = Spread.of([1.0, math.inf])
    assert odd is not None
    assert math.isnan(odd.std)


def test_a_target_never_reached_is_said_so_and_not_averaged_away():
    runs = [run("torch.fp32"), run("torch.fp32", 1), run("sign"), run("sign", 1, losses=(4, 4, 4, 4))]
    _, row = figures.summarise(comparison(*runs))
    assert (row.reached, row.seeds) == (1, 2)


def test_the_floor_has_no_accuracy():
    _, row = figures.summarise(comparison(run("torch.fp32"), run("torch.noop")))
    assert row.step_ms == 1000
    assert row.metric is None
    assert row.target_s is None
    assert row.ratio is None
    assert figures.target_hit(comparison(run("torch.noop"), target="9"), run("torch.noop")) is None


def test_a_ratio_is_fp32s_bytes_over_the_methods():
    _, row = figures.summarise(comparison(run("torch.fp32", sent=100.0), run("int4", sent=12.5)))
    assert row.ratio == 8.0
    assert row.bytes_per_step == 12.5
    (alone,) = figures.summarise(comparison(run("int4")))
    assert alone.ratio is None
    _, silent = figures.summarise(comparison(run("torch.fp32"), run("int4", sent=0.0)))
    assert silent.ratio is None


def test_a_step_is_the_sum_of_its_parts():
    (row,) = figures.summarise(comparison(run("int4")))
    assert row.step_ms == 1000
    assert row.compute_ms == 500
    assert row.encode_ms == pytest.approx(100)
    assert row.wait_ms == pytest.approx(400)
    assert row.overhead_percent == pytest.approx(40)
    assert row.wire.surprise == pytest.approx(2 / 88)


def test_figures_of_a_step_are_means_over_seeds_of_any_length():
    long = run("int4", 1, losses=(4, 3, 2, 1, 1, 1, 1, 1), step_s=3.0, sent=300.0)
    (row,) = figures.summarise(comparison(run("int4"), long))
    assert row.seeds == 2
    assert row.step_ms == 2000
    assert row.compute_ms == 1000
    assert row.bytes_per_step == 200
    assert row.wire.payload == pytest.approx(176)


def test_what_the_slowest_rank_took_beyond_the_mean_one_is_waiting_and_never_less_than_none():
    busy = dataclasses.replace(run("int4"), split=Split(3.9, 0.4, 0.0, 0.1, 4.0))
    (row,) = figures.summarise(comparison(busy))
    assert row.wait_ms == 0.0
    idle = dataclasses.replace(run("int4"), split=Split())
    (row,) = figures.summarise(comparison(idle))
    assert row.wait_ms == 1000
    assert row.overhead_percent is None


def test_what_is_sent_before_the_first_step_is_not_divided_among_the_steps():
    sent = dataclasses.replace(run("int4"), wire=Wire(total=400.0, buffers=40.0, other=-4.0, setup=70.0))
    (row,) = figures.summarise(comparison(sent))
    assert (row.wire.total, row.wire.buffers, row.wire.other, row.wire.setup) == (100.0, 10.0, -1.0, 70.0)
    assert row.wire.surprise == pytest.approx(-0.1)
    assert Wire(other=3.0).surprise is None
    assert Wire(payload=60.0, buffers=40.0, other=5.0).surprise == pytest.approx(0.05)


def test_gaps_pair_seeds():
    runs = [run("torch.fp32"), run("torch.fp32", 1), run("int4", 1, metric=90.5)]
    _, row = figures.summarise(comparison(*runs))
    assert row.metric_gap == -0.5
    assert figures.metric_gaps(comparison(*runs), [run("int4", 5)]) == []


def test_speed_ups_pair_seeds_and_leave_out_what_was_not_reached():
    base = [run("torch.fp32", seed, step_s=step_s) for seed, step_s in enumerate((2.0, 8.0, 4.0))]
    mine = [run("int4", 1), run("int4", 2), run("int4", 3), run("int4", 0, losses=(4, 4, 4, 4))]
    (_, row) = figures.summarise(comparison(*base, *mine))
    assert row.speed_up == Spread(6.0, 4.0, 8.0, pytest.approx(math.sqrt(8)))  # pyright: ignore[reportArgumentType]
    assert (row.reached, row.seeds) == (2, 4)
    assert row.speed_up_16bit is None


def test_the_16_bit_baseline_is_fp16_or_else_bf16():
    half, brain = run("torch.fp16", step_s=3.0), run("torch.bf16", step_s=2.0)
    *_, row = figures.summarise(comparison(run("torch.fp32"), brain, half, run("int4")))
    assert row.speed_up_16bit is not None
    assert row.speed_up_16bit.mean == 3.0
    assert figures.sixteen_bit(comparison(brain)) == "torch.bf16"
    assert figures.sixteen_bit(comparison(failed("torch.fp16"), brain)) == "torch.bf16"
    assert figures.sixteen_bit(comparison(run("int4"))) is None


def test_methods_keep_their_order_and_seeds_are_sorted():
    mixed = comparison(run("int4", 1), run("torch.fp32"), run("int4", 0), failed("int4", 2), Run("int4", 3))
    assert mixed.methods == ["int4", "torch.fp32"]
    assert [one.seed for one in mixed.finished("int4")] == [0, 1]
    assert mixed.run("int4", 2) is None


def test_a_failed_method_keeps_its_place_and_its_reason():
    dead = failed("int4")
    row, base = figures.summarise(comparison(dead, run("torch.fp32")))
    assert row.failure == dead.reason
    assert base.failure == ""
    assert row.bytes_per_step is None
    assert row.seeds == 0


def test_a_run_without_evaluations_has_no_metric():
    blind = dataclasses.replace(run("int4"), evaluations=[])
    _, row = figures.summarise(comparison(run("torch.fp32"), blind))
    assert row.metric is None
    assert row.metric_gap is None
    assert figures.hit_of_metric(blind, 0.0, higher_is_better=True) is None


def test_the_metric_is_the_last_evaluation():
    (row,) = figures.summarise(comparison(run("int4", metric=91.0), run("int4", 1, metric=93.0)))
    assert row.metric == Spread(92.0, 91.0, 93.0, pytest.approx(math.sqrt(2)))  # pyright: ignore[reportArgumentType]
    assert Evaluation(1, 2.0, 3.0).value == 3.0


@pytest.mark.parametrize("target", ["soon", "metric:", "metric:good", "nan", "inf", "metric:-inf", "1e999"])
def test_targets_that_mean_nothing_are_refused(target: str):
    with pytest.raises(ResultsError, match="metric:98"):
        figures.check_target(target)


@pytest.mark.parametrize("target", [None, "2.1", "-1e3", "metric:98", "method:int4"])
def test_targets_that_mean_something_are_kept(target: str | None):
    assert figures.check_target(target) == target


def test_what_was_not_measured_is_nothing():
    assert {*dataclasses.astuple(Wire()), *dataclasses.astuple(Split())} == {0.0}
    blank = comparison()
    assert (blank.tolerance, blank.schema) == (0.005, 1)
    row = figures.Row("int4", "", 0, "")
    assert row.reached == 0


def test_the_end_is_the_last_of_any_number_of_evaluations():
    def often(method: str, *values: float) -> Run:
        return dataclasses.replace(run(method), evaluations=[Evaluation(1 + i, 1.0, v) for i, v in enumerate(values)])

    both = comparison(often("torch.fp32", 1.0, 2.0, 3.0, 70.0), often("int4", 4.0, 5.0, 64.0))
    assert figures.metric_gaps(both, both.finished("int4")) == [-6.0]
    base, row = figures.summarise(both)
    assert base.metric is not None
    assert row.metric is not None
    assert (base.metric.mean, row.metric.mean) == (70.0, 64.0)
    found = shortfall(both, "int4")
    assert found is not None
    assert (found.worse_by.mean, found.baseline) == (6.0, 70.0)
