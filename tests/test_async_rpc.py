"""Training by processes that meet at one address: to a target, past what dies, and sentences for what is missing."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_cases import START
from async_processes import even
from gradwire import CommunicationError, CompositionError
from gradwire.asynchronous import ASGD
from gradwire.asynchronous.rpc import Job, run
from gradwire.asynchronous.several import Journal
from gradwire.network.loopback import free_port
from scripts import Script, said_by, wait_for

DEADLINE_S = 250.0

pytestmark = pytest.mark.filterwarnings("ignore:gradwire.asynchronous.rpc goes:FutureWarning")


def started(folder: Path, servers: int, workers: int, pushes: int, *more: object) -> list[Script]:
    """Worker 2, where there is one, kills itself at its push 5."""
    shape = (workers, pushes, f"{servers}@127.0.0.1:{free_port()}", *more)
    return [
        Script(
            folder / f"log{rank}", "tests/job_main.py", rank, *shape, **({"DIES": "1"} if rank == servers + 2 else {})
        )
        for rank in range(servers + workers)
    ]


def ran(folder: Path, servers: int, workers: int, pushes: int, *more: object) -> dict[str, Any]:
    scripts = started(folder, servers, workers, pushes, *(more or (120,)))
    found: dict[str, Any] = json.loads(said_by(scripts, DEADLINE_S)[0].splitlines()[-1])
    assert "error" not in found, found
    return found


def require_each_once(found: dict[str, Any], workers: int) -> None:
    for part, name in enumerate(("first", "last")):
        named = Counter((worker, number) for _, _, worker, number, *_ in found["journals"][part])
        assert set(named.values()) == {1}
        counts = Counter(worker for worker, _ in named)
        assert found["parameters"][name][:workers] == [float(counts[worker]) for worker in range(workers)]


@pytest.mark.one_draw_in(3)
def test_two_servers_and_two_workers_reach_a_target(tmp_path: Path) -> None:
    found = ran(tmp_path, servers=2, workers=2, pushes=100)
    assert min(map(len, found["histories"])) >= 100
    require_each_once(found, 2)
    assert sum(x * x for x in found["parameters"]["x"]) / 2 < 0.01 * 36
    assert found["lost"] == []


@pytest.mark.long
def test_a_killed_worker_is_missed_and_the_others_go_on(tmp_path: Path) -> None:
    found = ran(tmp_path, servers=2, workers=3, pushes=60)
    assert found["lost"] == [2]
    require_each_once(found, 3)
    assert found["parameters"]["first"][2] == found["parameters"]["last"][2] == 5.0
    assert min(found["parameters"]["first"][:2]) > 10  # beyond the bound of 4


@pytest.mark.long
def test_a_killed_server_ends_the_run_and_its_snapshots_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    journal = folder / "part-1-of-2" / "journal"
    scripts = started(tmp_path, 2, 2, 10**6, 20, folder)
    wait_for(lambda: journal.exists() and len(Journal(journal).rows()) > 30)
    scripts[1].process.kill()
    said = said_by(scripts, DEADLINE_S)
    assert "CommunicationError: server 1 at port" in said[0]
    assert "was not there for 20 s" in said[0]
    lost = len(Journal(journal).rows())
    found = ran(tmp_path, 2, 2, lost + 40, 120, folder)
    assert [{life for _, life, *_ in history} for history in found["histories"]] == [{0, 1}, {0, 1}]
    for name, history in zip(("first", "last"), found["histories"], strict=True):
        counts = Counter(worker for _, _, worker, *_ in history)
        assert found["parameters"][name] == [float(counts[worker]) for worker in range(4)]


JOB = Job(START, ASGD(0.1), even, workers=1, pushes=1, patience_s=1.0)


def test_what_to_use_instead_is_said() -> None:
    with pytest.warns(FutureWarning, match=r"use gradwire\.asynchronous\.tcp"), pytest.raises(CompositionError):
        run(JOB, rank=2)


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommunicationError, match=f"port {port} of 127.0.0.1 is in use: give another address"):
            run(JOB, rank=0, address=f"127.0.0.1:{port}")


def test_a_server_that_is_not_there_is_said() -> None:
    port = free_port()
    with pytest.raises(CommunicationError, match=f"rank 0 is not at 127.0.0.1:{port}"):
        run(JOB, rank=1, address=f"127.0.0.1:{port}")


def test_a_process_that_did_not_come_is_named() -> None:
    with pytest.raises(CommunicationError, match="rank 1 of 2 did not come within 1 s"):
        run(JOB, rank=0, address=f"127.0.0.1:{free_port()}")


def test_ranks_and_addresses_that_cannot_be_are_refused() -> None:
    with pytest.raises(CompositionError, match="rank 2 of 1 servers and 1 workers: it is 0 to 1"):
        run(JOB, rank=2)
    with pytest.raises(CompositionError, match="give host:port"):
        run(JOB, rank=1, address="somewhere")
    with pytest.raises(CompositionError, match="9 servers for 8 parameters"):
        run(JOB, rank=1, servers=9)
