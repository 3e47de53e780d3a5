"""A run that goes on: what its ranks tell, and what is made of it."""

from __future__ import annotations

import io
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import gradwire
from gradwire.cli import watch as watch_command
from gradwire.cli.main import main, parser
from gradwire.cli.watch import run_watch
from gradwire.core.errors import StepError
from gradwire.profiling import ProfileError
from gradwire.profiling.history import History
from gradwire.profiling.live import read_live
from gradwire.ranks.supervised import run_function
from gradwire.watch import Follower, RunServer, RunView, page, words
from live_runs import four_ranks, step, writer

CASES = str(Path(__file__).with_name("profile_cases.py"))
EVIL = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with four_ranks(tmp_path):
        yield tmp_path


def told(folder: Path) -> RunView:
    return Follower(folder).view()


def said(view: RunView) -> list[str]:
    return [each.text for each in words.findings(view)]


# What ranks tell --------------------------------------------------------------------------------------------------


def test_memory_of_a_course_is_bounded_and_its_means_are_those_of_all_steps() -> None:
    history = History(most=8)
    for index in range(1000):
        history.add(index, float(index))
    points = history.points()
    assert len(points) <= 8
    assert history.stride == 128
    assert points[3] == (384, sum(range(384, 512)) / 128)
    history.add(1000, math.nan)
    assert history.points()[-1] == (896, "nan")
    json.dumps(history.points(), allow_nan=False)


def test_a_file_of_a_long_run_is_no_larger_than_that_of_a_short_one(tmp_path: Path) -> None:
    rank = writer(tmp_path, 0, 1)
    sizes = list[int]()
    for stretch in range(2):
        for index in range(3000 * stretch, 3000 * (stretch + 1)):
            rank.step(step(index, 0.01))
            rank.log(index, {"loss": 1 / (index + 1)})
        rank.tell()
        sizes.append((tmp_path / "live" / "rank0.json").stat().st_size)
    rank.stop()
    assert sizes[1] < min(1.2 * sizes[0], 40_000)


def test_a_profile_tells_of_its_steps_and_of_how_it_ended(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(fails: bool) -> None:
        with gradwire.profile(model, tmp_path, live=True) as profile:
            assert told(tmp_path).ranks[0].state == "running"
            for number, batch in enumerate(profile.steps(torch.randn(2, 4) for _ in range(6))):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                profile.log(loss=loss, rate=0.1)
                if fails and number == 3:
                    raise ValueError(f"planted\nin {EVIL}")

    train(fails=False)
    view = told(tmp_path)
    assert (view.steps, view.world_size, view.is_over, view.failed) == (6, 1, True, None)
    assert [index for index, _ in view.scalars["loss"]] == list(range(6))
    assert view.scalars["rate"][-1] == (5, pytest.approx(0.1))
    assert words.headline(view) == "The run has ended well after 6 steps"
    assert view.ranks[0].parts_ms["compute"] > 0
    with pytest.raises(ValueError, match="planted"):
        train(fails=True)
    view = told(tmp_path)
    assert words.headline(view) == "Rank 0 failed in step 3: ValueError: planted"
    assert main(["watch", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (SystemExit(0), "ended", ""),
        (SystemExit(), "ended", ""),
    ],
    ids=repr,
)
def test_how_a_run_ended_is_told(tmp_path: Path, error: BaseException, state: str, why: str) -> None:
    writer(tmp_path, 0, 1).stop(error)
    rank = told(tmp_path).ranks[0]
    assert (rank.state, rank.error) == (state, why)


def test_what_a_script_logs_is_a_number(tmp_path: Path) -> None:
    with gradwire.profile(nn.Linear(2, 2), tmp_path, live=True) as profile:
        profile.log(loss=torch.ones(1, 1, requires_grad=True), bad=math.inf)
        with pytest.raises(
            StepError, match=r"log\(loss=...\) takes a number, or a tensor of one element, not a tensor"
        ):
            profile.log(loss=torch.ones(2))
        with pytest.raises(StepError, match="not 'much'"):
            profile.log(loss="much")  # pyright: ignore[reportArgumentType]
        with pytest.raises(StepError, match="keeps 16 names"):
            profile.log(**{f"value{number}": 1.0 for number in range(15)})
    view = told(tmp_path)
    assert view.scalars == {"loss": [(0, 1.0)], "bad": [(0, math.inf)]}
    assert "bad is not finite from about step 0 on." in said(view)
    assert view.to_builtins()["scalars"]["bad"] == [[0, "inf"]]
    gradwire.profile(nn.Linear(2, 2), tmp_path).log(loss="unread, as nobody watches")  # pyright: ignore[reportArgumentType]


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "live").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="gradwire watch sees nothing of this rank"):
        rank = writer(tmp_path, 0, 1)
    rank.step(step(0, 0.01))
    with pytest.warns(UserWarning, match="sees nothing"):
        rank.stop()


# What is made of it -----------------------------------------------------------------------------------------------


def test_the_rank_that_waits_least_is_the_one_that_others_wait_for(folder: Path) -> None:
    view = told(folder)
    assert [rank.caused_ms for rank in view.ranks] == pytest.approx([0, 0, 30, 0])
    assert view.ranks[0].parts_ms == pytest.approx({"data": 10, "compute": 40, "transfer": 20, "wait": 30})
    assert view.ranks[2].parts_ms == pytest.approx({"data": 10, "compute": 70, "transfer": 20, "wait": 0})
    assert view.scalars["loss"] == [(index, pytest.approx(11.5 - index)) for index in range(10)]
    assert view.ranks[0].sent_bytes == 1500  # of a ring of four
    host = view.ranks[2].host
    assert said(view) == [f"The others wait 30 ms a step (30% of it) for rank 2 on {host}."]
    assert words.headline(view) == "10 steps, 100 ms each"


def edit(folder: Path, rank: int, /, **changed: Any) -> Path:
    """Change what a rank has told."""
    path = folder / "live" / f"rank{rank}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return path


def test_a_rank_that_writes_no_more_is_named_and_so_is_what_another_one_does_for_long(folder: Path) -> None:
    edit(folder, 1, doing="data", doing_s=31.0)
    for rank in (2, 3):
        edit(folder, rank, doing="backward", doing_s=30.0)
    written_s = time.time() + 60
    for rank in range(1, 4):
        os.utime(folder / "live" / f"rank{rank}.json", (written_s, written_s))
    now = [written_s + 2]
    follower = Follower(folder, lambda: now[0])
    faults = [each.text for each in words.findings(follower.view()) if each.is_fault]
    host = follower.view().ranks[1].host
    assert faults == [
        "Rank 0 has written nothing for 1 min 2 s: killed or stopped, or the folder can be written to no more.",
        f"Rank 1 on {host} is waiting for data for 31 s; gradwire stacks tells where.",
        "Ranks 2 and 3 are in the backward pass for 30 s; gradwire stacks tells where.",
    ]
    edit(folder, 0)
    now[0] += 1.0
    assert not follower.view().ranks[0].is_silent  # by our clock, whatever the clock of who keeps the files says
    now[0] += 100.0
    assert words.headline(follower.view()) == "Nothing has come for 1 min 40 s, after 10 steps"
    assert not follower.view().is_over
    edit(folder, 3, state="failed", error="CommunicationError: rank 1 fell silent")
    edit(folder, 2, state="failed", error="ValueError: planted")
    view = follower.view()
    assert view.is_over
    assert words.headline(view) == "Rank 2 failed in step 10: ValueError: planted"
    assert any(text.startswith("Rank 3 on") and "failed too" in text for text in said(view))


def test_large_residuals_and_missing_ranks_are_said(folder: Path) -> None:
    edit(folder, 1, residual=[[8, 42.0]], gradient=10.0)
    (folder / "live" / "rank3.json").unlink()
    found = said(told(folder))
    assert "What rank 1 owes is 4.2 times the norm of its gradient: see session.report()." in found
    assert "Rank 3 of 4 have told nothing" not in found
    assert "Rank 3 has told nothing in this folder." in found


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"run": "run", "rank": 1', "is damaged, or no live record: remove it"),
        ('{"run": "run"}', "has no 'rank', so it is no live record"),
        (b"\xff\xfe", "is damaged"),
        ("[" * 100_000, "is damaged|list|mapping"),
        (" " * (1 << 20) + "1", "more than 1 MiB"),
    ],
    ids=["cut", "fields", "bytes", "deep", "large"],
)
def test_a_damaged_record_is_one_sentence_and_the_others_are_shown(folder: Path, content: Any, why: str) -> None:
    path = folder / "live" / "rank1.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProfileError, match=why):
        read_live(path)
    view = told(folder)
    assert [rank.rank for rank in view.ranks] == [0, 2, 3]
    assert len(view.problems) == 1
    assert str(path) in view.problems[0] or path.name in view.problems[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 2},
        {"world_size": 1},
        {"steps": -1},
        {"state": "<b>"},
        {"step_ms": [[0, "x"]]},
        {"scalars": {"loss": [[0, "<b>"]]}},
        {"last": [[0, -1, 0, 0, 0, 0, 0]]},
    ],
    ids=str,
)
def test_a_record_whose_fields_mean_nothing_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ProfileError):
        read_live(edit(folder, 1, **changed))


def test_files_of_an_earlier_run_are_left_out(folder: Path) -> None:
    for rank in range(2, 4):
        path = edit(folder, rank, run="yesterday", world_size=8)
        os.utime(path, (1e9, 1e9))
    view = told(folder)
    assert [rank.rank for rank in view.ranks] == [0, 1]
    assert list(view.problems) == ["The files of ranks 2 and 3 are of an earlier run, and are left out."]


def test_a_folder_without_records_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "start the run with gradwire.profile(..., live=True)" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--json"]) == 2
    assert "give --once too" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--once", "--serve"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["run", "--method", "int4", "--live", "train.py"]) == 2
    assert "--live goes with --profile DIR" in capsys.readouterr().err


def test_the_terminal_and_programs_see_the_same_and_no_name_moves_the_cursor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, 2, host=EVIL, scalars={EVIL: [[0, 1.0]]}, methods=[EVIL])
    assert main(["watch", str(folder), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "for rank 2 on <script>alert(1)</script>?[2J." in printed
    assert "\x1b[2J" not in printed
    assert main(["watch", str(folder), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][2]["caused_ms"] == pytest.approx(30)
    assert found["steps"] == 10


# The page ---------------------------------------------------------------------------------------------------------


def test_the_page_escapes_whatever_ranks_have_told(folder: Path) -> None:
    evil = {"host": EVIL, "error": EVIL, "doing": EVIL, "methods": [EVIL], "doing_s": 1e4}
    for rank in range(4):
        edit(folder, rank, scalars={EVIL: [[0, 1.0], [1, 2.0]]}, state=("failed", "running")[rank % 2], **evil)
    text = page.body(told(folder))
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 8
    assert "\x1b" not in text


def test_a_page_of_many_ranks_draws_those_that_are_waited_for_and_lists_all(tmp_path: Path) -> None:
    ranks = [writer(tmp_path, rank, 64) for rank in range(64)]
    for rank, each in enumerate(ranks):
        each.step(step(0, 0.02 if rank == 40 else 0.05))
        each.log(0, {"loss": math.nan})
        each.stop()
    text = page.body(told(tmp_path))
    assert "Shown are 16 of 64 ranks" in text
    assert "loss NaN" in text.replace("Loss", "loss")
    assert "No value was finite." in text
    assert all(f'<th scope="row">rank {rank}</th>' in text for rank in range(64))
    assert "rank 40: transfer" in text


# The command ------------------------------------------------------------------------------------------------------


def test_a_terminal_shows_the_ranks_that_stand_out(tmp_path: Path) -> None:
    ranks = [writer(tmp_path, rank, 64) for rank in range(64)]
    for rank, each in enumerate(ranks):
        each.step(step(0, 0.02 if rank == 40 else 0.05))
        each.stop(ValueError("planted") if rank == 50 else None)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=160, height=20)
    assert run_watch(parser().parse_args(["watch", str(tmp_path)]), console) == 1
    last = shown.getvalue()
    assert "Rank 50 failed in step 1: ValueError: planted" in last
    assert "The others wait 30 ms a step (30% of it) for rank 40 on" in last
    assert "rank 40 " in last
    assert "rank 63 " not in last
    assert "ranks more, which the others wait for less" in last


def test_the_address_of_the_page_is_printed_and_an_interrupt_ends_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(served: RunServer) -> None:
        urls.append(served.url)
        raise KeyboardInterrupt

    urls = list[str]()
    monkeypatch.setattr(RunServer, "serve_forever", interrupted)
    assert main(["watch", str(folder), "--serve"]) == 0
    assert f"page: {urls[0]}\n" in capsys.readouterr().out


# Real ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
def test_a_run_of_two_ranks_is_followed_from_its_beginning_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_command, "EVERY_S", 0.05)
    monkeypatch.setattr(watch_command, "LINE_EVERY_S", 0.0)
    statuses = list[int]()
    command = ["watch", str(tmp_path), "--wait", "110"]
    thread = threading.Thread(target=lambda: statuses.append(main(command)), daemon=True)
    thread.start()
    run_function(f"{CASES}:told", 2, {"folder": str(tmp_path), "sleeps_s": [0.0, 0.05]}, 120)
    thread.join(20)
    lines = capsys.readouterr().out.splitlines()
    assert statuses == [0]
    assert lines[-1].startswith("The run has ended well after 60 steps. loss ")
    assert any(" steps, " in line and "loss " in line for line in lines[:-1]), "nothing was said while the run went on"
    view = told(tmp_path)
    late = view.ranks[1]
    assert late.caused_ms > 20
    assert view.ranks[0].caused_ms < 10
    assert late.parts_ms["compute"] > 45
    assert 5 < (late.ratio or 0) < 9  # int4 and its scales
    assert len(view.scalars["loss"]) == 60
    assert all(rank.residual_norm and rank.gradient_norm for rank in view.ranks)
