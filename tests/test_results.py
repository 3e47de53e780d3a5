"""What follows from measurements: smoothing, targets, speed-ups, rows, files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from gradwire.bench import results
from gradwire.bench.results import Comparison, Evaluation, ResultsError, Run, Split, Wire


def run(method: str, seed: int = 0, *, step_s: float = 1.0, losses: tuple[float, ...] = (4, 3, 2, 1)) -> Run:
    steps = len(losses)
    times = [step_s * (i + 1) for i in range(steps)]
    return Run(
        method,
        seed,
        label=f"{method} in words",
        losses=[float(loss) for loss in losses],
        times_s=times,
        tx_bytes=[100.0 * (i + 1) for i in range(steps)],
        evaluations=[Evaluation(2, times[1], 80.0), Evaluation(steps, times[-1], 90.0 + seed)],
        wire=Wire(total=100.0 * steps, framing=10.0 * steps, payload=88.0 * steps, other=2.0 * steps),
        split=Split(0.5 * times[-1], 0.1 * times[-1], 0.4 * times[-1], 0.2 * times[-1], times[-1]),
    )


def comparison(*runs: Run, target: str | None = None) -> Comparison:
    return Comparison(
        task={"name": "toy", "description": "a toy", "metric_name": "score", "higher_is_better": True},
        options={"hosts": 2, "rate": "100mbit", "steps": 4, "minutes": None, "bucket_mb": 25.0},
        environment=dict.fromkeys(
            ("network", "processor", "gradwire", "torch", "python", "system", "created", "command"), "x"
        ),
        smoothing=1,
        target=target,
        runs=list(runs),
    )


def test_smoothing_looks_back_only():
    assert results.smooth([3.0, 1.0, 5.0, 7.0], 3) == [3.0, 2.0, 3.0, pytest.approx(13 / 3)]


def test_by_default_the_target_is_where_fp32_ends_within_a_tolerance():
    slow, fast = run("torch:fp32"), run("int4", step_s=0.25, losses=(4, 3, 2, 1.004))
    both = comparison(slow, fast)
    assert results.target_loss(both, 0) == pytest.approx(1.005)
    (_, row) = results.summarise(both)
    assert row.target_s is not None
    assert row.target_s.mean == 1.0
    assert row.speed_up is not None
    assert row.speed_up.mean == 4.0


def test_a_method_can_set_the_target():
    both = comparison(run("torch:fp32"), run("int4", losses=(4, 3, 2.5, 2)), target="method:int4")
    fp32, int4 = results.summarise(both)
    assert fp32.target_s is not None
    assert fp32.target_s.mean == 3.0
    assert int4.target_s is not None
    assert int4.target_s.mean == 4.0


def test_a_metric_can_be_the_target_and_direction_counts():
    assert results.time_to_metric(run("int4"), 85, higher_is_better=True) == 4.0
    assert results.time_to_metric(run("int4"), 85, higher_is_better=False) == 2.0
    (row,) = results.summarise(comparison(run("int4"), target="metric:75"))
    assert row.target_s is not None
    assert row.target_s.mean == 2.0


def test_a_target_never_reached_is_said_so_and_not_averaged_away():
    runs = [run("torch:fp32"), run("torch:fp32", 1), run("sign"), run("sign", 1, losses=(4, 4, 4, 4))]
    _, row = results.summarise(comparison(*runs))
    assert (row.reached, row.seeds) == (1, 2)


def test_the_floor_has_no_accuracy():
    _, row = results.summarise(comparison(run("torch:fp32"), run("torch:noop")))
    assert row.step_ms == 1000
    assert row.metric is None
    assert row.target_s is None
    assert row.ratio is None


def test_a_step_is_the_sum_of_its_parts():
    (row,) = results.summarise(comparison(run("int4")))
    assert row.compute_ms == 500
    assert row.encode_ms == pytest.approx(100)
    assert row.wait_ms == pytest.approx(400)
    assert row.overhead_percent == pytest.approx(40)
    assert row.wire.surprise == pytest.approx(2 / 88)


def test_gaps_pair_seeds():
    runs = [run("torch:fp32"), run("torch:fp32", 1), run("int4", 1)]
    _, row = results.summarise(comparison(*runs))
    assert row.metric_gap == 0.0


def test_a_failed_method_keeps_its_place_and_its_reason():
    dead = Run("int4", 0, status="failed", reason="rank 1 ended with status 1")
    _, row = results.summarise(comparison(run("torch:fp32"), dead))
    assert row.failure == dead.reason
    assert row.bytes_per_step is None


def test_comparisons_round_trip_with_losses_that_are_not_numbers(tmp_path: Path):
    before = comparison(run("torch:fp32"), run("int4", losses=(4, math.nan, math.inf, 1)))
    results.save(before, tmp_path / "results.json")
    json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    after = results.load(tmp_path / "results.json")
    assert after.runs[0] == before.runs[0]
    assert math.isnan(after.runs[1].losses[1])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99, "runs": []}'])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError):
        results.load(path)
    with pytest.raises(ResultsError, match="run gradwire compare"):
        results.load(tmp_path / "absent.json")


def test_tables_have_a_row_a_method_and_a_row_a_step(tmp_path: Path):
    results.write_tables(comparison(run("torch:fp32"), run("int4")), tmp_path)
    with (tmp_path / "results.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["torch:fp32", "int4"]
    with (tmp_path / "curves.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert len(curves) == 8
    assert list(curves[0]) == ["method", "seed", "step", "time_s", "tx_bytes", "loss"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="space"):
        results.write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["soon", "metric:", "metric:good"])
def test_targets_that_mean_nothing_are_refused(target: str):
    with pytest.raises(ResultsError, match="metric:98"):
        results.check_target(target)
