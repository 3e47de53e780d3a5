"""Overlap: what is measured of it, models that nobody wraps, optimizers that step early, and what `tune` finds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from gradwire.cli.main import main
from gradwire.drivers.traced import Span
from gradwire.network.loopback import loopback_environments
from gradwire.overlap import Overlap, OverlapSettings, Timings, Tuned, covered_s, hidden_share
from gradwire.overlap.subjects import Subject
from gradwire.overlap.tuning import Search
from gradwire.ranks.supervised import run_function, run_ranks

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
    for last, after in zip(second["spans"][2::3], first["spans"][3::3], strict=False):
        assert after[0] >= last[1]  # a quick rank takes no processor from a slow one that is still timed
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


# Models that nobody wraps -----------------------------------------------------------------------------------------

SPECS = ["none", "int4", "topk:0.05", "powersgd:2"]


@functools.cache
def in_order(ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run("in_order", ranks, specs=SPECS, folder=folder)


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_that_goes_on_takes_the_order_from_the_save_and_is_exact(spec: str) -> None:
    for own in in_order(2):
        found = own[spec]
        assert found["at"] == 3
        assert found["resumed"] == found["whole"] == in_order(2)[0][spec]["whole"]
        assert found["units_resumed"] == found["units"]


def test_grains_follow_the_order_in_which_gradients_become_ready() -> None:
    for own in in_order(2):
        assert [name.partition(".")[0] for name in own["int4"]["order"]] == ["b", "b", "head", "head", "a", "a"]
        assert own["int4"]["planned"] != own["int4"]["units"]
        assert own["int4"]["units"][0].startswith("b.")


def test_the_order_of_rank_0_counts_on_all() -> None:
    found = run("rank_0_decides", 3)
    assert len({tuple(each["order"]) for each in found}) == 1
    assert len({each["mean"] for each in found}) == 1
    assert [name.partition(".")[0] for name in found[0]["order"]] == ["b", "b", "head", "head", "a", "a"]


def test_gradients_add_up_in_no_sync_and_what_is_not_used_counts_as_zeros() -> None:
    for found in run("accumulated", 2):
        assert (found["idle"], found["steps"]) == (0, 2)
        assert found["close"]
        assert found["partly"]


def test_a_pass_that_breaks_off_is_told_to_all() -> None:
    first, second = run("broken_off", 2)
    assert second == "ValueError: no gradient today"
    assert "rank 1 failed with StepError: an exception ended the backward pass" in first


def test_what_cannot_be_served_is_refused_with_what_to_do() -> None:
    for said in run("refused", 2):
        assert "seed all ranks alike before the model is made" in said["parameters"]
        assert "LBFGS is none: leave it out" in said["lbfgs"]
        assert "the optimizer has no parameter 'b.weight'" in said["others"]
        assert "does not go with scaler=" in said["scaler"]
        assert 'does not go with on_non_finite="skip"' in said["skip"]
        assert "'0' of this model is a DistributedDataParallel" in said["part"]
        assert "pass use_reentrant=False to checkpoint" in said["reentrant"]


# Optimizers that step early ---------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(3)
def test_parameters_stepped_as_their_means_come_end_at_the_bits_of_one_step() -> None:
    for own in run("early", 2, specs=["none", "int4"]):
        for found in own.values():
            after, before = found["ends"]
            assert before == after
            assert found["stepped"] == 5 * 6  # six parameters in five steps
            assert found["calls"] > 5  # and not all at once
            assert found["held"] == 6


# Tuning -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
def test_models_are_tuned_alike_on_all_ranks_and_left_as_they_were(tmp_path: Path) -> None:
    first, second = run("tuned", 2, folder=str(tmp_path))
    for name, found in first.items():
        assert found["settings"] == second[name]["settings"]
        assert found["text"] == second[name]["text"]
        assert found["mean"] == second[name]["mean"]  # of gradients, after attach by what was found
        assert (found["same"], found["kept"], found["random"], found["overlap"]) == (True, True, True, True)
        assert found["tried"] > 2
        assert "of communication are exposed" in found["text"]
    assert first["unwrapped"]["settings"]["order"][0].startswith("norm.")
    assert "order" not in first["ddp"]["settings"]


def test_sharded_models_are_tuned_by_how_far_ahead_they_gather() -> None:
    for found in run("sharded_tuned", 2):
        assert found["depths"] == [None, 1, 2, 3]
        assert found["ahead"] == [2, 2, 2, 1, 0]
        assert found["behind"] == [0, 1, 2, 2, 2]
        assert found["overlap"] is None


def test_buckets_and_waves_follow_settings_that_were_given_and_those_of_a_save(tmp_path: Path) -> None:
    for found in run("buckets_follow", 2, folder=str(tmp_path)):
        assert found["default"] == [3090]
        assert found["loaded"] == found["given"] == found["plain"] == [930, 2160]  # the first one ends first
        assert found["alike"]


def test_there_is_nothing_to_tune_where_nothing_is_communicated() -> None:
    for said in run("nothing_to_tune", 2):
        assert 'or name the method that attach will be given, as in tune(model, batch, "int4")' in said["unwrapped"]
        assert "its process group has one rank; start the script on two or more" in said["alone"]
        assert "has a communication hook already" in said["attached"]
        assert "rounds=0 and stretch=3 must be 1 or more" in said["rounds"]
        assert "apply takes a DistributedDataParallel" in said["apply"]


@pytest.mark.one_draw_in(4)
def test_the_command_tunes_a_task_under_a_launcher(tmp_path: Path) -> None:
    out, printed = tmp_path / "overlap.json", list[tuple[int, str]]()
    words = ["overlap", "--task", "digits", "--method", "int8", "--rounds", "1", "--out", str(out)]
    run_ranks(
        [[sys.executable, "-m", "gradwire", *words]] * 2,
        [{**place, "GRADWIRE_TIME_LINK": "0"} for place in loopback_environments(2)],
        log_dir=tmp_path,
        deadline_s=240,
        on_line=lambda rank, line: printed.append((rank, line)),
    )
    assert any("of communication are exposed: overlap efficiency" in line for _, line in printed)
    assert {rank for rank, _ in printed} == {0}
    OverlapSettings.load(out)


def test_the_command_wants_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["overlap", "--method", "int4"]) == 1
    assert "one rank communicates nothing" in capsys.readouterr().err


class Scripted(Subject):
    """A model whose steps take what a table says."""

    def __init__(self, seconds: dict[int | None, list[float]]) -> None:
        self.group, self.device, self.now = None, torch.device("cpu"), OverlapSettings()
        self.seconds = seconds

    @property
    def knobs(self) -> list[Callable[[OverlapSettings], list[OverlapSettings]]]:
        return [self.others]

    def others(self, now: OverlapSettings) -> list[OverlapSettings]:
        return [dataclasses.replace(now, bucket_bytes=size) for size in self.seconds if size is not None]

    def apply(self, settings: OverlapSettings) -> None:
        raise AssertionError("the watch makes no steps")

    def step(self) -> None:
        return

    def close(self) -> None:
        return


class Told:
    """A watch that reads the table."""

    def __init__(self, subject: Scripted) -> None:
        self._subject, self.calls = subject, list[list[int | None]]()

    def interleaved(self, jobs: dict[str, Any], rounds: int, stretch: int, untimed: int) -> Timings:
        sizes = [inspect.getclosurevars(job).nonlocals["settings"].bucket_bytes for job in jobs.values()]
        self.calls.append(sizes)
        return Timings({name: self._subject.seconds[size][:rounds] for name, size in zip(jobs, sizes, strict=True)})


def searched(seconds: dict[int | None, list[float]]) -> tuple[Tuned, list[list[int | None]]]:
    subject = Scripted(seconds)
    search = Search(subject, rounds=5, stretch=1)
    search.watch = watch = Told(subject)  # type: ignore[assignment]
    return search.run(), watch.calls


FLAT = [0.100, 0.101, 0.099, 0.100, 0.100]


def test_the_best_is_taken_where_it_gains_clearly() -> None:
    table = {None: 1.0, 7: 0.8, 8: 0.85, 9: 2.0}
    found, calls = searched({size: [times * second for second in FLAT] for size, times in table.items()})
    assert found.settings == OverlapSettings(bucket_bytes=7)
    assert found.gain == pytest.approx(0.2)
    assert calls == [[None, 7, 8, 9], [None, 7, 8], [None, 7]]  # what is far behind is left out
    assert str(found) == "bucket_bytes=7: a pass takes 80.0 ms, 20.0% less than by default (100.0 ms)"


def test_the_default_stays_where_nothing_is_clearly_better() -> None:
    noisy = [0.05, 0.15, 0.06, 0.14, 0.09]
    found, _ = searched({None: FLAT, 7: [0.99 * second for second in FLAT], 8: noisy})
    assert found.settings == OverlapSettings()
    assert found.gain == 0.0
    assert str(found).startswith("the defaults stay: a pass takes 100.0 ms, and none of 3 trials")


# Settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_kept_in_a_file_and_what_is_none_is_refused(tmp_path: Path) -> None:
    settings = OverlapSettings(order=("b", "a"), grain_numel=1000, prefetch=2)
    settings.save(tmp_path / "overlap.json")
    assert OverlapSettings.load(tmp_path / "overlap.json") == settings
    assert OverlapSettings.of({"unknown of a later version": 3}) == OverlapSettings()
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(gradwire.StateError, match=r"other.json holds no settings of overlap: give a file"):
        OverlapSettings.load(tmp_path / "other.json")
    with pytest.raises(gradwire.StateError, match=r"missing.json cannot be read: No such file"):
        OverlapSettings.load(tmp_path / "missing.json")
    wrongs: list[tuple[object, str]] = [
        ({"order": [1]}, "the overlap's order"),
        ({"bucket_bytes": 0}, "bucket_bytes should be a whole number from 1"),
        ({"waves_in_flight": "many"}, "waves_in_flight should be a whole number"),
        ([1], "the overlap should be a mapping"),
    ]
    for wrong, sentence in wrongs:
        with pytest.raises(gradwire.StateError, match=sentence):
            OverlapSettings.of(wrong)
