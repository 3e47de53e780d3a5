"""Frames that no honest peer sends, at both kinds of ports and at `unpack`; `benchmarks/hostile_frames.py` has more."""

from __future__ import annotations

import importlib
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.asynchronous import ASGD
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import PartedWorker, PartServer
from gradwire.asynchronous.several.messages import Finish, Hello, Leave, PushRequest, ServerReply, Watch
from gradwire.peers.greeting import SECRET_BYTES
from gradwire.peers.sockets import Address, SharedRows, SocketConnections, SocketServer

ROOT = Path(__file__).parents[1]
START = {"x": torch.zeros(100)}
FRAMES = 1000


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def never(worker: int) -> Any:
    raise NotImplementedError


class Honest:
    """A worker whose pushes take 1 from every parameter."""

    def __init__(self, connections: SocketConnections) -> None:
        self.connections, self.worker = connections, PartedWorker(0, None, START, servers=1)
        self.send(self.worker.begin())

    def send(self, requests: list[Any]) -> None:
        for request in requests:
            self.connections.ask(0, request)

    def push(self) -> PushRequest:
        while self.worker.granted is None:
            arrived = self.connections.wait(30.0)
            assert arrived is not None
            assert arrived.error is None
            self.send(self.worker.receive(arrived.request, arrived.reply))
        [push] = self.worker.push(torch.ones(100), 0.0, 0.001)
        self.send([push])
        assert isinstance(push, PushRequest)
        return push


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_nothing_that_is_hostile_is_accepted(kind: str, benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    frames, secret = benchmark("attack"), secrets.token_bytes(SECRET_BYTES)
    address: Address = ("127.0.0.1", 0) if kind == "tcp" else str(tmp_path / "server")
    rows = None if kind == "tcp" else SharedRows.of(2, 1 << 17, 1 << 17)
    served = PartServer(Job(START, ASGD(1.0), never, workers=2, pushes=10**9), 0, 1)
    server = SocketServer(served, address, secret, rows=rows)
    server.start()
    connections = SocketConnections(
        ServerReply, [server.address], secret, 0, most_bytes=1 << 20, rows=[rows] if rows else ()
    )
    honest, marker = Honest(connections), tmp_path / "unpickled"
    drawn = frames.Frames(random.Random(kind), honest.push(), marker)
    attack = frames.Attack(server.address, secret, drawn)
    peers = frames.PEERS if rows is None else (*frames.PEERS, "row")
    frames.attack(attack, FRAMES, peers)
    honest.push()
    honest.push()
    connections.close()
    assert "gradwire-heartbeat" not in {thread.name for thread in threading.enumerate()}
    server.close()
    assert "ACCEPTED" not in attack.outcomes
    assert sum(attack.sent.values()) == FRAMES
    assert set(server.refused) == {"stranger", "version", "secret", "record", "length", "replayed"}
    assert server.failure is None
    assert not marker.exists()
    assert [row.worker for row in served.journal.rows()] == [0] * served.server.version
    assert served.server.values.tolist() == [-float(served.server.version)] * 100


POSING: dict[str, Callable[[PushRequest], Any]] = {
    "push": lambda push: push.replace(serial=push.serial + 1),
    "leave": lambda push: Leave(0, 0, push.process, push.serial + 1),
    "hello": lambda push: Hello(0, 0, process=77, serial=1),
    "of nobody": lambda push: Hello(0, 5, process=77, serial=1),
    "watch": lambda push: Watch([0]),
    "finish": lambda push: Finish(),
}


@pytest.mark.parametrize("kind", POSING)
def test_a_worker_asks_for_itself_alone(kind: str) -> None:
    """Another one's request ends the connection of whoever sent it, is counted, and changes nothing."""
    secret = secrets.token_bytes(SECRET_BYTES)
    served = PartServer(Job(START, ASGD(1.0), never, workers=2, pushes=10**9), 0, 1)
    server = SocketServer(served, ("127.0.0.1", 0), secret)
    server.start()
    honest, other = (
        SocketConnections(ServerReply, [server.address], secret, number, most_bytes=1 << 20) for number in range(2)
    )
    worker = Honest(honest)
    other.ask(0, POSING[kind](worker.push()))
    arrived = other.wait(30.0)
    assert arrived is not None
    assert isinstance(arrived.error, OSError)
    assert server.refused == {"record": 1}
    worker.push()
    worker.push()
    assert not served.is_done
    assert served.server.values.tolist() == [-float(served.server.version)] * 100
    for connections in (honest, other):
        connections.close()
    server.close()
    assert [row.number for row in served.journal.rows()] == list(range(served.server.version))


def test_nothing_that_is_hostile_is_unpacked_into_anything_else(
    benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    push = PushRequest(0, 0, 1, 2, 3, 4, 0, 1, torch.zeros(400, dtype=torch.uint8), 5, 0.5, 0.1)
    found = benchmark("hostile_frames").unpacked(2000, push, tmp_path / "unpickled")
    outcomes = Counter(found["outcomes"])
    assert sum(outcomes.values()) == 2000
    assert {name for name in outcomes if name.endswith("well formed")} <= {"flipped: well formed", "odd: well formed"}
