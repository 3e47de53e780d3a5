"""Where a step goes: the critical path, whom waits are for, clocks, the trace, and profiles of real ranks."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework_runs import EXAMPLES, run_two
from gradwire.cli.main import main
from gradwire.core.json_file import read_json
from gradwire.core.rank_files import rank_file
from gradwire.profiling import (
    ClockReading,
    ProfileError,
    RankRecord,
    StepRecord,
    account,
    chrome_trace,
    read_records,
    summary,
)
from gradwire.profiling.account import critical_path
from gradwire.profiling.unfinished import UnfinishedSteps
from gradwire.ranks.supervised import run_function
from gradwire.report.profile import render
from gradwire.topology import MeasuredPair
from gradwire.watch import Follower
from profile_records import record, step, wire

CASES = str(Path(__file__).with_name("profile_cases.py"))


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 120)


# The account ------------------------------------------------------------------------------------------------------


def test_the_critical_path_is_disjoint_and_has_communication_where_the_loop_waits() -> None:
    path = critical_path(step(0))
    assert [(span.kind, span.what, span.began_s, span.ended_s) for span in path] == [
        ("train", "data", 0, 1),
        ("train", "forward", 1, 3),
        ("train", "backward", 3, 5),  # coding before the wait lies behind the backward pass, and costs nothing
        ("wait", "AllReduce", 5, 9),
        ("decode", "pause", 9, 9.5),
        ("train", "optimizer", 9.5, 10),
    ]


def test_a_wait_is_for_the_rank_that_comes_last_and_then_for_bytes() -> None:
    found = account([record(0, step(0)), record(1, step(0, late_s=3.0))])
    early, late = found.ranks
    assert early.waited_for == {1: 3.0}
    assert (early.seconds["wait"], early.seconds["transfer"]) == (3.0, 1.0)
    assert late.waited_for == {}
    assert (late.seconds["wait"], late.seconds["transfer"]) == (0.0, 1.0)
    assert early.accounted == late.accounted == 1.0
    assert found.caused_s(1) == 3.0
    assert found.caused_s(0) == 0.0


def test_a_rank_that_takes_no_part_in_a_collective_is_not_waited_for() -> None:
    def of(late_s: float, peers: tuple[int, ...]) -> StepRecord:
        plain = step(0, late_s)
        spans = plain.communication[0]
        moved = [span._replace(peers=peers) if span.kind in ("wire", "wait") else span for span in spans]
        return StepRecord(0, plain.began_s, plain.ended_s, plain.loop, plain.waits, [moved])

    steps = [of(0.0, (0, 1)), of(1.0, (0, 1)), of(3.5, (2, 3)), of(0.0, (2, 3))]
    found = account([record(rank, each, size=4) for rank, each in enumerate(steps)])
    assert found.ranks[0].waited_for == {1: 1.0}
    assert found.ranks[3].waited_for == {2: 3.5}


def test_overlap_counts_what_the_loop_waited_through() -> None:
    spans = wire(4.0, 5.0, 9.0) + wire(4.5, 9.0, 9.5)
    plain = step(0)
    found = account([record(0, StepRecord(0, 0, 10, plain.loop, plain.waits, [spans]), size=1)])
    assert found.ranks[0].in_flight_s == 5.5
    assert found.ranks[0].exposed_s == 4.5
    assert found.ranks[0].efficiency == pytest.approx(1 / 5.5)


def test_first_steps_do_not_count_and_steps_that_a_rank_lacks_neither() -> None:
    found = account([record(0, *map(step, range(6))), record(1, *map(step, range(1, 5)))], skip=2)
    assert found.steps == 3
    assert account([record(0, step(0))], skip=3).steps == 1  # there are no others


def test_a_slow_rank_is_named_with_why() -> None:
    slow = step(0, late_s=3.0)
    loop = [*slow.loop[:2], slow.loop[2], slow.loop[3]]
    text = summary(account([record(0, step(0)), record(1, StepRecord(0, 0, 10, loop, slow.waits, slow.communication))]))
    assert "The others wait 3000.0 ms a step for rank 1 on host1 (30% of a step), which computes and reads" in text
    assert "for rank 0" not in text


def test_a_slow_link_is_named() -> None:
    pairs = [(0, 1, 100e6), (0, 2, 10e6), (0, 3, 100e6), (1, 2, 10e6), (1, 3, 100e6), (2, 3, 10e6)]
    links = [MeasuredPair((one, other), 1e-4, 8 / rate) for one, other, rate in pairs]
    records = [replace(record(rank, step(0), size=4), links=links) for rank in range(4)]
    assert "The link of rank 2 is slow, and no other one: ranks 0 and 2: 10 Mbit/s" in summary(account(records))
    alike = [MeasuredPair(link.ranks, 1e-4, 8e-8) for link in links]
    assert "slow" not in summary(account([replace(each, links=alike) for each in records]))


def test_missing_ranks_are_said() -> None:
    assert "The records of ranks 1 and 2 are missing" in summary(account([record(0, step(0), size=3)]))


# Clocks -----------------------------------------------------------------------------------------------------------


def test_a_planted_skew_and_drift_are_found_to_a_millisecond_and_half_a_round_trip(tmp_path: Path) -> None:
    found = run("clocks", 3, folder=str(tmp_path), skew_s=7200.0, drift=2e-3)
    rounding = 1e-5
    assert max(abs(error_s) for error_s, _ in found) < 1e-3, found
    assert all(abs(error_s) <= trip_s / 2 + rounding for error_s, trip_s in found), found


def test_records_move_to_the_common_clock() -> None:
    kept = record(1, step(0), clock=[ClockReading(0.0, 100.0, 0.0), ClockReading(10.0, 101.0, 0.0)])
    steps = kept.steps_on_common_clock()
    assert list(steps) == [0]
    moved = steps[0]
    assert (moved.began_s, moved.ended_s) == (100.0, pytest.approx(111.0))
    assert moved.communication[0][-1].ended_s == pytest.approx(9.5 + 100.95)


# The trace --------------------------------------------------------------------------------------------------------


def events_of(records: list[RankRecord]) -> list[dict[str, Any]]:
    return json.loads(chrome_trace(records))["traceEvents"]


def test_spans_of_a_track_nest_and_arrows_have_two_ends() -> None:
    both = wire(4.0, 5.0, 9.0) + wire(4.5, 9.0, 9.5)  # overlap, and none lies within the other
    plain = step(0)
    steps = [StepRecord(0, 0, 10, plain.loop, plain.waits, [both]), step(1)]
    late = [StepRecord(0, 0, 10, plain.loop, plain.waits, [wire(6.0, 6.0, 9.0) + wire(7.0, 9.0, 9.5)]), step(1, 2.0)]
    events = events_of([record(0, *steps), record(1, *late)])
    assert_nested(events)
    arrows = defaultdict[int, list[str]](list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event["ph"])
            inside = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
            assert any(e["ts"] <= event["ts"] <= e["ts"] + e["dur"] for e in inside), event
    assert len(arrows) == 2
    assert all(sorted(ends) == ["f", "s"] for ends in arrows.values())


def assert_nested(events: list[dict[str, Any]]) -> None:
    tracks = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track, spans in tracks.items():
        open_until: list[float] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= began + 0.002:  # times are rounded to nanoseconds
                open_until.pop()
            assert not open_until or ended <= open_until[-1] + 0.002, (track, began, ended, open_until)
            open_until.append(ended)


# The page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_each_rank_and_escapes_whatever_hosts_are_called() -> None:
    records = [record(rank, step(0), step(1), size=12) for rank in range(12)]
    records[3] = RankRecord("run", 3, 12, "<script>alert(1)</script>", ["int4"], [], [step(0, late_s=3.0), step(1)])
    page = render(records, 0)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert all(f"rank {rank}" in page for rank in range(12))
    assert "Shown are 8 of 12 ranks" in page
    assert "A step takes 10,000\xa0ms, and 25% of it waits for bytes" in page


# Files ------------------------------------------------------------------------------------------------------------


def test_records_come_back_from_files_as_they_were(tmp_path: Path) -> None:
    kept = [record(0, step(0), clock=[ClockReading(0.0, 1.0, 0.1)]), record(1, step(0))]
    for each in kept:
        each.write(tmp_path)
    assert read_records(tmp_path) == kept


def test_files_that_are_none_of_a_profile_are_refused_in_a_sentence(tmp_path: Path, capsys: Any) -> None:
    assert main(["profile", str(tmp_path)]) == 2
    assert "holds no profile" in capsys.readouterr().err
    path = record(0, step(0)).write(tmp_path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ProfileError, match="cut off"):
        read_records(tmp_path)
    path.write_text(whole.replace('"index": 0', '"index": "x"'))
    with pytest.raises(ProfileError, match="whole number"):
        read_records(tmp_path)
    path.write_text(whole)
    other = RankRecord("another run", 1, 2, "host1", ["int4"], [], [step(0)])
    other.write(tmp_path)
    with pytest.raises(ProfileError, match="2 runs"):
        read_records(tmp_path)
    rank_file(tmp_path, 1).write_text(whole)
    with pytest.raises(ProfileError, match="two records of rank 0"):
        read_records(tmp_path)
    rank_file(tmp_path, 1).write_bytes(b"\xff\xfe" + whole.encode())
    with pytest.raises(ProfileError, match="no JSON"):
        read_records(tmp_path)


def test_records_without_a_step_that_all_ranks_have_are_refused_in_a_sentence(tmp_path: Path) -> None:
    record(0, step(0), step(1)).write(tmp_path)
    record(1).write(tmp_path)
    with pytest.raises(ProfileError, match=r"rank 1 kept no step.*remove what .* has of it"):
        read_records(tmp_path)
    record(1, step(2)).write(tmp_path)
    with pytest.raises(ProfileError, match="larger keep="):
        read_records(tmp_path)
    assert "call profile.step() after each step" in summary(account([record(1)]))


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "zeros.json.gz"
    path.write_bytes(gzip.compress(b"[" + b"0," * (1 << 20) + b"0]"))
    assert len(read_json(path, ProfileError, 1 << 22)) == (1 << 20) + 1
    with pytest.raises(ProfileError, match="more than 1 MiB"):
        read_json(path, ProfileError, 1 << 20)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ProfileError, match="cut off, or was not packed by gzip"):
        read_json(path, ProfileError, 1 << 22)
    with pytest.raises(ProfileError, match="No such file"):
        read_json(tmp_path / "none.json", ProfileError, 1 << 20)


# Real ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.draw(1)
@pytest.mark.parametrize("method", [None, "int4", "powersgd:2"])
def test_a_rank_that_computes_longer_is_named(tmp_path: Path, method: str | None, capsys: Any) -> None:
    found = run("trained", 2, folder=str(tmp_path), method=method, sleeps_s=[0.01, 0.06])[0]
    assert found["steps"] == 9  # the first three do not count
    assert found["caused_s"][1] > 0.03
    assert found["caused_s"][0] < 0.015
    assert found["ranks"][1]["loop"]["forward"] > 0.055
    assert all(0.5 < rank["accounted"] <= 1.0 + 1e-9 for rank in found["ranks"]), found  # 0.97 where nothing else runs
    assert all(rank["sent"] > 0 for rank in found["ranks"])
    assert main(["profile", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "for rank 1 on" in printed
    assert (tmp_path / "summary.txt").read_text().strip() in printed
    assert_nested(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


@pytest.mark.one_draw_in(2)
def test_what_fsdp2_itself_waits_for_is_told_apart_from_its_passes(tmp_path: Path) -> None:
    found = run("sharded", 2, folder=str(tmp_path), sleeps_s=[0.0, 0.1])[0]
    for method in ("plain", "int4"):
        figures = found[method]
        assert "AllGather" in figures["whats"]
        # Rank 0 waits for it in its first all-gather, or its last scatter.
        assert figures["caused_s"][1] > 0.05, figures
        assert figures["caused_s"][0] < 0.5 * figures["caused_s"][1]
        assert all(0.5 < rank["accounted"] <= 1.0 + 1e-9 for rank in figures["ranks"]), figures
        assert all(rank["sent"] > 0 for rank in figures["ranks"])
    assert found["plain"]["whats"] == ["AllGather", "ReduceScatter"]
    assert found["plain"]["methods"] == ["FSDP2's own collectives"]
    assert found["after"] == ["DefaultAllGather"] * 2 + ["DefaultReduceScatter"] * 2


def test_a_run_that_ends_in_mid_profile_leaves_what_each_rank_has(tmp_path: Path, capsys: Any) -> None:
    run("trained", 2, folder=str(tmp_path), method="int4", sleeps_s=[0.0, 0.0], fails_at=7)
    records = read_records(tmp_path)
    assert [len(each.steps) for each in records] == [7, 7]
    assert [len(each.clock) for each in records] == [1, 1]
    assert main(["profile", str(tmp_path)]) == 0
    assert "4 steps of" in capsys.readouterr().out


KILLED = """
import os, signal, sys
import torch
import gradwire
from gradwire.profiling import unfinished

unfinished.FLUSH_S = 0.0
model = torch.nn.Linear(4, 4)
with gradwire.profile(model, sys.argv[1], keep=5) as profile:
    for index, batch in enumerate(profile.steps(torch.ones(2, 4) for _ in range(20))):
        model(batch).sum().backward()
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_leaves_the_steps_before_its_last_writing(tmp_path: Path, capsys: Any) -> None:
    earlier = record(0, step(0), size=1)
    earlier.write(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    (found,) = read_records(tmp_path)
    assert found.unfinished
    assert [each.index for each in found.steps] == list(range(5, 13))  # two parts of five, of which one is not full
    assert {span.what for span in found.steps[-1].loop} >= {"data", "forward", "backward"}
    with rank_file_of_part(tmp_path).open("ab") as file:
        file.write(b'{"index": 13, "began')  # as a write that was cut off
    assert main(["profile", str(tmp_path)]) == 0
    assert "The end of rank 0 is missing" in (text := capsys.readouterr().out.replace("\n", " "))
    assert "that it had written is step 12" in text
    earlier.write(tmp_path)  # a whole record that is newer
    assert read_records(tmp_path) == [earlier]


def rank_file_of_part(folder: Path) -> Path:
    """The part that was written last."""
    return max(folder.glob("rank0.part*.jsonl"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("text", ["", "{}\n[1]\n", "no json\n", '{"run": 1}\n{"index": "x"}\n'])
def test_parts_that_are_none_are_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.part0.jsonl").write_text(text)
    with pytest.raises(ProfileError, match=r"rank0\.part0\.jsonl"):
        read_records(tmp_path)


def test_parts_hold_the_last_steps_and_go_when_the_block_ends(tmp_path: Path) -> None:
    steps = UnfinishedSteps(tmp_path, 0, record(0, size=1).to_json(), keep=4)
    for index in range(11):
        steps.add(step(index))
    (found,) = read_records(tmp_path)
    assert found.steps == [step(index) for index in range(8)]  # those since then are of the last two seconds
    assert account([found]).unfinished == {0: 7}
    steps.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_session_can_be_profiled_again_and_nothing_stays_behind(tmp_path: Path) -> None:
    texts = run("looped", 2, folder=str(tmp_path))[0]
    assert all(text.startswith("3 steps of") for text in texts)


@pytest.mark.one_draw_in(3)
@pytest.mark.draw(1)
@pytest.mark.parametrize("method", [[], ["--method", "int4"]], ids=["plain", "int4"])
def test_a_script_is_profiled_as_it_is(tmp_path: Path, method: list[str]) -> None:
    folder = tmp_path / "profile"
    words = ["-m", "gradwire", "run", "--profile", str(folder), "--live", *method, str(EXAMPLES / "train_ddp.py")]
    done = run_two([*words, "--folder", str(tmp_path)], tmp_path / "run")
    assert "gradwire profile" in done.logs[0]
    records = read_records(folder)
    assert [record.rank for record in records] == [0, 1]
    assert [len(record.clock) for record in records] == [2, 2]  # it ended before the process group did
    assert all(len(record.steps) == 20 for record in records)
    found = account(records, 3)
    assert found.steps == 17
    for rank in found.ranks:
        assert {"data", "forward", "loss", "backward", "optimizer"} <= set(rank.loop)
        assert rank.sent_bytes > 0
        assert 0 < rank.accounted <= 1.0 + 1e-9  # no time counts twice; benchmarks/profiling.py measures how much
    view = Follower(folder).view()
    assert (view.steps, view.is_over, view.failed, view.missing) == (20, True, None, [])


def test_a_script_needs_a_method_or_a_profile(capsys: Any) -> None:
    assert main(["run", str(EXAMPLES / "train_ddp.py")]) == 2
    assert "give --method SPEC, such as --method int4, or --profile DIR, or both" in capsys.readouterr().err
    assert main(["run", "--profile", "p", "--parameters", "int8", str(EXAMPLES / "train_ddp.py")]) == 2
    assert "--parameters goes with a --method" in capsys.readouterr().err
