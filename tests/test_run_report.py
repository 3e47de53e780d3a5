"""`session.report()`: the arithmetic and the verdicts without processes, then real runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

from gradwire.drivers.engine import Stats
from gradwire.drivers.window import NORM_EVERY, START_UP, STEPS, Caps, Ready, Sample, Window, exposed_s
from gradwire.network import Network
from gradwire.ranks.supervised import run_function
from gradwire.session.estimate import Times, summarise
from gradwire.session.memory import HeldMemory
from gradwire.session.module_figures import ModuleFigures
from gradwire.session.pace import WindowPace
from gradwire.session.report import FEWEST_STEPS, Report
from gradwire.session.step_times import StepBoard, ToldSteps
from gradwire.topology.reduction_times import Probe, ReductionTimes
from trials import unspoiled

CASES = str(Path(__file__).with_name("report_cases.py"))
LINK = ReductionTimes(10**6, 0.001, (Probe(10**5, 0.101, 0.0), Probe(10**6, 1.001, 0.0)))


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
        times=times or with_steps(100.0, 400.0, 250.0),
        link_bits_per_s=93.1e6,
        link_latency_ms=0.9,
        residual_norm=0.25,
        gradient_norm=0.5,
        memory=HeldMemory(7_400_000, 0, 0, 7_400_000, 0),
    )
    return dataclasses.replace(report, **changed)


def with_steps(step_ms: float, dense_ms: float, half_ms: float, low_ms: float = 0.0, high_ms: float = 0.0) -> Times:
    return Times(
        step_ms, step_ms / 2, 1.0, 1.0, dense_ms, half_ms, low_ms or 0.95 * dense_ms, high_ms or 1.05 * dense_ms
    )


# ------------------------------------------------------------------------------------------- arithmetic


buckets = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**6)), min_size=1, max_size=6)


@given(buckets, st.floats(0, 1), st.floats(0, 0.5))
def test_the_estimate_lies_between_the_last_bucket_and_all_of_them(
    found: list[tuple[float, int]], share: float, alpha: float
) -> None:
    def seconds(nbytes: float) -> float:
        return alpha + 1e-6 * nbytes

    ready = [Ready(at - max(found)[0], nbytes) for at, nbytes in sorted(found)]
    each = [seconds(share * nbytes) for _, nbytes in ready]
    estimate = exposed_s(ready, seconds, share)
    assert each[-1] - alpha <= estimate + 1e-9
    assert estimate <= sum(each) + 1e-9
    assert estimate <= exposed_s(ready, seconds) + alpha + 1e-9  # fewer bytes take no longer, but for a break
    assert exposed_s(ready, seconds, share, 0.5) <= estimate + 0.5 + 1e-9


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before_it() -> None:
    seconds = LINK.curve.seconds
    assert exposed_s([Ready(-5.0, 10**6), Ready(0.0, 10**6)], seconds) == pytest.approx(1.001)
    assert exposed_s([Ready(-0.5, 10**6), Ready(0.0, 10**6)], seconds) == pytest.approx(1.501)
    assert exposed_s([Ready(-5.0, 10**6), Ready(0.0, 10**6)], seconds, cold_s=0.2) == pytest.approx(1.001)
    assert exposed_s([Ready(-0.5, 10**6), Ready(0.0, 10**6)], seconds, cold_s=0.2) == pytest.approx(1.701)


def test_what_waits_for_slower_ranks_is_not_counted_as_saved() -> None:
    """This rank waits 400 ms of its exposed 500 for another one, whose gradients all come at the end.

    Coding took 100 of the 900 that are left, or nothing: 50 are assumed.
    """
    quick = [Sample(1.0, 0.5, 0.1, 0.3, 1, 8, (Ready(-1.0, 500_000), Ready(0.0, 100_000)))] * 8
    slow = ToldSteps(5, (0.1,) * 8, 0.1, (Ready(0.0, 600_000),))
    times = summarise(quick, 5, LINK, [slow])
    assert times.dense_step_ms == pytest.approx(1000 - 100 - 50 + 601)
    assert times.half_step_ms == pytest.approx(1000 - 100 - 50 + 301)
    assert (times.step_ms, times.exposed_ms) == pytest.approx((1000, 500))
    assert (times.dense_low_ms, times.dense_high_ms) == pytest.approx((1401, 1501))
    assert times.tells
    unknown = summarise(quick, 5, LINK, None)
    assert not unknown.tells
    assert unknown.dense_low_ms <= 1501 <= unknown.dense_high_ms


def test_a_step_that_a_pause_made_long_does_not_count_and_a_long_communication_does() -> None:
    buckets = (Ready(0.0, 600_000),)
    samples = [Sample(1.0, 0.4, 0.0, 0.4, 1, 8, buckets)] * 9
    paused = summarise([*samples, samples[0]._replace(step_s=60.0)], 5, LINK, [ToldSteps(5, (0.4,) * 10, 0.0, buckets)])
    assert (paused.step_ms, paused.dense_step_ms) == pytest.approx((1000, 600 + 601))
    lost = [*samples, samples[0]._replace(step_s=3.0, exposed_s=2.4)]
    told = ToldSteps(5, (0.4,) * 9 + (2.4,), 0.0, buckets)
    assert summarise(lost, 5, LINK, [told]).step_ms == pytest.approx(1000 + 200)


def test_only_steps_that_all_ranks_have_told_of_count() -> None:
    buckets = (Ready(0.0, 600_000),)
    samples = [Sample(float(i), 0.5, 0.0, 0.5, 1, 8, buckets) for i in range(10)]
    other = ToldSteps(12, (0.1, 0.2, 0.3), 0.0, buckets)  # of this rank's steps 10 to 19 those from 12 to 14
    assert summarise(samples, 10, LINK, [other]).step_ms == pytest.approx(1000 * (2.8 + 0.2))
    late = other._replace(first=18)
    assert summarise(samples, 10, LINK, [late]).dense_high_ms >= 1000 * (4.5 + 0.601)


class Store:
    """What `StepBoard` uses of a store, with a fault."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.is_gone = inner, False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise dist.DistNetworkError("gone")
        return getattr(self.inner, name)


def test_ranks_tell_each_other_through_the_store_and_nobody_waits() -> None:
    store = Store(HashStore())
    boards = [StepBoard(HashStore(), "here", rank, 3) for rank in range(3)]
    for board in boards:
        board._store = store  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    window = Window()
    window.samples.extend([Sample(1.0, 0.25, 0.125, 0.0, 1, 8, (Ready(-0.5, 16), Ready(0.0, 8)))] * 4)
    boards[1].tell(window, 9)
    assert boards[0].read() is None  # rank 2 has told nothing
    boards[2].tell(window, 9)
    told = ToldSteps(5, (0.25,) * 4, 0.125, (Ready(-0.5, 16), Ready(0.0, 8)))
    assert boards[0].read() == [told, told]
    for damaged in (
        "",
        "[]",
        "[5, [1], 2]",
        '[5, ["1"], 0, []]',
        "[5, [true], 0, []]",
        "[5, [1e9], 0, []]",
        "[" * 10_000,
    ):
        store.inner.set("1", damaged)
        assert boards[0].read() is None
    store.is_gone = True
    boards[1].tell(window, 9)
    assert boards[0].read() is None


def test_ranks_tell_at_every_step_at_first_and_seldom_later() -> None:
    store, told = HashStore(), []
    board = StepBoard(store, "here", 0, 2)
    other = StepBoard(store, "here", 1, 2)
    window = Window()
    for step in range(5, 305):
        window.samples.append(Sample(1.0, 0.25, 0.0, 0.0, 1, 8, ()))
        before = other.read()
        board.tell(window, step + 1)
        if other.read() != before:
            told.append(step + 1)
    assert told == [*range(6, 16), *range(20, 101, 10), 150, 200, 250, 300]


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


def test_the_first_bucket_of_ddp_is_small_and_the_others_are_not() -> None:
    window, stats = Window(Caps(100, 300)), Stats(steps=START_UP)
    window.end(0.0, stats)  # those before are start-up
    window.begin()
    for at in range(9):
        window.ready(float(at), 60)
    window.end(10.0, stats)
    assert [bucket.nbytes for bucket in window.samples[-1].buckets] == [120, 300, 120]
    assert [bucket.at_s for bucket in window.samples[-1].buckets] == [-7.0, -2.0, 0.0]
    assert Caps(100, 300).split(540) == [100, 300, 140]


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
    "cannot tell what it saves: the fp32 step is estimated at 90 to 400 ms; measure it with gradwire compare": a_report(
        with_steps(100, 200, 150, 90, 400)
    ),
    "pays on this link, but cannot tell how much it saves: the fp32 step is estimated at 150 ms or more; measure it "
    "with gradwire compare": a_report(with_steps(100, 200, 150, 150, math.inf)),
    "does not pay on this link, but cannot tell what it costs: the fp32 step is estimated at 30 to 90 ms; measure it "
    "with gradwire compare": a_report(with_steps(100, 60, 50, 30, 90)),
    "it is too early to say: ask again after 10 steps": a_report(steps=FEWEST_STEPS - 1),
    "it is too early to say: ask again after 10 windows": a_report(steps=FEWEST_STEPS - 1, period="window"),
    "saves about 300 ms a step: 4.0 times as many steps as DDP in fp32 in the same time": a_report(period="window"),
    "saves about 150 ms a step, but DDP in fp16 or bf16 saves as much and loses less: use DDP in fp16 or "
    "bf16": a_report(with_steps(250, 400, 252), period="window"),
    "does not pay on this link: its step is about 20 ms longer than that of DDP in fp32; use DDP": a_report(
        with_steps(100, 80, 78), period="window"
    ),
    "saves nothing: it sends 22.4 MB a step where DDP in fp32 sends 11.2 MB; use DDP": a_report(
        sent_bytes=22.4e6, period="round"
    ),
    "cannot tell what it saves: the step of DDP in fp32 is estimated at 90 to 400 ms; measure it with gradwire "
    "compare": a_report(with_steps(100, 200, 150, 90, 400), period="window"),
    "there is one rank: nothing is sent, and nothing can be saved": a_report(ranks=1, sent_bytes=0.0, dense_bytes=0.0),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_verdict(verdict: str) -> None:
    assert VERDICTS[verdict].verdict == verdict


def test_without_times_the_verdict_speaks_of_bytes() -> None:
    report = dataclasses.replace(a_report(), times=None)
    assert report.verdict == (
        "sends 7.7 times less than fp32; what time that saves is not estimated on a GPU, with FSDP2, or where the link "
        "was not timed"
    )
    assert report.saved_ms is None
    assert "waiting" not in str(report)


def test_a_large_residual_gets_a_word() -> None:
    large = a_report(residual_norm=2.35)
    assert large.advice is not None
    assert large.advice.startswith(
        "the residual is 4.7 times as large as a gradient, so what is sent is that many steps"
    )
    assert str(large).splitlines()[-1].startswith("  The residual is 4.7 times")
    assert "warmup=" in large.advice
    assert large.as_dict()["advice"] == large.advice
    assert a_report().advice is None
    assert "what a window changes" in str(a_report(residual_norm=2.35, period="window"))


def test_what_is_not_counted_is_said_in_the_table_and_in_the_verdict() -> None:
    report = dataclasses.replace(a_report(sent_bytes=11.2e6, uncounted="gathers of parameters"), times=None)
    assert report.verdict == "saves nothing: it sends what fp32 sends (not counted: gathers of parameters)"
    assert "not counted: gathers of parameters" in str(report).partition("Saves")[0]
    less = dataclasses.replace(report, sent_bytes=1e6)
    assert "less than fp32 (not counted: gathers of parameters)" in less.verdict


def test_where_models_are_combined_figures_are_those_of_a_step_and_are_called_so() -> None:
    text = str(a_report(period="window", steps_a_period=8.0, method="local:H=8,outer=int4"))
    head = text.splitlines()[0]
    assert head == "gradwire report: local:H=8,outer=int4, rank 0 of 4, windows 5 to 104 of 8 steps"
    assert "1.45 MB  a step, 11.6 MB a window; DDP in fp32 sends 11.2 MB in every step" in text
    assert "fp32 DDP step" in text
    assert "fp16, bf16 DDP step" in text
    assert "400 ms at the end of a window" in text


def test_windows_are_compared_with_ddp_in_every_step() -> None:
    """Four steps of 200 ms and an average of 400; DDP would take 1001 ms in each, and can hide 195 of them.

    Coding takes 10 of a step, of which half is assumed to make computing longer.
    """
    pace = WindowPace.of("window", {"w": torch.zeros(250_000)})
    for _ in range(8):
        pace.ended(4)
    samples = [Sample(1.2, 0.4, 0.04, 0.4, 4000, 8, (Ready(0.0, 10**6),))] * 8
    times = pace.times(samples, 5, LINK, [ToldSteps(5, (0.4,) * 8, 0.04, (Ready(0.0, 10**6),))])
    assert times is not None
    assert pace.sent_bytes(samples) == 1000
    assert times.step_ms == pytest.approx(300)
    assert times.exposed_ms == pytest.approx(100)
    assert times.dense_high_ms == pytest.approx(200 + 1001)
    assert times.dense_low_ms == pytest.approx(1001 - 5)
    assert times.dense_step_ms == pytest.approx((1001 + 1196) / 2)
    assert times.half_step_ms == pytest.approx((501 + 696) / 2, abs=1)
    assert times.tells
    assert dataclasses.replace(pace, waits=False).times(samples, 5, LINK, None) is None


def test_windows_of_several_lengths_count_by_their_own() -> None:
    pace = WindowPace.of("window", {"w": torch.zeros(250_000)})
    samples = [Sample(0.2 * h + 0.4, 0.4, 0.0, 0.4, 4000, 8, (Ready(0.0, 10**6),)) for h in (1, 2, 4, 8)]
    for length in (1, 1, 2, 4, 8):  # the first one was start-up
        pace.ended(length)
    times = pace.times(samples, 5, LINK, [ToldSteps(5, (0.4,) * 4, 0.0, (Ready(0.0, 10**6),))])
    assert times is not None
    assert times.dense_high_ms == pytest.approx(1201)
    assert pace.steps == 16


@dataclasses.dataclass(frozen=True)
class SentBytes(ModuleFigures):
    """What a module sends."""

    name: str
    sent_bytes: int

    @property
    @override
    def row(self) -> tuple[str, str, str]:
        return self.name, f"{self.sent_bytes} B", "a pass"


def test_the_text_and_the_mapping_have_modules_that_communicate_by_themselves() -> None:
    report = a_report(modules=(SentBytes("feed", 12), SentBytes("a longer name than others", 3)))
    lines = str(report).splitlines()
    assert sum(line.split() == ["feed", "12", "B", "a", "pass"] for line in lines) == 1
    assert len({line.index("a pass") for line in lines if line.endswith("a pass")}) == 1
    assert report.as_dict()["modules"][1] == {"name": "a longer name than others", "sent_bytes": 3}
    assert a_report().as_dict()["modules"] == []


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
        *("gradient_norm", "residual_ratio", "saved_ms", "advice"),
    }
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


# -------------------------------------------------------------------------------------------- real runs

JOBS = {
    "tiny": ("tiny", {}),
    "windows": ("windows", {"specs": ["local:H=4,outer=int4", "gossip:ring", "local:H=4,fragments=2"]}),
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


def test_a_report_of_averaged_models_has_the_spec_and_compares_with_ddp_in_every_step() -> None:
    for outcome in outcomes()["windows"]:
        averaged, gossip, parts = outcome["reports"]
        dense = averaged["gradient_bytes"]  # 2 (n - 1) / n with two ranks
        assert [found["method"] for found in (averaged, gossip, parts)] == [
            *("local:H=4,outer=int4", "gossip:ring", "local:H=4,fragments=2"),
        ]  # fmt: skip
        assert (averaged["period"], averaged["steps_a_period"]) == ("window", 4)
        assert (gossip["period"], gossip["steps_a_period"]) == ("round", 1)
        assert averaged["dense_bytes"] == gossip["dense_bytes"] == parts["dense_bytes"] == dense
        assert parts["sent_bytes"] == pytest.approx(dense / 4)
        assert averaged["sent_bytes"] == pytest.approx(dense / 4 / 8, rel=0.1)
        assert averaged["step_ms"] > 0
        assert parts["step_ms"] is None
        assert "DDP in fp32" in averaged["verdict"]
        assert "none" not in averaged["verdict"]


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
        assert found["residual_bytes"] == found["state_bytes"] >= found["saved_state_bytes"] > 0
        assert found["memory_bytes"] == found["state_bytes"] + found["buffer_bytes"] + found["pool_bytes"]
        assert "of residuals, " in found["text"]
        assert 0 < found["exposed_ms"] <= found["step_ms"]
        assert found["encode_ms"] > 0
        assert found["half_step_ms"] <= found["dense_step_ms"]
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


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(("rate", "delay", "late_s"), [("20mbit", "0", 0.0), ("20mbit", "50ms", 0.1)])
@pytest.mark.draw(1)
def test_the_estimate_of_the_fp32_step_is_what_fp32_takes_on_a_slow_link(rate: str, delay: str, late_s: float) -> None:
    def truth_and_told() -> tuple[float, list[dict[str, Any]]]:
        with Network(2, rate, delay=delay) as network:
            if network.mode == "paced":
                pytest.skip("connections are paced only after attach has measured them")
            arguments = {"spec": "int4", "late_s": late_s}
            ranks = run_function(f"{CASES}:beside_plain_steps", 2, arguments, 90, network)
        return statistics.median(1000 * rank["plain_s"] for rank in ranks), ranks

    unspoiled(truth_and_told, lambda found: all(is_right(told, found[0]) for told in found[1]))


def is_right(told: dict[str, Any], truth_ms: float) -> bool:
    """Whether a rank tells a step within 10% of the truth or says that it cannot, and the truth between its ends."""
    near = abs(told["dense_step_ms"] - truth_ms) <= 0.1 * truth_ms or "cannot tell" in told["verdict"]
    high_ms = math.inf if told["dense_high_ms"] is None else told["dense_high_ms"]
    pays = told["verdict"].startswith(("saves about", "pays on this link"))
    return near and pays and told["dense_low_ms"] <= 1.1 * truth_ms and high_ms >= 0.9 * truth_ms
