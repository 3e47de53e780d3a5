"""Workers and servers as real processes: killed ones free the others or are restarted, and each push counts once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gradwire.asynchronous.processes.job_server import JobServer
from gradwire.asynchronous.wire import LONGEST, MessageKind, WireMessage, pack, plain, unpack

import async_processes
from async_cases import START, quadratic
from gradwire import CommunicationError, CompositionError
from gradwire.asynchronous import ASGD, Applied, Bounded, Sending, Worker
from gradwire.asynchronous.processes import Job, RunningProcesses, hogwild, run
from gradwire.asynchronous.processes.job import SharedTensors
from gradwire.codecs import TopK

DEADLINE_S = 150.0


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
        stuck = running.workers[2].pid
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


def test_a_server_without_snapshots_is_missed() -> None:
    with RunningProcesses(Job(START, ASGD(0.05), async_processes.even, workers=1, pushes=10**4)) as running:
        os.kill(running.server.pid, signal.SIGKILL)
        with pytest.raises(CommunicationError, match=r"the server was killed by SIGKILL at push \d+ of 10000: give"):
            running.wait(DEADLINE_S)


def test_workers_that_fail_are_named() -> None:
    with pytest.raises(CommunicationError, match="no worker is left at push 0 of 5: worker 0 ended with status 3"):
        run(Job(START, ASGD(0.05), async_processes.broken, workers=1, pushes=5), DEADLINE_S)


# The server of a job, in a thread ------------------------------------------------------------------------------------


@pytest.fixture
def job_server(tmp_path: Path) -> Iterator[tuple[JobServer, str]]:
    job = Job(START, ASGD(0.05), async_processes.even, workers=2, pushes=2)
    path = str(tmp_path / "server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        made = JobServer(job, SharedTensors.of(job), listener)
        thread = threading.Thread(target=made.run)
        thread.start()
        yield made, path
        thread.join(20)
        assert not thread.is_alive()


def connected(path: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(20)
    line.connect(path)
    return line


def asked(line: socket.socket, message: WireMessage) -> WireMessage:
    line.send(pack(message))
    return unpack(line.recv(LONGEST))


def test_a_repeated_push_is_applied_once(job_server: tuple[JobServer, str]) -> None:
    server, path = job_server[0].server, job_server[1]
    with connected(path) as line:
        assert asked(line, plain(MessageKind.JOIN, 9)).text == "worker 9 is unknown: this server has workers 0 to 1"
        grant = asked(line, plain(MessageKind.JOIN, 0)).grant
        push = Worker(quadratic, START).compute(grant, server.values)
        job_server[0].shared.up[0].copy_(push.wire)
        message = WireMessage(MessageKind.PUSH, grant, push.fingerprint, push.loss, push.seconds)
        second = asked(line, message)
        assert (second.kind, second.grant.number) == (MessageKind.GRANT, 1)
        moved = server.values.clone()
        assert "push 0 of worker 0 was applied before" in asked(line, message).text
        assert torch.equal(server.values, moved)
        assert server.version == 1
        with connected(path) as other:  # what is no message costs its sender the line, and nobody else
            other.send(b"no message")
            assert other.recv(LONGEST) == b""
        job_server[0].shared.up[0].copy_(Worker(quadratic, START).compute(second.grant, server.values).wire)
        assert asked(line, message._replace(grant=second.grant)).kind is MessageKind.STOP
    assert server.version == 2


# Hogwild! -------------------------------------------------------------------------------------------------------


def test_hogwild_shares_one_copy() -> None:
    start = {"x": torch.zeros(2)}
    assert hogwild(start, async_processes.counting, processes=2, deadline_s=DEADLINE_S)["x"].tolist() == [1000.0] * 2
    assert start["x"].tolist() == [0.0, 0.0]


def test_hogwild_says_who_failed() -> None:
    with pytest.raises(CommunicationError, match="process 1 of 2 ended with status 4"):
        hogwild({"x": torch.zeros(2)}, async_processes.failing, processes=2, deadline_s=DEADLINE_S)
    with pytest.raises(CompositionError, match="0 processes"):
        hogwild({"x": torch.zeros(2)}, async_processes.failing, processes=0)


def test_a_job_of_nothing_is_refused() -> None:
    with pytest.raises(CompositionError, match="a run of 0 pushes"):
        Job(START, ASGD(0.05), async_processes.even, workers=1, pushes=0)
