"""Runs that hang or die: who is named, with which stack; what a rank leaves when it ends, fails or is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from framework_runs import SETTINGS
from gradwire.core.rank_files import rank_file
from gradwire.flight import stacks_of
from gradwire.flight.record import read_record
from gradwire.ranks.rank_main import load
from gradwire.ranks.supervised import RankFailure, run_function

ROOT = Path(__file__).parent.parent
CASES = str(Path(__file__).with_name("flight_cases.py"))
SEEDS = (0, 1, 2)


@pytest.fixture
def hangs() -> ModuleType:
    """The script of the benchmarks, which has the trials. A longer path for imports would want warm processes anew."""
    return sys.modules[load(f"{ROOT / 'benchmarks' / 'hangs.py'}:run_at_once").__module__]


@pytest.mark.turns("trials", 1)
def test_the_rank_at_fault_is_named_with_its_stack_in_time(hangs: ModuleType) -> None:
    trials = [hangs.Trial.of(kind, seed) for seed in SEEDS for kind in hangs.KINDS]
    assert {str(trial): outcome.wrong for trial, outcome in hangs.run_at_once(trials).items() if outcome.wrong} == {}


def alone(case: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    (found,) = run_function(f"{CASES}:{case}", 1, {"folder": str(folder), **arguments}, 60)
    return found


@pytest.mark.parametrize(("how", "function"), [("sleeping", "sleeps_in_c"), ("stuck", "is_stuck_in_c")])
def test_sigterm_ends_a_rank_inside_of_c_code_and_leaves_its_record(how: str, function: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        alone("terminated", tmp_path, how=how)
    assert failure.value.status == -15
    record = read_record(rank_file(tmp_path, 0))
    assert (record.state, record.why, record.own) == ("died", "was ended by SIGTERM", False)
    assert record.threads[0].name == "MainThread"
    assert function in " ".join(record.threads[0].frames)


@pytest.mark.one_draw_in(2)
def test_a_rank_that_sleeps_answers_who_asks_from_another_terminal(tmp_path: Path) -> None:
    told = alone("asked", tmp_path)
    assert told["status"] == 0
    (line,) = told["found"]["lines"]
    assert line["why"] == "asked by gradwire stacks"
    assert "time.sleep(1.0)" in line["main_stack"]
    assert line["doing"].startswith("is after step 0 of gradwire.Session for ")
    assert "in asked (flight_cases.py:" in line["doing"]


def test_a_forked_process_is_no_rank_and_its_signals_are_its_own(tmp_path: Path) -> None:
    assert alone("forks", tmp_path) == {"status": 15, "state": "running"}
    assert read_record(rank_file(tmp_path, 0)).state == "ended"
    assert stacks_of(tmp_path).sentence == "no rank differs: rank 0 ended well"


def test_a_handler_of_the_script_stays_and_the_record_is_written(tmp_path: Path) -> None:
    assert alone("own_handler", tmp_path) == {"called": [15], "state": "died"}


def test_an_exception_is_in_the_record_and_another_session_begins_anew(tmp_path: Path) -> None:
    found = alone("raises", tmp_path)
    assert found["died"] == ["died", True, "ValueError: the script's own", True]
    assert found["events"] == [["step began", "", 0], ["step ended", "", 0]]
    assert found["went on"] == "running"
    assert found["same run"]


def test_an_exception_that_nobody_catches_is_in_the_record(tmp_path: Path) -> None:
    found = alone("unhandled", tmp_path)
    assert found == {"state": "died", "why": "KeyError: 'nobody catches it'", "own": True}


def test_a_run_goes_on_where_no_records_can_be_written(tmp_path: Path) -> None:
    (said,) = alone("cannot_write", tmp_path)["said"]
    assert said.startswith(f"no records of this run can be written: {tmp_path / 'file'}: ")


SCRIPT = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def waits_for_data():
    time.sleep(60)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(4):
    if step == 2 and dist.get_rank() == 1:
        waits_for_data()
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.turns("trials", 1)
def test_gradwire_run_keeps_records_of_a_script_as_it_is(tmp_path: Path) -> None:
    script, records = tmp_path / "script.py", tmp_path / "records"
    script.write_text(SCRIPT)
    options = ["--method", "int4", "--nproc", "2", "--deadline", "4", "--records", str(records)]
    command = [sys.executable, "-m", "gradwire", "run", *options, str(script)]
    environment = os.environ | SETTINGS
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert "rank 1 answers, but has handed over no gradients" in ended.stderr
    assert "in waits_for_data (script.py:6)" in ended.stderr
    found = stacks_of(records)
    assert (found.kind, found.ranks) == ("behind", (1,))
    assert "in waits_for_data (script.py:6)" in found.sentence
    assert "time.sleep(60)" in found.lines[1].main_stack
