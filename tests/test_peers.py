"""Requests and replies over every carrier, strangers and silence at sockets, and the supervisor of processes."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_cases import START, quadratic
from datagrams import DatagramConnections, DatagramServer
from gradwire import CommunicationError
from gradwire.asynchronous import ASGD, Bounded
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import PartedWorker, PartServer, WorkerClient
from gradwire.asynchronous.several.messages import ServerReply
from gradwire.core.errors import RecordError
from gradwire.core.record import ALIGNMENT, Count, Floats, Record, pack
from gradwire.core.version import VERSION
from gradwire.peers import greeting
from gradwire.peers.local import LocalConnections
from gradwire.peers.protocol import Connections
from gradwire.peers.sockets import Address, Inbox, SharedRows, SocketConnections, SocketServer, framed, frames
from gradwire.peers.supervisor import ChildProcess, Supervisor, wait_for_any
from peer_cases import (
    SECRET,
    Double,
    Doubled,
    Doubler,
    Fail,
    Keep,
    Release,
    Replied,
    Said,
    asked,
    connected,
    error_of,
    frame,
    greeted,
    is_cut_off,
    raw,
    read,
    serving,
)
from scripts import wait_for

CARRIERS = ("one thread", "one process", "tcp", "unix", "rows")
LARGE = 4 << 20
SILENT_S = 1.0
TCP = ("127.0.0.1", 0)

Made = Callable[[int], Connections]


@pytest.fixture(params=CARRIERS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    """Makes connections to so many servers that double, by each of the carriers."""
    kind: str = request.param
    with ExitStack() as ends:

        def make(servers: int) -> Connections:
            if kind == "one thread":
                return LocalConnections([Doubler() for _ in range(servers)])
            rows = [SharedRows.of(1, 4 * LARGE + 4096, 4 * LARGE + 4096) for _ in range(servers * (kind == "rows"))]
            where = [TCP if kind == "tcp" else str(tmp_path / f"{part}") for part in range(servers)]
            found = [
                SocketServer(Doubler(), where[part], SECRET, rows=rows[part] if rows else None)
                for part in range(servers)
            ]
            there: list[Address | SocketServer] = [ends.enter_context(serving(server)).address for server in found]
            if kind == "one process":
                there = list(found)
            connections = SocketConnections(Replied, there, SECRET, 0, most_bytes=1 << 28, rows=rows)
            ends.callback(connections.close)
            return connections

        yield make


# Every carrier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 1000, 30_000, LARGE])
def test_records_come_as_they_were_sent(made: Made, numel: int) -> None:
    connections = made(1)
    values = torch.randn(numel)
    values[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])[:numel]
    for _ in range(3):
        reply = asked(connections, Double("δ", values))
        assert isinstance(reply, Doubled)
        assert reply.name == "δ"
        assert torch.equal(reply.values.view(torch.int32), (2 * values).view(torch.int32))
        assert reply.raw.tolist() == [0, 1, 2]


def test_replies_come_later_and_in_another_order(made: Made) -> None:
    connections = made(1)
    requests = [Keep(1), Keep(2), Release()]
    for request in requests[:2]:
        connections.ask(0, request)
    assert connections.wait(0.05) is None
    connections.ask(0, requests[2])
    found = [connections.wait(10.0) for _ in range(3)]
    assert [arrived and (arrived.request, arrived.reply) for arrived in found] == [
        (Keep(2), Said(2)),
        (Keep(1), Said(1)),
        (Release(), Said(0)),
    ]
    assert connections.wait(0.0) is None


def test_small_records_pass_large_ones_by(made: Made) -> None:
    """A worker looks at its servers while its push is under way, and neither changes the other."""
    connections = made(1)
    large, small = torch.randn(LARGE), torch.randn(3)
    for _ in range(3):
        for values in (large, small):
            connections.ask(0, Double("", values))
        time.sleep(0.05)  # both replies are there before one is read
        for values in (large, small):
            arrived = connections.wait(10.0)
            assert arrived is not None
            assert torch.equal(arrived.reply.values, 2 * values)


def test_each_server_replies_for_itself(made: Made) -> None:
    connections = made(3)
    connections.ask(1, Keep(5))
    for server in (2, 0, 2):
        assert asked(connections, Double("", torch.ones(1)), server).values.tolist() == [2.0]
    connections.ask(1, Release())
    found = [connections.wait(10.0) for _ in range(2)]
    assert [arrived and (arrived.server, arrived.reply) for arrived in found] == [(1, Said(5)), (1, Said(0))]


def test_a_carrier_of_ones_own_runs_a_job_to_its_last_push(tmp_path: Path) -> None:
    """`datagrams.py` is one, both sides, in some fifty lines."""
    job = Job(START, ASGD(0.05), lambda number: quadratic, workers=2, pushes=40, pace=Bounded(2))
    served = PartServer(job, 0, 1)
    with closing(DatagramServer(served, tmp_path / "server")) as server, ExitStack() as ends:
        threads = [threading.Thread(target=server.run)]
        for number in range(job.workers):
            worker = PartedWorker(number, quadratic, START, servers=1)
            connections = DatagramConnections(ServerReply, [tmp_path / "server"], tmp_path / f"worker-{number}")
            ends.callback(connections.close)
            threads.append(threading.Thread(target=WorkerClient(worker, connections, 20.0).run))
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join(60)
        server.stop()
        threads[0].join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert served.server.version == 40
    assert abs(served.server.pushes[0] - served.server.pushes[1]) <= 3


# Strangers ----------------------------------------------------------------------------------------------------------


@contextmanager
def attacked(**settings: Any) -> Generator[SocketServer]:
    """A server that goes on with its honest peer whatever strangers do, on the connection that it had before."""
    with (
        serving(SocketServer(Doubler(), TCP, SECRET, **settings)) as server,
        closing(connected(server, 7, Replied)) as honest,
    ):
        require_served(honest)
        yield server
        require_served(honest)
        assert 7 not in doubler(server).lost_peers


def require_served(honest: Connections) -> None:
    assert asked(honest, Double("", torch.ones(1))).values.tolist() == [2.0]


def doubler(server: SocketServer) -> Doubler:
    assert isinstance(server.served, Doubler)
    return server.served


def test_who_does_not_say_who_it_is_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scanner that sends nothing, and one that sends a byte now and then."""
    monkeypatch.setattr("gradwire.peers.sockets.server._GREETING_S", 0.5)
    with attacked() as server:
        begun_s = time.monotonic()
        silent, dripping = raw(server.address), raw(server.address)
        with suppress(ConnectionError):
            while time.monotonic() < begun_s + 20:
                dripping.sendall(b"g")
                time.sleep(0.1)
        assert is_cut_off(silent)
        assert is_cut_off(dripping)
        assert time.monotonic() < begun_s + 10
        assert server.refused == {"late": 2}
        assert not server.strangers


def test_of_many_strangers_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.peers.sockets.server._MOST_STRANGERS", 4)
    with attacked() as server, ExitStack() as lines:
        strangers = [lines.enter_context(raw(server.address)) for _ in range(6)]
        for line in strangers:
            assert len(read(line, greeting.GREETING)) == greeting.GREETING
        assert is_cut_off(strangers[0])
        assert is_cut_off(strangers[1])
        assert server.refused == {"late": 2}
        with closing(connected(server, 1, Replied)) as late:
            require_served(late)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n" * 20, bytes(1000), b"\xff" * greeting.ANSWER])
def test_strangers_are_cut_off(noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with attacked() as server:
        for _ in range(2):
            line = raw(server.address)
            line.sendall(noise)
            assert is_cut_off(line)
        assert server.refused == {"stranger": 2}
    assert [record.message for record in caplog.records] == [
        "refused: a peer that is not of this version of gradwire: it does not begin as this one does"
    ]


def test_another_version_is_named_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(SocketServer(Doubler(), TCP, SECRET)) as server, closing(connected(server, 1, Replied)) as peer:
        greet, here = greeting.greeting, threading.current_thread()
        other = greet().replace(VERSION.encode().ljust(20, b"\0"), b"0.0.1".ljust(20, b"\0"))
        monkeypatch.setattr(greeting, "greeting", lambda: other if threading.current_thread() is here else greet())
        with pytest.raises(CommunicationError) as told:
            peer.ask(0, Release())
        wait_for(lambda: server.refused == {"version": 1}, 20)
    rest = "install one version everywhere"
    assert str(told.value) == f"a server has gradwire {VERSION}, and here it is 0.0.1: {rest}"
    assert f"a peer has gradwire 0.0.1, and here it is {VERSION}: {rest}" in caplog.text


def test_another_secret_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with attacked() as server, closing(connected(server, 1, Replied, secret=bytes(16))) as other:
        with pytest.raises(CommunicationError, match=r"the server at .* is of another run: its secret differs"):
            other.ask(0, Release())
        wait_for(lambda: server.refused == {"secret": 1}, 20)
    assert "a peer does not know this run's secret: it is of another run" in caplog.text
    assert SECRET.hex() not in caplog.text


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    """It may let in whoever it likes: what it says in the end is no proof."""
    for verdict in (greeting.REFUSED, bytes(range(32))):
        with pretending(lambda line, verdict=verdict: line.sendall(verdict), is_known=False) as address:
            connections = SocketConnections(Replied, [address], SECRET, 0, most_bytes=1000)
            with closing(connections), pytest.raises(CommunicationError, match="its secret differs"):
                connections.ask(0, Release())


def test_a_recorded_conversation_opens_no_other_connection() -> None:
    with attacked() as server:
        with raw(server.address) as line:
            recorded = greeting.answer(read(line, greeting.GREETING), greeting.greeting(), 1, SECRET)
            line.sendall(recorded)
            assert read(line, greeting.VERDICT) != greeting.REFUSED
        again = raw(server.address)
        again.sendall(recorded + frame(1, pack(Fail())))
        assert is_cut_off(again)
        assert server.refused == {"secret": 1}


# Those who are known ------------------------------------------------------------------------------------------------


class Empty(Record, frozen=True, tag="Double"):
    name: str


class More(Record, frozen=True, tag="Double"):
    name: str
    values: Floats
    more: Count


class Mistyped(Record, frozen=True, tag="Keep"):
    number: str


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (Empty("x"), "it has no 'values'"),
        (More("x", torch.ones(1), 1), "it has 'more', which is unknown"),
        (Mistyped("3"), "its number should be a whole number, not a text"),
        (
            Double("x", torch.ones(1, 1)),
            "should be a vector of torch.float32 or torch.float64, not a tensor of shape (1, 1)",
        ),
        (Keep(-1), "its number should be a whole number from 0"),
    ],
)
def test_a_record_with_a_wrong_field_is_refused(record: Record, field: str, caplog: pytest.LogCaptureFixture) -> None:
    with attacked() as server:
        for count in (1, 2):
            with greeted(server.address, 3) as line:
                line.sendall(frame(1, pack(record)))
                assert is_cut_off(line)
            assert server.refused == {"record": count}
        wait_for(lambda: doubler(server).lost_peers == [3, 3], 20)
    [told] = [record.message for record in caplog.records]
    assert "refused: peer 3 sent" in told
    assert field in told


def test_a_request_that_comes_twice_is_refused() -> None:
    with attacked() as server:
        with greeted(server.address, 3) as line:
            line.sendall(2 * frame(1, pack(Keep(1))))
            assert is_cut_off(line)
        assert server.refused == {"replayed": 1}
        assert [number for number, _ in doubler(server).kept] == [1]
        doubler(server).kept.clear()


@pytest.mark.parametrize("length", [(1 << 28) + 1, 1 << 62, (1 << 63) | 8, (1 << 64) - 1])
def test_a_length_is_refused_before_memory_is_allocated(length: int) -> None:
    """The highest bit says that the record lies in shared memory, and here there is none."""
    with attacked() as server:
        with greeted(server.address, 3) as line:
            line.sendall(frame(1, b"", length))
            assert is_cut_off(line)
        assert server.refused == {"length": 1}


def test_a_reply_that_is_too_long_is_refused() -> None:
    with attacked() as server, closing(connected(server, 1, Replied, most_bytes=1000)) as peer:
        require_served(peer)
        peer.ask(0, Double("", torch.ones(1000)))
        with pytest.raises(CommunicationError, match=r"a frame of 4\d\d\d bytes, where 1000 are the most"):
            peer.wait(20)


def test_a_reply_that_is_none_is_named() -> None:
    with attacked() as server, closing(connected(server, 1, Said)) as peer:
        peer.ask(0, Double("", torch.ones(1)))
        with pytest.raises(RecordError, match="no Said: its type is 'Doubled', which is unknown"):
            peer.wait(20)


def test_a_record_that_ends_early_is_none() -> None:
    packed = pack(Keep(1))
    with attacked() as server:
        with greeted(server.address, 3) as line:
            line.sendall(frame(1, packed)[:-1])
        wait_for(lambda: doubler(server).lost_peers == [3], 20)
        assert doubler(server).kept == []
    with pretending(lambda line: line.sendall(frame(1, packed)[:-1])) as address:
        connections = SocketConnections(Replied, [address], SECRET, 0, most_bytes=1000)
        with closing(connections):
            assert isinstance(error_of(connections, Keep(1)), ConnectionResetError)


def test_a_second_connection_of_a_peer_takes_the_place_of_the_first() -> None:
    """A worker whose connection was lost comes back before the server has found out."""
    with attacked() as server:
        first = greeted(server.address, 3)
        with closing(connected(server, 3, Replied)) as second:
            require_served(second)
            assert is_cut_off(first)
            require_served(second)
            assert doubler(server).lost_peers == []
        wait_for(lambda: doubler(server).lost_peers == [3], 20)


def test_an_address_that_is_taken_is_said(tmp_path: Path) -> None:
    with (
        attacked() as server,
        pytest.raises(CommunicationError, match=r"port \d+ of 127.0.0.1 is in use: give another"),
    ):
        SocketServer(Doubler(), server.address, SECRET)
    with pytest.raises(CommunicationError, match=r"no server can listen at .*missing.*No such file"):
        SocketServer(Doubler(), str(tmp_path / "missing" / "server"), SECRET)


def test_nobody_there_is_an_error_that_arrives(tmp_path: Path) -> None:
    connections = SocketConnections(Replied, [str(tmp_path / "nobody")], SECRET, 0, most_bytes=1000)
    with closing(connections):
        assert isinstance(error_of(connections, Release()), FileNotFoundError)


# Silence ------------------------------------------------------------------------------------------------------------


@contextmanager
def pretending(then: Callable[[socket.socket], object], *, is_known: bool = True) -> Generator[tuple[str, int]]:
    """The address of one who greets a peer as a server does, without its last word unless it is known, and then..."""
    with socket.create_server(TCP) as listener:

        def run() -> None:
            line, _ = listener.accept()
            with line:
                ours = greeting.greeting()
                line.sendall(ours)
                answered = read(line, greeting.ANSWER)
                if is_known:
                    line.sendall(greeting.heard(answered, ours, SECRET).verdict)
                then(line)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("turn_s", [0.1, 20.0])
def test_a_server_that_falls_silent_is_lost(turn_s: float) -> None:
    """However short the turns are in which its peer waits."""
    over = threading.Event()
    with pretending(lambda line: over.wait(20)) as address:
        connections = SocketConnections(Replied, [address], SECRET, 0, most_bytes=1000, silent_s=SILENT_S)
        with closing(connections):
            begun_s = time.monotonic()
            connections.ask(0, Keep(1))
            while (arrived := connections.wait(turn_s)) is None:
                assert time.monotonic() < begun_s + 15
            assert isinstance(arrived.error, TimeoutError)
            assert str(arrived.error) == "no sign of life for 1 s"
            assert time.monotonic() > begun_s + SILENT_S
        over.set()


def test_signs_of_life_keep_nothing_of_a_lost_connection() -> None:
    """What their thread is the last to hold it lets go of, which is to be none of PyTorch's while Python ends."""
    server = SocketServer(Doubler(), ("127.0.0.1", 0), SECRET)
    with serving(server), closing(connected(server, replies=Replied, silent_s=SILENT_S)) as connections:
        assert asked(connections, Double("a", torch.ones(2))).name == "a"
        time.sleep(2 * SILENT_S / frames.BEATS)  # there were signs of life
        end = weakref.ref(connections._ends[0])  # pyright: ignore[reportPrivateUsage]
        connections.fail(0, OSError("it is lost"))
        assert end() is None


def test_a_server_that_does_not_greet_is_lost() -> None:
    with socket.create_server(TCP) as listener:
        connections = SocketConnections(Replied, [listener.getsockname()], SECRET, 0, most_bytes=1000, connect_s=0.2)
        with closing(connections):
            assert isinstance(error_of(connections, Keep(1)), TimeoutError)


def test_a_peer_that_falls_silent_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with serving(SocketServer(Doubler(), TCP, SECRET, silent_s=SILENT_S)) as server:
        begun_s = time.monotonic()
        assert is_cut_off(greeted(server.address, 3))
        assert SILENT_S < time.monotonic() - begun_s < 15
        wait_for(lambda: doubler(server).lost_peers == [3], 20)
        assert not server.refused
    assert "peer 3 was silent for" in caplog.text


@pytest.mark.one_draw_in(2)
def test_who_computes_gives_signs_of_life() -> None:
    """Both a peer between a request and its wait, or between two requests, and a server that keeps a request."""
    with serving(SocketServer(Doubler(), TCP, SECRET, silent_s=SILENT_S)) as server:
        with closing(connected(server, 3, Replied, silent_s=SILENT_S)) as peer:
            peer.ask(0, Keep(1))
            time.sleep(2.5 * SILENT_S)
            assert peer.wait(2 * SILENT_S) is None
            peer.ask(0, Release())
            found = [peer.wait(20) for _ in range(2)]
            assert [arrived and arrived.reply for arrived in found] == [Said(1), Said(0)]
            time.sleep(2.5 * SILENT_S)
            require_served(peer)
            assert doubler(server).lost_peers == []
        wait_for(lambda: doubler(server).lost_peers == [3], 20)


def test_a_server_that_takes_nothing_up_is_lost_and_others_keep_their_peer() -> None:
    over = threading.Event()
    with (
        pretending(lambda line: over.wait(20)) as full,
        serving(SocketServer(Doubler(), TCP, SECRET, silent_s=SILENT_S)) as server,
    ):
        there = [server.address, full]
        connections = SocketConnections(Replied, there, SECRET, 3, most_bytes=1 << 20, silent_s=SILENT_S)
        with closing(connections):
            require_served(connections)
            assert isinstance(error_of(connections, Double("", torch.zeros(16 << 20)), 1), OSError)
            require_served(connections)
            assert doubler(server).lost_peers == []
        over.set()


# Servers that end ---------------------------------------------------------------------------------------------------


def test_a_protocol_object_that_fails_ends_its_server(caplog: pytest.LogCaptureFixture) -> None:
    server = SocketServer(Doubler(), TCP, SECRET)
    with closing(connected(server, 1, Replied)) as peer:
        with pytest.raises(ZeroDivisionError, match="this server breaks"), serving(server):
            assert isinstance(error_of(peer, Fail()), ConnectionError)
        assert isinstance(error_of(peer, Fail()), ConnectionError)
    assert isinstance(server.failure, ZeroDivisionError)
    assert "a server ends: this server breaks" in caplog.text


def test_a_server_in_a_thread_of_its_own_is_closed_once() -> None:
    server = SocketServer(Doubler(), TCP, SECRET)
    server.start()
    with closing(SocketConnections(Replied, [server, server.address], SECRET, 1, most_bytes=1 << 20)) as peer:
        for there in range(2):
            assert asked(peer, Double("", torch.ones(1)), there).values.tolist() == [2.0]
        assert server.sent_bytes == 4 + 3  # a reply in the same process is not sent
        assert peer.sent_bytes == [0, 4]
        server.close()
        server.close()
        assert isinstance(error_of(peer, Release(), 1), OSError)


# Frames -------------------------------------------------------------------------------------------------------------


class Long:
    """A part of more bytes than 32 bits can count, as far as its length goes."""

    def __len__(self) -> int:
        return 5 << 30


def test_a_part_of_more_than_four_gibibytes_has_a_frame() -> None:
    part: Any = Long()
    head, found = framed(7, [part])
    assert head == (5 << 30).to_bytes(8, "little") + (7).to_bytes(8, "little")
    assert found is part


def test_frames_are_as_they_are_written_here() -> None:
    packed = pack(Keep(1))
    assert b"".join(framed(3, [packed])) == frame(3, packed)
    assert frame(0, b"") == frames.HEARTBEAT


FRAMES = st.lists(
    st.tuples(st.integers(1, 2**60), st.sampled_from([0, 1, 100, 70_000]) | st.integers(0, 300)), max_size=8
)


@given(FRAMES, st.lists(st.integers(1, 1 << 17), min_size=1), st.randoms())
def test_frames_come_as_they_were_sent_wherever_the_network_cuts_them(
    lengths: list[tuple[int, int]], cuts: list[int], draw: random.Random
) -> None:
    records = [(number if length else 0, draw.randbytes(length)) for number, length in lengths]
    stream, inbox, found = (
        b"".join(frame(*record) for record in records),
        Inbox(70_000, None),
        list[tuple[int, memoryview]](),
    )
    for cut in itertools.cycle(cuts):
        if not stream:
            break
        space = inbox.space()
        nbytes = min(cut, len(space), len(stream))
        assert nbytes > 0
        space[:nbytes], stream = stream[:nbytes], stream[nbytes:]
        found += inbox.take(nbytes)
    # looked at only now, since what comes later must not be written over it; the others are heartbeats
    assert [(number, bytes(packed)) for number, packed in found] == [
        (number, packed) for number, packed in records if packed
    ]


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=30))
def test_a_record_that_comes_alone_lies_where_its_tensors_are_aligned(lengths: list[int]) -> None:
    inbox = Inbox(9000, None)
    for length in lengths:
        stream, found = frame(1, bytes(length)), list[tuple[int, memoryview]]()
        while stream:
            space = inbox.space()
            nbytes = min(len(space), len(stream))
            space[:nbytes], stream = stream[:nbytes], stream[nbytes:]
            found += inbox.take(nbytes)
        [(_, packed)] = found
        assert torch.frombuffer(packed, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0


# Supervised children ------------------------------------------------------------------------------------------------


class FakeChild:
    """Ends as it is told.

    Attributes:
        how: None while it runs.
    """

    def __init__(self) -> None:
        self.how: str | None = None
        self.kills = 0

    def ended(self) -> str | None:
        return self.how

    def kill(self) -> None:
        self.how = self.how or "was killed"
        self.kills += 1


def test_children_are_started_anew_as_often_as_they_may() -> None:
    supervisor = Supervisor(lambda number: FakeChild(), 3, restarts=2)
    first = supervisor.children[1]
    assert supervisor.look() == []
    supervisor.children[0].how = ""
    assert supervisor.look() == [0], "who has ended well is not started anew"
    for _ in range(2):
        supervisor.children[1].how = "failed"
        assert supervisor.look() == []
    supervisor.children[1].how = "failed at last"
    assert supervisor.look() == [1]
    assert supervisor.look() == []
    assert supervisor.dead == [0, 1]
    assert supervisor.how == {0: "", 1: "failed at last"}
    assert supervisor.lost == [1, 1, 1]
    assert supervisor.restarted == {1: 2}
    assert supervisor.children[1] is not first
    supervisor.start_anew(1)
    assert supervisor.dead == [0]


def test_who_runs_is_ended_before_another_takes_its_place_and_all_are_in_the_end() -> None:
    with Supervisor(lambda number: FakeChild(), 2) as supervisor:
        first = supervisor.children[0]
        supervisor.start_anew(0)
        assert first.kills == 1
        children = [*supervisor.children]
    assert [child.kills for child in children] == [1, 1]


def test_a_child_that_cannot_be_started_ends_those_before_it() -> None:
    children: list[FakeChild] = []

    def start(number: int) -> FakeChild:
        if number == 2:
            raise OSError("no more processes")
        children.append(FakeChild())
        return children[-1]

    with pytest.raises(OSError, match="no more processes"):
        Supervisor(start, 3)
    assert [child.kills for child in children] == [1, 1]


def test_processes_end_well_or_not_and_stopped_ones_are_ended_too() -> None:
    def start(number: int) -> ChildProcess:
        return ChildProcess(sys.exit, 3) if number == 1 else ChildProcess(time.sleep, 1000 * (number > 1))

    with Supervisor(start, 4) as supervisor:
        os.kill(supervisor.children[2].pid, signal.SIGTERM)
        os.kill(supervisor.children[3].pid, signal.SIGSTOP)
        end_s = time.monotonic() + 60
        while len(supervisor.dead) < 3:
            assert time.monotonic() < end_s
            wait_for_any(supervisor.children, 1.0)
            supervisor.look()
        assert supervisor.how == {0: "", 1: "ended with status 3", 2: "was killed by SIGTERM"}
        stopped = supervisor.children[3]
        assert stopped.ended() is None
    assert stopped.ended() == "was killed by SIGKILL"
