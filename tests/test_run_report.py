"""`handle.report()`: the arithmetic and the verdicts without processes, then real runs."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.net import Network
from gradwire.bench.ranks import run_function
from gradwire.core.link import Link
from gradwire.drivers.engine import Stats
from gradwire.drivers.window import NORM_EVERY, START_UP, STEPS, Ready, Sample, Window, exposed_s
from gradwire.session.report import FEWEST_STEPS, Report, Times, summarise

CASES = str(Path(__file__).with_name("report_cases.py"))
LINK = Link(0.001, 1e-6)


def a_report(times: Times | None = None, **changed: Any) -> Report:
    """int4 on four ranks, where fp32 would take 400 ms and half of its bytes 250."""
    report = Report(
        method="int4",
        rank=0,
        ranks=4,
        first_step=5,
        steps=100,
        bad_steps=0,
        sent_bytes=1_450_000.0,
        dense_bytes=11_200_000.0,
        dense_name="fp32",
        times=times or Times(100.0, 60.0, 20.0, 55.0, 400.0, 250.0),
        link_bits_per_s=93.1e6,
        link_latency_ms=0.9,
        residual_norm=0.25,
        gradient_norm=0.5,
        state_bytes=7_400_000,
        buffer_bytes=7_400_000,
    )
    return dataclasses.replace(report, **changed)


def with_steps(step_ms: float, dense_ms: float, half_ms: float) -> Times:
    return Times(step_ms, step_ms / 2, 1.0, 1.0, dense_ms, half_ms)


# ------------------------------------------------------------------------------------------- arithmetic


buckets = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**6)), min_size=1, max_size=6)


@given(buckets, st.floats(0, 1), st.floats(0, 0.5))
def test_the_estimate_lies_between_the_last_bucket_and_all_of_them(
    found: list[tuple[float, int]], share: float, alpha: float
) -> None:
    link = Link(alpha, 1e-6)
    ready = [Ready(at - max(found)[0], nbytes) for at, nbytes in sorted(found)]
    each = [link.seconds(share * nbytes) for _, nbytes in ready]
    estimate = exposed_s(ready, link, share)
    assert each[-1] <= estimate + 1e-9
    assert estimate <= sum(each) + 1e-9
    assert estimate <= exposed_s(ready, link) + 1e-9  # fewer bytes never take longer


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before_it() -> None:
    assert exposed_s([Ready(-5.0, 10**6), Ready(0.0, 10**6)], LINK) == pytest.approx(1.001)
    assert exposed_s([Ready(-0.5, 10**6), Ready(0.0, 10**6)], LINK) == pytest.approx(1.502)


def test_what_waits_for_slower_ranks_is_not_counted_as_saved() -> None:
    """Exposed times that are all the link's, or mostly a slow rank's: the estimate is the same."""
    quick = [Sample(1.0, 0.4, 0.1, 0.3, 1, 8, (Ready(0.0, 600_000),))] * 4
    slow = [quick[0]._replace(exposed_s=0.9)] * 8
    assert summarise(quick, LINK).dense_step_ms == pytest.approx(1000 - 400 + 601)
    assert summarise(quick + slow, LINK).dense_step_ms == summarise(quick, LINK).dense_step_ms
    assert summarise(quick, LINK).half_step_ms == pytest.approx(1000 - 400 + 301)


def test_a_window_holds_the_last_steps_without_start_up() -> None:
    window, stats = Window(), Stats()
    for step in range(START_UP + STEPS + 7):
        window.begin()
        window.ready(10.0 * step + 5.0, 800)
        window.ready(10.0 * step + 6.0, 200)
        stats.steps, stats.wire_bytes = stats.steps + 1, stats.wire_bytes + step
        stats.exposed_s += 2.0
        window.end(10.0 * step + 8.0, stats)
        assert len(window.samples) == min(max(step + 1 - START_UP, 0), STEPS)
    assert [sample.sent_bytes for sample in window.samples] == list(range(START_UP + 7, START_UP + STEPS + 7))
    assert window.samples[-1].buckets == (Ready(-1.0, 800), Ready(0.0, 200))
    assert {(sample.step_s, sample.exposed_s) for sample in window.samples} == {(10.0, 2.0)}


def test_the_gradients_norm_is_that_of_all_buckets_without_the_loss_scale() -> None:
    window = Window()
    assert window.gradient_norm() is None
    for first in (True, True):  # the second step takes the place of the first
        window.gradient(torch.tensor([3.0]) * 64, is_first=first, scale=64.0)
        window.gradient(torch.tensor([4.0], dtype=torch.bfloat16) * 64, is_first=False, scale=64.0)
    assert window.gradient_norm() == pytest.approx(5.0)
    assert not window.found_bad()
    window.gradient(torch.tensor([float("nan")]), is_first=True, scale=1.0)
    assert window.found_bad()


def test_norms_are_taken_of_one_step_in_many() -> None:
    window, stats, wanted = Window(), Stats(), []
    for step in range(3 * NORM_EVERY):
        if window.wants_norm:
            wanted.append(step)
        stats.steps += 1
        window.end(float(step), stats)
    assert wanted == [START_UP, START_UP + NORM_EVERY, START_UP + 2 * NORM_EVERY]


# --------------------------------------------------------------------------------------------- verdicts

VERDICTS = {
    "saves about 300 ms a step: 4.0 times as many steps as fp32 in the same time": a_report(),
    "saves about 150 ms a step, but fp16 saves as much and loses less: use fp16": a_report(with_steps(250, 400, 252)),
    "does not pay on this link: its step is about 20 ms longer than that of fp32; use none": a_report(
        with_steps(100, 80, 78)
    ),
    "does not pay on this link: its step is as long as that of fp32; use fp16, which saves about 9 ms a step": (
        a_report(with_steps(100, 101, 92))
    ),
    "saves about 150 ms a step: 1.6 times as many steps as fp32 in the same time": a_report(
        with_steps(250, 400, 250), method="fp16", sent_bytes=5_600_000.0
    ),
    "saves nothing: it sends 680 B a step where fp32 sends 432 B; use none": a_report(
        sent_bytes=680.0, dense_bytes=432.0
    ),
    "saves nothing: it sends 33.6 MB a step where fp32 sends 11.2 MB": a_report(sent_bytes=33.6e6, averages=False),
    "saves nothing: it sends what fp32 sends; use fp16, which saves about 150 ms a step": a_report(
        with_steps(400, 400, 250), sent_bytes=11_200_000.0
    ),
    "saves nothing: it sends what fp32 sends": a_report(with_steps(50, 50, 49), sent_bytes=11_200_000.0),
    "does not pay on this link: its step is about 300 ms longer than that of bf16; use none": a_report(
        with_steps(400, 100, 50), dense_name="bf16"
    ),
    "it is too early to say: ask again after 10 steps": a_report(steps=FEWEST_STEPS - 1),
    "there is one rank: nothing is sent, and nothing can be saved": a_report(ranks=1, sent_bytes=0.0, dense_bytes=0.0),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_verdict(verdict: str) -> None:
    assert VERDICTS[verdict].verdict == verdict


def test_without_times_the_verdict_speaks_of_bytes() -> None:
    report = dataclasses.replace(a_report(), times=None)
    assert (
        report.verdict == "sends 7.7 times less than fp32; what time that saves is not estimated on a GPU or with FSDP2"
    )
    assert report.saved_ms is None
    assert "waiting" not in str(report)


def test_the_text_is_a_table_whose_columns_line_up() -> None:
    head, blank, *rows, empty, verdict = str(a_report()).splitlines()
    assert head == "gradwire report: int4, rank 0 of 4, steps 5 to 104"
    assert blank == empty == ""
    assert verdict == "  Saves about 300 ms a step: 4.0 times as many steps as fp32 in the same time."
    ends = {row.rstrip().find(" ", 13) for row in rows}  # where the number ends and its unit begins
    assert len(ends) == 1
    assert max(map(len, rows)) <= 100
    assert any(row.split()[:3] == ["residual", "0.50", "x"] for row in rows)
    assert any(row.split()[:3] == ["saved", "9.75", "MB"] for row in rows)


def test_what_is_not_known_is_none_in_the_mapping() -> None:
    plain = dataclasses.replace(a_report(), times=None, gradient_norm=None).as_dict()
    assert {name for name, value in plain.items() if value is None} == {
        *(field.name for field in dataclasses.fields(Times)),
        *("gradient_norm", "residual_ratio", "saved_ms"),
    }
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


# -------------------------------------------------------------------------------------------- real runs

JOBS = {
    "tiny": ("tiny", {}),
    "int4": ("figures", {"spec": "int4", "steps": 20, "width": 64, "deadline_s": 60}),
    "none": ("figures", {"spec": "none", "steps": 20, "width": 64, "deadline_s": 60}),
    "nan int4": ("non_finite", {"spec": "int4", "scaled": False, "steps": [7, 8]}),
    "nan sign": ("non_finite", {"spec": "sign", "scaled": False, "steps": [7, 8]}),
    "nan none": ("non_finite", {"spec": "none", "scaled": False, "steps": [START_UP]}),
    "nan scaled": ("non_finite", {"spec": "int4", "scaled": True, "steps": [7, 8]}),
}


@functools.cache
def outcomes() -> dict[str, list[dict[str, Any]]]:
    """What both ranks saw of every job."""
    ranks = run_function(f"{CASES}:shown", 2, {"jobs": list(JOBS.values())}, 120)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(JOBS)}


def test_a_model_of_108_parameters_saves_nothing_and_the_report_says_so_once() -> None:
    for outcome in outcomes()["tiny"]:
        assert (outcome["sent_bytes"], outcome["dense_bytes"], outcome["saved_bytes"]) == (528, 432, -96)
        assert outcome["text"].count("aves nothing") == 1
        assert not any(line.split()[:1] == ["saved"] for line in outcome["text"].splitlines())


def test_a_report_tells_the_same_as_the_other_figures_of_the_run() -> None:
    for rank, found in enumerate(outcomes()["int4"]):
        assert (found["rank"], found["ranks"], found["method"]) == (rank, 2, "int4")
        assert (found["first_step"], found["steps"]) == (START_UP, 20 - START_UP)
        assert found["sent_bytes"] * found["steps_made"] == found["wire_bytes"]
        assert found["dense_bytes"] == found["dense_parameter_bytes"]  # 2 (n - 1) / n with two ranks
        assert found["residual_norm"] == pytest.approx(found["scaled_residual"] / 64)
        assert found["gradient_norm"] > 0
        assert 0 < found["residual_ratio"] < 2
        assert found["buffer_bytes"] == found["dense_parameter_bytes"]
        assert found["state_bytes"] >= found["saved_state_bytes"] > 0
        assert 0 < found["exposed_ms"] <= found["step_ms"]
        assert found["encode_ms"] > 0
        assert found["half_step_ms"] < found["dense_step_ms"]
        assert found["link"][0] > 0
        assert found["link"][1] > 0
        assert "too early" in found["early"]
        assert json.loads(found["as_json"])["verdict"] == found["verdict"]


def test_ranks_agree_on_the_link_and_on_the_bytes() -> None:
    one, other = outcomes()["int4"]
    for key in ("sent_bytes", "link_bits_per_s", "link_latency_ms", "link", "steps"):
        assert one[key] == other[key]


def test_without_memory_there_is_no_residual_and_no_state() -> None:
    for found in outcomes()["none"]:
        assert (found["residual_norm"], found["state_bytes"]) == (None, 0)
        assert found["verdict"].startswith("saves nothing: it sends what fp32 sends")
        assert "residual" not in found["text"]


@pytest.mark.parametrize("name", ["nan int4", "nan sign"])
def test_a_gradient_that_is_not_finite_is_warned_about_once(name: str) -> None:
    for found in outcomes()[name]:
        assert found["warned"] == ["NonFiniteWarning"]
        assert "scaler=" in found["said"][0]
        assert found["bad_steps"] == 2


def test_a_method_that_looks_for_nothing_notices_by_the_norm_of_the_ranks_own_gradient() -> None:
    one, other = outcomes()["nan none"]
    assert (one["warned"], other["warned"]) == ([], ["NonFiniteWarning"])
    assert one["gradient_norm"] is not None
    assert other["gradient_norm"] is None


def test_with_a_loss_scaler_nobody_is_warned() -> None:
    for found in outcomes()["nan scaled"]:
        assert found["warned"] == []
        assert found["bad_steps"] == 2


def test_the_estimate_of_the_fp32_step_is_what_fp32_takes_on_a_slow_link() -> None:
    with Network(2, "50mbit") as network:
        if network.mode == "paced":
            pytest.skip("connections are paced only after attach has measured them")
        ranks = run_function(f"{CASES}:measured_step_ms", 2, {"specs": ["none", "int4"]}, 120, network)
    for found in ranks:
        real_ms = found["none"]["seen_ms"]
        assert found["none"]["step_ms"] == pytest.approx(real_ms, rel=0.15)
        assert found["none"]["dense_step_ms"] == pytest.approx(real_ms, rel=0.3)
        assert found["int4"]["dense_step_ms"] == pytest.approx(real_ms, rel=0.3)
        assert found["int4"]["verdict"].startswith("saves about")
