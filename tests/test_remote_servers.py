"""A rank's side of the servers of all ranks, and what servers make of ranks that push nonsense, leave or hang up."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from gradwire import CommunicationError
from gradwire.asynchronous import ASGD, Bounded, Work, remote_servers
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.remote_servers import RemoteServers
from gradwire.asynchronous.several import PartedWorker, PartServer
from gradwire.asynchronous.several.messages import Granted, PushRequest, Refused, ServerReply
from gradwire.peers.sockets import SocketConnections, SocketServer
from peer_cases import SECRET, connected, frame, greeted, is_cut_off, raw, serving

PART = {"part": torch.zeros(4)}
CHANGE = torch.tensor([2.0, 0.0, 0.0, 0.0])


def computes_itself(worker: int) -> Work:
    raise NotImplementedError


def part_server(workers: int = 2, **settings: Any) -> PartServer:
    return PartServer(Job(PART, ASGD(0.5), computes_itself, workers=workers, pushes=10**9, **settings), 0, 1)


def rank_of(number: int = 0) -> PartedWorker:
    return PartedWorker(number, None, PART, servers=1)


def replied(served: PartServer, request: Any) -> list[Any]:
    heard: list[Any] = []
    served.ask(request, heard.append)
    return heard


def pushed(served: PartServer, worker: PartedWorker) -> PushRequest:
    """What a worker pushes first."""
    [hello] = worker.begin()
    [join] = worker.receive(hello, replied(served, hello)[0])
    assert worker.receive(join, replied(served, join)[0]) == []
    [push] = worker.push(CHANGE, 0.0, 0.1)
    assert isinstance(push, PushRequest)
    return push


def test_refused_pushes_change_nothing_and_are_told() -> None:
    served = part_server()
    push = pushed(served, rank_of())
    for serial, wrong in enumerate((replace(push, wire=push.wire[:3]), replace(push, fingerprint=1)), push.serial):
        [refused] = replied(served, replace(wrong, serial=serial))
        assert isinstance(refused, Refused)
        assert ("damaged", "of another model")[serial - push.serial] in refused.text
    assert served.server.version == 0
    [granted] = replied(served, replace(push, serial=push.serial + 2))
    assert isinstance(granted, Granted)
    assert granted.values.tolist() == [-1.0, 0.0, 0.0, 0.0]
    [refused] = replied(served, replace(push, serial=push.serial + 3))
    assert "applied before" in refused.text
    assert served.server.version == 1


def test_whoever_hangs_up_frees_the_others() -> None:
    served = part_server(pace=Bounded(0))
    first, second = rank_of(0), rank_of(1)
    push = pushed(served, first)
    pushed(served, second)
    waiting = replied(served, push)
    assert waiting == []
    served.lost(1)
    assert [type(reply) for reply in waiting] == [Granted]
    served.lost(1)
    served.lost(-1)
    assert served.server.clocks.slowest == 1


@contextmanager
def ranks() -> Generator[tuple[SocketServer, RemoteServers, RemoteServers]]:
    """A server on which each of two ranks waits for the other, and they."""
    with ExitStack() as ends:
        made = SocketServer(part_server(pace=Bounded(0)), ("127.0.0.1", 0), SECRET)
        server = ends.enter_context(serving(made))
        one, other = (RemoteServers(rank_of(rank), connected(server, rank), 20.0) for rank in range(2))
        ends.callback(one.close)
        ends.callback(other.close)
        yield server, one, other


def test_a_rank_pushes_reads_and_leaves_while_strangers_are_cut_off() -> None:
    with ranks() as (server, one, other):
        assert one.join().values.tolist() == [0.0] * 4
        assert other.join().version == 0
        for noisy in (raw(server.address), greeted(server.address, 5)):
            noisy.sendall(frame(1, bytes(300)))
            assert is_cut_off(noisy)
        assert server.refused == {"stranger": 1, "record": 1}
        other.leave()
        granted = one.push(CHANGE, 0.0, 0.1)
        assert granted.values.tolist() == other.read().tolist() == [-1.0, 0.0, 0.0, 0.0]
        assert one.push(CHANGE, 0.0, 0.1).version == 2
        assert one.read().tolist() == [-2.0, 0.0, 0.0, 0.0]


def test_a_rank_that_closes_frees_the_others() -> None:
    with ranks() as (_, one, other):
        one.join()
        other.join()
        other.close()
        assert one.push(CHANGE, 0.0, 0.1).version == 1


def test_a_server_that_is_silent_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = [silent.getsockname()]
        connections = SocketConnections(ServerReply, there, SECRET, 0, most_bytes=1000, connect_s=0.1)
        with (
            closing(RemoteServers(rank_of(), connections, 0.2)) as worker,
            pytest.raises(CommunicationError, match=r"server 0, in rank 0's process, is silent for 0.2 s") as told,
        ):
            worker.join()
        assert told.value.ranks == (0,)


def test_a_server_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_servers, "_PATIENCE_S", 0.3)
    with serving(SocketServer(part_server(1), ("127.0.0.1", 0), SECRET)) as server:
        worker = RemoteServers(rank_of(), connected(server), 20.0)
        worker.join()
    with closing(worker), pytest.raises(CommunicationError, match=r"server 0, in rank 0's process, is lost: .*refused"):
        worker.push(CHANGE, 0.0, 0.1)
