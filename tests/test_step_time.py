"""Baselines that are timed over some of their steps: what is estimated, what is measured, and what says so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from comparisons import Silent, comparison, failed, run
from gradwire.cli import main as cli
from gradwire.cli.console import ConsoleView, show_table
from gradwire.compare import compare, merging, one_run, storage
from gradwire.compare.evidence import TimedInPart, timed_in_part
from gradwire.compare.figures import summarise
from gradwire.compare.options import CompareError, CompareOptions
from gradwire.compare.plan import make_plan
from gradwire.compare.results import Evaluation, ResultsError, Run
from gradwire.compare.run_folder import prepare_folder, store_run, stored_runs
from gradwire.compare.step_time import LEAST, PRECISION, WARM_UP, extended, is_known, step_time
from gradwire.compare.verdict import judge, to_json
from gradwire.core.errors import NetworkError
from gradwire.network import Network
from gradwire.network.wire import WireMeter
from gradwire.report.page import render

STEPS, TIMED = 40, WARM_UP + LEAST

TASK = """
import torch
from torch import nn
from gradwire.tasks.task import Task

def task(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 4))
    teacher = torch.randn(64, 4, generator=torch.Generator().manual_seed(9))
    def batch(step, rank, world_size):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x, (x @ teacher).argmax(1)
    held_out = batch(99, 0, 1)
    def metric(model):
        return float(nn.functional.cross_entropy(model(held_out[0]), held_out[1]))
    return Task(net, batch, nn.functional.cross_entropy, metric, clip_norm=1.0, evaluate_every=6)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "gradwire_timed_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "gradwire_timed_task:task"


# --------------------------------------------------------------------------------------- the arithmetic


def ends(seconds: list[float]) -> list[float]:
    """When steps that take so long have ended."""
    return [sum(seconds[: i + 1]) for i in range(len(seconds))]


def simulated(steps: int, noise: float, seed: int) -> list[float]:
    """Seconds of steps on a link: two slow ones at first, then a mean of one second."""
    drawn = random.Random(seed)
    return [3.0, 2.0, *(drawn.gauss(1.0, noise) for _ in range(steps - 2))]


def test_the_time_of_a_step_is_that_after_the_warm_up_and_known_once_its_error_is_small():
    quiet, loud = ends(simulated(STEPS, 0.02, 0)), ends(simulated(STEPS, 0.5, 0))
    assert step_time(quiet).mean == pytest.approx(1.0, abs=0.02)
    assert not is_known(quiet[: TIMED - 1], PRECISION)
    assert is_known(quiet[:TIMED], PRECISION)
    assert not is_known(loud, PRECISION)
    assert not is_known([0.0] * (TIMED - 1), 1.0)


def logs(seconds: list[float], timed: int | None) -> list[dict[str, Any]]:
    """What two ranks wrote whose steps took so long; after `timed` steps the links had no limit any more."""
    steps = len(seconds)
    counted = timed or steps
    taken = ends([each if timed is None or i < timed else 0.01 for i, each in enumerate(seconds)])
    sums = {
        "total": 100 * counted,
        "framing": 10 * counted,
        "payload": 88 * counted,
        "buffers": 0,
        "setup": 7,
        "between": 0,
    }
    parts = {"compute_s": 0.25, "encode_s": 0.05, "wait_s": 0.7, "codec_cpu_s": 0.1, "cpu_s": 0.3}
    log: dict[str, Any] = {
        "label": "", "losses": [1 / (i + 1) for i in range(steps)], "times_s": taken,
        "tx_bytes": [100 * (i + 1) for i in range(steps)], "metric_values": [], "residual_norm": None, "report": None,
        "evaluations": [(each, taken[each - 1], 50.0) for each in (6, steps)], "apart": False, "timed_steps": timed,
        "samples": 64, "energy_j": 100.0,
    }  # fmt: skip
    log |= sums | {name: share * taken[counted - 1] for name, share in parts.items()}
    return [log, log]


def test_a_run_that_was_timed_in_part_is_estimated_to_be_what_the_whole_run_is():
    gaps: list[float] = []
    for seed in range(200):
        seconds = simulated(STEPS, 0.05, seed)
        whole = merging.merge("torch.fp32", 0, logs(seconds, None))
        partly = merging.merge("torch.fp32", 0, logs(seconds, TIMED))
        gaps.append(abs(partly.times_s[-1] / whole.times_s[-1] - 1))
        assert partly.times_s[:TIMED] == whole.times_s[:TIMED]
        assert partly.losses == whole.losses
        assert partly.tx_bytes == pytest.approx(whole.tx_bytes)
        assert dataclasses.astuple(partly.wire) == pytest.approx(dataclasses.astuple(whole.wire))
        parts = partly.split.compute_s + partly.split.encode_s + partly.split.wait_s
        assert parts == pytest.approx(partly.times_s[-1])
        assert partly.samples == whole.samples == 128
        assert whole.energy_j == 100.0
        assert partly.energy_j == pytest.approx(100.0 * partly.times_s[-1] / partly.times_s[TIMED - 1])
    assert sum(gap < 0.02 for gap in gaps) > 140
    assert max(gaps) < 0.06


def test_what_follows_the_timed_steps_has_the_time_of_a_step():
    seconds = [3.0, 2.0, *[1.0] * (STEPS - 2)]
    partly = merging.merge("torch.fp32", 0, logs(seconds, TIMED))
    assert partly.times_s == extended(ends(seconds)[:TIMED], STEPS) == pytest.approx(ends(seconds))
    assert partly.evaluations == [Evaluation(6, 9.0, 50.0), Evaluation(STEPS, 43.0, 50.0)]
    assert (partly.timed_steps, partly.wire.setup) == (TIMED, 7)
    assert merging.merge("torch.fp32", 0, logs(seconds, None)).timed_steps is None


# ------------------------------------------------------------------------------------------ the options


def test_baselines_of_enough_steps_are_timed_in_part_and_nothing_else_is():
    methods = ("torch.fp32", "torch.fp16", "torch.bf16", "torch.powersgd:4", "torch.noop", "int4", "none")

    def timed(**changes: Any) -> list[str]:
        plan = make_plan(CompareOptions(task="digits", methods=methods, hosts=2, **changes))
        return [method for method in methods if plan.estimates_time(method)]

    assert timed() == ["torch.fp32", "torch.fp16", "torch.bf16"]
    assert timed(steps=TIMED) == []
    assert timed(minutes=1) == []
    assert timed(whole_baselines=True) == []


def test_whole_baselines_are_refused_where_all_runs_are_whole(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(CompareError, match="with --minutes every run is whole"):
        make_plan(CompareOptions(task="digits", minutes=1, whole_baselines=True))
    assert cli.main(["compare", "--task", "digits", "--minutes", "1", "--whole-baselines"]) == 2
    assert "--whole-baselines is for --steps" in capsys.readouterr().err


def test_a_run_timed_in_part_is_not_taken_for_a_whole_one_nor_the_other_way_round(tmp_path: Path):
    def plan(**changes: Any):
        return make_plan(CompareOptions(task="digits", methods=("torch.fp32", "int4"), hosts=2, **changes))

    partly, whole = plan(), plan(whole_baselines=True)
    folder = prepare_folder(tmp_path, fresh=False)
    for made, asked in ((partly, whole), (whole, partly)):
        for method in ("torch.fp32", "int4"):
            store_run(folder, dataclasses.replace(run(method), conditions=made.conditions("root", method)))
        assert len(stored_runs(folder, made.grid, lambda method, p=made: p.conditions("root", method))) == 2
        kept = stored_runs(folder, [("int4", 0)], lambda method, p=asked: p.conditions("root", method))
        assert [one.method for one in kept] == ["int4"]
        with pytest.raises(CompareError, match=r"times was .* --fresh"):
            stored_runs(folder, asked.grid, lambda method, p=asked: p.conditions("root", method))


# ------------------------------------------------------------------------------------- what is stored and said


def partly(method: str = "torch.fp32", seed: int = 0) -> Run:
    """A run of 20 steps that was timed over 12."""
    made = run(method, seed, losses=tuple(20.0 - i for i in range(20)))
    uneven = [0.9 if i % 2 else 1.1 for i in range(TIMED)]
    return dataclasses.replace(made, timed_steps=TIMED, times_s=extended(ends(uneven), 20))


def test_a_run_timed_in_part_is_stored_as_one_and_older_runs_are_whole(tmp_path: Path):
    before = comparison(partly(), run("int4"), failed("sign"))
    storage.save(before, tmp_path / "results.json")
    assert storage.load(tmp_path / "results.json").runs[0] == before.runs[0]
    data = json.loads((tmp_path / "results.json").read_text())
    for each in data["runs"]:
        del each["timed_steps"]
    (tmp_path / "results.json").write_text(json.dumps(data))
    assert [one.timed_steps for one in storage.load(tmp_path / "results.json").runs] == [None] * 3


@pytest.mark.parametrize(("timed", "said"), [(21, "21 timed steps of 20"), (3, "timed_steps"), (4.5, "timed_steps")])
def test_timed_steps_that_cannot_be_are_refused(timed: float, said: str):
    data = storage.run_to_json(partly()) | {"timed_steps": timed}
    with pytest.raises(ResultsError, match=said):
        storage.run_from_json(data)


def test_estimated_times_are_marked_wherever_they_are_shown(tmp_path: Path):
    made = comparison(partly(), partly(seed=1), run("int4", losses=tuple(20.0 - i for i in range(20))))
    verdict = judge(made)
    error = (0.1 / 0.9) * 0.3  # alternating by 0.1 s, the standard deviation over sqrt(10)
    (found,) = verdict.timed_in_part
    assert found == TimedInPart("torch.fp32", TIMED, 20, found.error)
    assert found.error == pytest.approx(error, rel=0.2)
    output = StringIO()
    show_table(Console(file=output, width=250), made, verdict)
    for shown in (output.getvalue(), render(made)):
        assert "≈ 20 s" in shown
        assert "timed over its first 12 of 20 steps" in " ".join(shown.split())
        assert "standard error of 3." in " ".join(shown.split())
        assert "--whole-baselines" in shown
    assert to_json(verdict)["timed_in_part"][0]["timed_steps"] == TIMED
    storage.write_tables(made, tmp_path)
    header, fp32, int4 = (tmp_path / "results.csv").read_text().splitlines()
    place = header.split(",").index("timed_steps")
    assert (fp32.split(",")[place], int4.split(",")[place]) == (str(TIMED), "")


def test_measured_times_are_not_marked():
    made = comparison(run("torch.fp32"), run("int4"))
    assert timed_in_part(made) == ()
    assert [row.timed_steps for row in summarise(made)] == [None, None]
    assert "≈ marks" not in render(made)
    assert "timed over" not in render(made)


def test_a_line_of_a_run_says_how_many_steps_were_timed():
    output = StringIO()
    view = ConsoleView(Console(file=output, width=200))
    view.finish(partly())
    view.finish(run("int4"))
    first, second = output.getvalue().splitlines()
    assert "timed over the first 12 steps" in first
    assert "timed" not in second


# --------------------------------------------------------------------------------------------- end to end


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.long), "fsdp2"])
def test_losses_are_those_of_the_whole_run_to_the_last_bit(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
):
    monkeypatch.setattr(one_run, "PRECISION", 10.0)  # a step's time is known at once, on a busy machine too
    baselines = {"ddp": ("torch.fp32", "torch.fp16", "torch.bf16"), "fsdp2": ("torch.fp32",)}[engine]
    options = CompareOptions(
        task=task, methods=(*baselines, "none"), hosts=2, steps=20, rate="20mbit", network="paced",
        engine=engine, out=tmp_path / "partly",
    )  # fmt: skip
    found = compare.compare(options, Silent())
    measured = compare.compare(dataclasses.replace(options, whole_baselines=True, out=tmp_path / "whole"), Silent())
    assert [one.timed_steps for one in found.runs] == [*[TIMED] * len(baselines), None]
    assert {one.timed_steps for one in measured.runs} == {None}
    (samples,) = {one.samples for one in (*found.runs, *measured.runs)}
    assert samples > 0
    for one, other in zip(found.runs, measured.runs, strict=True):
        assert one.losses == other.losses
        assert [(e.steps, e.value) for e in one.evaluations] == [(e.steps, e.value) for e in other.evaluations]
        assert one.wire.payload == pytest.approx(other.wire.payload)
        assert one.wire.total == pytest.approx(other.wire.total, rel=0.1)
    for one in found.runs[:-1]:
        assert one.times_s == extended(one.times_s[:TIMED], 20)


def test_a_paced_rank_lifts_its_own_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRADWIRE_WIRE", "sockets:1000000")
    meter, max_pacing_rate = WireMeter.from_environment(), 47
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):

        def limits() -> list[int]:
            each = (end.getsockopt(socket.SOL_SOCKET, max_pacing_rate, 8) for end in (one, other))
            return [int.from_bytes(limit, sys.byteorder) for limit in each]

        meter.pace()
        assert sum(limits()) <= 1000000
        meter.lift()
        assert limits() == [2**64 - 1] * 2


TALKS = """
import os, socket, sys, time
rank, address = int(os.environ["RANK"]), ("10.77.0.1", 5000)
if rank == 0:
    peer, _ = socket.create_server(address).accept()
    came, since = 0, time.perf_counter()
    while data := peer.recv(1 << 20):
        came += len(data)
        if (now := time.perf_counter()) - since > 0.2:
            print(8e-6 * came / (now - since), flush=True)
            came, since = 0, now
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    while True:
        peer.sendall(bytes(1 << 16))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delay", ["0", "20ms"])
@pytest.mark.parametrize("mode", ["root", "user"])
def test_the_limit_of_a_link_is_lifted_in_use_and_comes_back(mode: Any, delay: str):
    argv = [sys.executable, "-I", "-S", "-c", TALKS]
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(2, "10mbit", mode=mode, delay=delay))
        except NetworkError as error:
            pytest.skip(f"no {mode} network here: {error}")
        receiver, sender = (
            subprocess.Popen(network.command(rank, argv), env=network.environment(rank), stdout=subprocess.PIPE)
            for rank in range(2)
        )
        said = receiver.stdout
        assert said is not None

        def comes_to(least: float, most: float) -> bool:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                if least < float(said.readline()) < most:
                    return True
            return False

        assert comes_to(5, 12)
        network.lift()
        assert comes_to(30, 1e6)
        network.limit()
        assert comes_to(5, 12)
        for process in (receiver, sender):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
