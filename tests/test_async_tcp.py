"""Training by processes over TCP: to a target, past what dies and comes again, and sentences for what is missing."""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from async_cases import START, optimum
from async_processes import even
from gradwire import CommunicationError, CompositionError
from gradwire.asynchronous import ASGD
from gradwire.asynchronous.several import Journal, JournalRow, PartServer
from gradwire.asynchronous.tcp import SECRET_VARIABLE, Job, ServersOutcome, run, secret_bytes
from gradwire.network.loopback import free_port
from gradwire.peers.sockets import SocketServer
from scripts import Script, said_by, wait_for

DEADLINE_S = 120.0
SECRET = "0123456789abcdef"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    return [free_port(host) for _ in range(count)]


def local(ports: list[int]) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ports]


class Processes:
    """Servers and workers in processes of their own."""

    def __init__(self, folder: Path, servers: int, workers: int, pushes: int) -> None:
        self.folder, self.servers, self.workers, self.pushes = folder, servers, workers, pushes
        self.addresses = ",".join(local(free_ports(servers)))
        self.scripts: list[Script] = []

    def start(self, rank: int, **environment: str) -> Script:
        log = self.folder / f"log{len(self.scripts)}"
        arguments = ("tests/job_main.py", rank, self.workers, self.pushes, self.addresses, 60, self.folder)
        script = Script(log, *arguments, **{SECRET_VARIABLE: SECRET}, **environment)
        self.scripts.append(script)
        return script

    def rows(self, part: int) -> list[JournalRow]:
        path = self.folder / f"part-{part}-of-{self.servers}" / "journal"
        return Journal(path).rows() if path.exists() else []

    def outcome(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(said_by(self.scripts, DEADLINE_S)[0].splitlines()[-1])
        assert "error" not in found, found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for script in self.scripts:
            script.process.kill()
            script.process.wait()


@pytest.mark.turns("killed", 1)
def test_a_killed_worker_is_missed_and_takes_its_place_again(tmp_path: Path) -> None:
    with Processes(tmp_path, servers=1, workers=2, pushes=80) as running:
        running.start(0)
        running.start(1, HOLDS="1")
        assert running.start(2, DIES="1").process.wait(DEADLINE_S) == -9
        wait_for(lambda: sum(row.worker == 0 for row in running.rows(0)) >= 20)  # beyond the bound of 4
        running.start(2)
        wait_for(lambda: sum(row.worker == 1 for row in running.rows(0)) >= 8)
        (tmp_path / "go").touch()
        found = running.outcome()
    assert found["lost"] == [1]
    named = Counter((worker, number) for _, _, worker, number, *_ in found["journals"][0])
    assert set(named.values()) == {1}
    counts = Counter(worker for worker, _ in named)
    assert found["parameters"]["first"] == [float(counts[worker]) for worker in range(4)]


@pytest.mark.turns("killed", 1)
def test_a_killed_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    with Processes(tmp_path, servers=2, workers=1, pushes=150) as running:
        scripts = [running.start(rank) for rank in range(3)]
        wait_for(lambda: len(running.rows(1)) > 30)
        scripts[1].process.kill()
        scripts[1].process.wait()
        running.start(1)
        found = running.outcome()
    assert found["restarts"] == [0, 1]
    assert found["lost"] == []
    assert [{life for _, life, *_ in history} for history in found["histories"]] == [{0}, {0, 1}]
    for name, history in zip(("first", "last"), found["histories"], strict=True):
        assert len(history) >= 150
        assert found["parameters"][name][0] == len(history)


# Within this process ------------------------------------------------------------------------------------------------

JOB = Job(START, ASGD(0.1), even, workers=1, pushes=1, patience_s=1.0)


@pytest.fixture
def pool() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def started(pool: ThreadPoolExecutor, job: Job, rank: int, addresses: list[str]) -> Future[ServersOutcome | None]:
    return pool.submit(run, job, rank=rank, addresses=addresses, secret=SECRET, deadline_s=60.0)


def test_servers_of_both_kinds_of_addresses_reach_a_target(pool: ThreadPoolExecutor) -> None:
    addresses = [*local(free_ports(1)), f"[::1]:{free_ports(1, '::1')[0]}"]
    job = replace(JOB, workers=2, pushes=100, patience_s=20.0)
    outcome, *others = [started(pool, job, rank, addresses) for rank in range(4)]
    found = outcome.result(60)
    assert [other.result(60) for other in others] == [None] * 3
    assert found is not None
    assert (found.lost, found.restarts) == ((), (0, 0))
    assert min(map(len, found.histories)) >= 100
    best = {name: (optimum(0)[name] + optimum(1)[name]) / 2 for name in START}
    assert all((found.parameters[name] - best[name]).abs().max() < 0.5 for name in START)


def test_another_secret_is_named_on_both_sides(pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> None:
    addresses = local(free_ports(1))
    server = started(pool, JOB, 0, addresses)
    with (
        caplog.at_level(logging.WARNING, "gradwire.peers"),
        pytest.raises(CommunicationError, match=r"port .* of 127.0.0.1 is of another run: its secret differs"),
    ):
        run(replace(JOB, patience_s=20.0), rank=1, addresses=addresses, secret="fedcba9876543210")
    with pytest.raises(CommunicationError, match="no worker is left at push 0 of 1, and none came for 1 s"):
        server.result(60)
    assert "a peer does not know this run's secret" in caplog.text


@pytest.mark.one_draw_in(2)
def test_a_server_that_begins_anew_is_named(pool: ThreadPoolExecutor) -> None:
    ports = free_ports(2)
    job = replace(JOB, pushes=10**6, patience_s=5.0)

    def server() -> SocketServer:
        made = SocketServer(PartServer(job, 1, 2), ("127.0.0.1", ports[1]), secret_bytes(SECRET))
        made.start()
        return made

    before = server()
    leader, worker = (started(pool, job, rank, local(ports)) for rank in (0, 2))
    wait_for(lambda: _version(before) > 20)
    before.close()
    after = server()
    with pytest.raises(CommunicationError, match=r"server 1 was started again and begins anew, where push .* a folder"):
        leader.result(60)
    after.close()
    with pytest.raises(CommunicationError, match="finds no server"):
        worker.result(60)


def _version(host: SocketServer) -> int:
    assert isinstance(host.served, PartServer)
    return host.served.server.version


def test_servers_that_are_not_there_are_named() -> None:
    ports = free_ports(2)
    with pytest.raises(CommunicationError, match=f"server 1 at port {ports[1]} of 127.0.0.1 was not there for 1 s"):
        run(replace(JOB, workers=2), rank=0, addresses=local(ports), secret=SECRET)
    with pytest.raises(CommunicationError, match="worker 0 finds no server 0 after 1 s"):
        run(JOB, rank=1, addresses=local(ports[:1]), secret=SECRET)


def test_the_deadline_is_said() -> None:
    with pytest.raises(CommunicationError, match=r"push 0 of 1 was the last after 0.2 s"):
        run(replace(JOB, patience_s=9.0), rank=0, addresses=local(free_ports(1)), secret=SECRET, deadline_s=0.2)


def test_a_port_in_use_is_said_before_a_snapshot_begins_a_new_life(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommunicationError, match=f"port {port} of 127.0.0.1 is in use: give another address"):
            run(replace(JOB, folder=tmp_path), rank=0, addresses=local([port]), secret=SECRET)
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_another_machine_is_said() -> None:
    with pytest.raises(CommunicationError, match=r"no server can listen at port 29500 of 192.0.2.1: Cannot assign"):
        run(JOB, rank=0, addresses=["192.0.2.1:29500"], secret=SECRET)


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (["somewhere"], "give host:port"),
        (["10.0.0.1:0"], "give host:port"),
        (["::1:29500"], r"give host:port, as in 10.0.0.1:29500 or \[::1\]:29500"),
        (["10.0.0.1:1", "10.0.0.1:1"], "give each server one of its own"),
        ([], "0 servers"),
        ([f"10.0.0.1:{port}" for port in range(1, 10)], "9 servers for 8 parameters"),
    ],
)
def test_addresses_that_cannot_be_are_refused(addresses: list[str], said: str) -> None:
    with pytest.raises(CompositionError, match=said):
        run(JOB, rank=0, addresses=addresses, secret=SECRET)


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(CompositionError, match="rank 2 of 1 servers and 1 workers: it is 0 to 1"):
        run(JOB, rank=2, addresses=["10.0.0.1:29500"], secret=SECRET)


@pytest.mark.parametrize("secret", [None, "", "too short"])
def test_without_a_secret_one_is_told_how_to_make_one(secret: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(CompositionError, match=r"16 characters or more.*print\(secrets.token_hex\(16\)\)"):
        run(JOB, rank=0, addresses=["10.0.0.1:29500"], secret=secret)


def test_the_environment_has_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert secret_bytes() == secret_bytes(SECRET) != secret_bytes(SECRET[::-1])
