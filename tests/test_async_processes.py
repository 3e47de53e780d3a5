"""Workers and servers as real processes: killed ones free the others or are restarted, and each push counts once."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import async_processes
import ray_main
from async_cases import START, quadratic
from gradwire import CommunicationError, CompositionError
from gradwire.asynchronous import ASGD, Applied, Bounded, Sending, Worker, snapshots
from gradwire.asynchronous.processes import (
    Job,
    RunningProcesses,
    RunningServers,
    ServersOutcome,
    hogwild,
    run,
    run_servers,
)
from gradwire.asynchronous.several import Journal, PartedWorker, PartServer
from gradwire.asynchronous.several.messages import Gone, Granted, Hello, PushRequest, Stop
from gradwire.codecs import TopK
from gradwire.peers.sockets import SocketServer
from peer_cases import SECRET, asked, connected, frame, greeted, is_cut_off, serving

DEADLINE_S = 150.0
SILENT_S = 2.0
"""Longer than a busy machine keeps a process from its turn, and far shorter than anybody else would choose."""


def wait_for(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end_s, "nothing happens"
        time.sleep(0.02)


def require_each_once(history: list[Applied]) -> None:
    """Every worker's pushes are numbered from 0 without a gap, in order."""
    seen: Counter[int] = Counter()
    for version, one in enumerate(history):
        assert one.version == version
        assert one.number == seen[one.worker]
        seen[one.worker] += 1


@pytest.mark.turns("killed", 1)
def test_a_killed_worker_frees_the_others_and_a_killed_server_comes_back(tmp_path: Path) -> None:
    job = Job(
        START,
        ASGD(0.05),
        async_processes.uneven,
        workers=3,
        pushes=60,
        pace=Bounded(1),
        sending=Sending(TopK(0.5), decay=1.0),
        folder=tmp_path,
        snapshot_every=15,
    )
    with RunningProcesses(job) as running:
        running.wait_for(4)  # both others made two pushes, and wait
        time.sleep(0.3)
        running.look()
        assert running.version == 4
        stuck = running.workers.children[2].pid
        os.kill(stuck, signal.SIGKILL)
        running.wait_for(20)
        server = running.server.pid
        os.kill(server, signal.SIGKILL)
        outcome = running.wait(DEADLINE_S)
    assert outcome.restarts == 1
    assert outcome.lost == (2,)
    require_each_once(outcome.history)
    assert {one.worker for one in outcome.history} == {0, 1}
    assert all(one.staleness <= 3 for one in outcome.history)
    assert outcome.history[-1].loss < 0.8 * outcome.history[0].loss


@pytest.mark.long
def test_a_server_killed_after_its_last_push_is_heard_before_the_job_is_given_up(tmp_path: Path) -> None:
    job = Job(START, ASGD(0.05), async_processes.even, workers=2, pushes=200, folder=tmp_path)
    with RunningProcesses(job) as running:
        running.wait_for(1)
        wait_for(lambda: all(child.ended() == "" for child in running.workers.children))
        os.kill(running.server.pid, signal.SIGKILL)  # whoever watches has heard of few pushes, and no worker is left
        outcome = running.wait(DEADLINE_S)
    assert (len(outcome.history), outcome.lost, outcome.restarts) == (200, (), 1)


def test_a_server_without_snapshots_is_missed() -> None:
    with RunningProcesses(Job(START, ASGD(0.05), async_processes.even, workers=1, pushes=10**4)) as running:
        os.kill(running.server.pid, signal.SIGKILL)
        with pytest.raises(CommunicationError, match=r"the server was killed by SIGKILL at push \d+ of 10000: give"):
            running.wait(DEADLINE_S)


@pytest.mark.one_draw_in(2)
def test_workers_that_fail_are_named() -> None:
    with pytest.raises(CommunicationError, match="no worker is left at push 0 of 5: worker 0 ended with status 3"):
        run(Job(START, ASGD(0.05), async_processes.broken, workers=1, pushes=5), DEADLINE_S)


# Several servers -----------------------------------------------------------------------------------------------------


def counted(folder: Path, **settings: Any) -> Job:
    """Of a push at either server, its worker's element there grows by 1."""
    settings = {"workers": 2, "pushes": 60, "pace": Bounded(4), "snapshot_every": 16, **settings}
    return Job(ray_main.START, ASGD(1 / 16), ray_main.counting, folder=folder, **settings)


def require_counted_once(outcome: ServersOutcome) -> None:
    """At each server a push was applied once in each of its lives, and the parameters are made of its history."""
    for name, journal, history in zip(("first", "last"), outcome.journals, outcome.histories, strict=True):
        assert set(Counter((row.life, row.worker, row.number) for row in journal).values()) == {1}
        counts: Counter[int] = Counter()
        for version, row in enumerate(history):
            assert (row.version, row.number) == (version, counts[row.worker])
            counts[row.worker] += 1
        assert outcome.parameters[name].tolist() == [float(counts[worker]) for worker in range(ray_main.WORKERS)]


@pytest.mark.long
def test_a_killed_worker_is_started_anew_and_a_killed_server_comes_back(tmp_path: Path) -> None:
    with RunningServers(counted(tmp_path, pushes=160), servers=2, worker_restarts=1) as running:
        running.wait_for(10, DEADLINE_S)
        os.kill(running.workers.children[1].pid, signal.SIGKILL)
        running.wait_for(24, DEADLINE_S)
        os.kill(running.servers.children[1].pid, signal.SIGKILL)
        outcome = running.wait(DEADLINE_S)
    require_counted_once(outcome)
    assert outcome.lost == (1,)
    assert outcome.restarts == (0, 1)
    assert {row.life for row in outcome.histories[1]} == {0, 1}
    assert min(map(len, outcome.histories)) >= 160


@pytest.mark.turns("killed", 1)
def test_a_server_that_dies_after_the_last_push_is_started_again_and_says_what_it_had(tmp_path: Path) -> None:
    with RunningServers(counted(tmp_path, pushes=30), servers=2) as running:
        running.wait_for(30, DEADLINE_S)
        os.kill(running.servers.children[0].pid, signal.SIGKILL)
        outcome = running.outcome_of(running.watch.outcome(()))
    require_counted_once(outcome)
    assert outcome.restarts == (1, 0)


@pytest.mark.long
def test_a_server_that_is_stopped_is_started_again(tmp_path: Path) -> None:
    with RunningServers(counted(tmp_path, silent_s=SILENT_S), servers=2) as running:
        running.wait_for(10, DEADLINE_S)
        stopped = running.servers.children[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        outcome = running.wait(DEADLINE_S)
        assert stopped.ended() == "was killed by SIGKILL"
    require_counted_once(outcome)
    assert outcome.lost == ()
    assert outcome.restarts[1] >= 1


@pytest.mark.turns("killed", 1)
def test_a_worker_that_is_stopped_is_gone_until_it_goes_on(tmp_path: Path) -> None:
    with RunningServers(counted(tmp_path, pushes=10**6, silent_s=SILENT_S), servers=2) as running:
        running.wait_for(10, DEADLINE_S)
        stopped = running.workers.children[1].pid
        os.kill(stopped, signal.SIGSTOP)
        running.wait_for(running.version + 30, DEADLINE_S)  # beyond the bound of 4
        own = pushes_of(tmp_path, worker=1)
        os.kill(stopped, signal.SIGCONT)
        wait_for(lambda: pushes_of(tmp_path, worker=1) > own + 5)
        outcome = running.watch.outcome(running.workers.lost)
    require_counted_once(outcome)
    assert outcome.lost == ()


def pushes_of(folder: Path, worker: int) -> int:
    copied = Path(shutil.copy(folder / "part-0-of-2" / "journal", folder / "copied"))  # a journal is its server's
    return sum(row.worker == worker for row in Journal(copied).rows())


@pytest.mark.one_draw_in(2)
def test_a_snapshot_of_version_0_2_is_gone_on_from(tmp_path: Path) -> None:
    """It lies in the folder itself, and has parameters by their own names."""
    job = Job(START, ASGD(0.05), async_processes.even, workers=1, pushes=12, folder=tmp_path)
    server, worker = job.server(), Worker(quadratic, START)
    grants = server.join(0)
    for _ in range(7):
        grants = server.receive(worker.compute(grants[0], server.values.clone())).grants
    snapshots.save(server, tmp_path)
    outcome = run(job, DEADLINE_S)
    assert [(one.version, one.number) for one in outcome.history] == [(version, version) for version in range(7, 12)]
    for _ in range(5):
        grants = server.receive(worker.compute(grants[0], server.values.clone())).grants
    for name, tensor in server.parameters().items():
        assert torch.equal(outcome.parameters[name], tensor)


def test_what_cannot_be_started_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(CompositionError, match="9 servers for 8 parameters"):
        run_servers(Job(START, ASGD(0.05), async_processes.even, workers=1, pushes=5), servers=9)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        run(Job(START, ASGD(0.05), lambda worker: quadratic, workers=1, pushes=5))
    assert list(tmp_path.iterdir()) == []


# A server at a Unix socket -------------------------------------------------------------------------------------------


def test_a_repeated_push_is_applied_once_and_noise_costs_its_sender_the_connection(tmp_path: Path) -> None:
    job = Job(START, ASGD(0.05), async_processes.even, workers=2, pushes=2)
    served = PartServer(job, 0, 1)
    with serving(SocketServer(served, str(tmp_path / "server"), SECRET)) as server, closing(connected(server)) as line:
        with closing(connected(server, peer=9)) as unknown:
            assert asked(unknown, Hello(0, 9, 1, 1)).text == "worker 9 is unknown: this server has workers 0 to 1"
        worker = PartedWorker(0, quadratic, START, servers=1)
        [hello] = worker.begin()
        [join] = worker.receive(hello, asked(line, hello))
        [push] = worker.receive(join, asked(line, join))
        assert isinstance(push, PushRequest)
        second = asked(line, push)
        assert isinstance(second, Granted)
        assert second.number == 1
        moved = served.server.values.clone()
        again = replace(push, serial=push.serial + 1)
        assert isinstance(asked(line, push), Gone)
        assert "push 0 of worker 0 was applied before" in asked(line, again).text
        assert torch.equal(served.server.values, moved)
        assert served.server.version == 1
        with greeted(server.address, peer=1) as noisy:
            noisy.sendall(frame(1, b"no record"))
            assert is_cut_off(noisy)
        assert server.refused == {"record": 1}
        [last] = worker.receive(push, second)
        assert isinstance(asked(line, replace(last, serial=again.serial + 1)), Stop)
    assert served.server.version == 2


# Hogwild! -------------------------------------------------------------------------------------------------------


@pytest.mark.turns("hogwild", 1)
def test_hogwild_shares_one_copy() -> None:
    start = {"x": torch.zeros(2)}
    assert hogwild(start, async_processes.counting, processes=2, deadline_s=DEADLINE_S)["x"].tolist() == [1000.0] * 2
    assert start["x"].tolist() == [0.0, 0.0]


@pytest.mark.turns("hogwild", 1)
def test_hogwild_says_who_failed() -> None:
    with pytest.raises(CommunicationError, match="process 1 of 2 ended with status 4"):
        hogwild({"x": torch.zeros(2)}, async_processes.failing, processes=2, deadline_s=DEADLINE_S)
    with pytest.raises(CompositionError, match="0 processes"):
        hogwild({"x": torch.zeros(2)}, async_processes.failing, processes=0)


def test_a_job_of_nothing_is_refused() -> None:
    with pytest.raises(CompositionError, match="a run of 0 pushes"):
        Job(START, ASGD(0.05), async_processes.even, workers=1, pushes=0)
