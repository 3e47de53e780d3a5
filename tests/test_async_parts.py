"""Parameters over several servers, and what a worker makes of servers that disagree. Schedules: `test_faulty`."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from async_cases import START, optimum, quadratic
from gradwire import CommunicationError, CompositionError, PushError, StateError, StepError
from gradwire.asynchronous import ASGD, Bounded, Grant, Matched, ParameterServer, Result, Sending, Worker
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import (
    Journal,
    JournalRow,
    PartedWorker,
    PartServer,
    ServerWatch,
    WorkerClient,
    named_parts,
    server_of,
)
from gradwire.asynchronous.several.journal import history
from gradwire.asynchronous.several.messages import (
    AnyRequest,
    Failed,
    Gone,
    Granted,
    Hello,
    Here,
    Join,
    PushRequest,
    ServerReply,
    WorkerRequest,
)
from gradwire.codecs import QSGD, TopK
from gradwire.peers.local import LocalConnections
from gradwire.peers.protocol import Reply, Served

Heard = list[Any]


def even(worker: int) -> Any:
    return quadratic


def job_of(**settings: Any) -> Job:
    return Job(
        START, ASGD(0.05), even, workers=settings.pop("workers", 2), pushes=settings.pop("pushes", 10**6), **settings
    )


def joins_of(worker: PartedWorker) -> list[WorkerRequest]:
    """What a worker asks of servers that are there and know nothing of it yet."""
    return [join for hello in worker.begin() for join in worker.receive(hello, Here())]


class Bench:
    """Servers and workers that hand records to each other at once, in the order in which they were sent."""

    def __init__(self, job: Job, servers: int, work: Any = quadratic) -> None:
        self.job = job
        self.part_servers = [PartServer(job, part, servers) for part in range(servers)]
        self.workers = [
            PartedWorker(number, work, START, servers=servers, sending=job.sending, seed=job.seed, process=number)
            for number in range(job.workers)
        ]
        self.open: list[WorkerRequest] = []
        self.heard: list[tuple[WorkerRequest, ServerReply]] = []

    def begin(self) -> None:
        for worker in self.workers:
            self.open += worker.begin()

    def turn(self) -> None:
        """Deliver all requests, then all replies."""
        requests, self.open = self.open, []
        for request in requests:
            self.part_servers[request.server].ask(request, functools.partial(self._hear, request))
        heard, self.heard = self.heard, []
        for request, reply in heard:
            self.open += self.workers[request.worker].receive(request, reply)

    def _hear(self, request: WorkerRequest, reply: Any) -> None:
        self.heard.append((request, reply))

    def values(self) -> Tensor:
        return torch.cat([part_server.server.values for part_server in self.part_servers])


# Parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_parts_are_even_and_put_together_again(servers: int) -> None:
    start = {"x": torch.arange(5.0), "y": torch.arange(3.0)}
    parts = [part for one in named_parts(start, servers) for part in one.values()]
    assert torch.cat(parts).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert {len(part) for part in parts} <= {8 // servers, 8 // servers + 1}
    with pytest.raises(CompositionError, match="9 servers for 8 parameters"):
        named_parts(start, 9)


def test_one_server_of_all_is_the_server() -> None:
    job = job_of(workers=1)
    bench, server, worker = Bench(job, 1), job.server(), Worker(quadratic, START)
    bench.begin()
    [grant] = server.join(0)
    for _ in range(6):
        bench.turn()
    for _ in range(bench.part_servers[0].server.version):
        [grant] = server.receive(worker.compute(grant, server.values.clone())).grants
    assert server.version > 2
    assert torch.equal(bench.values(), server.values)


def test_parts_of_one_push_draw_different_bits() -> None:
    """Three equal parts of equal numbers: rounded at random, they differ."""
    start = {"x": torch.zeros(96)}
    job = Job(start, ASGD(1.0), even, workers=1, pushes=9, sending=Sending(QSGD(3)))

    def third(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        return Result({"x": torch.linspace(0, 1, 32).repeat(3)}, 0.0)

    worker = PartedWorker(0, third, start, servers=3, sending=job.sending)
    granted = Granted(0, 0, 0, 0, 1, torch.zeros(32))
    pushes = [one for join in joins_of(worker) for one in worker.receive(join, granted)]
    wires = [push.wire.tolist() for push in pushes if isinstance(push, PushRequest)]
    assert len(wires) == 3
    assert wires[0] != wires[1] != wires[2] != wires[0]


def test_a_push_at_the_wrong_server_is_refused() -> None:
    bench = Bench(job_of(workers=1), 2)
    bench.begin()
    bench.turn()
    bench.turn()
    [_, second] = bench.open
    heard: Heard = []
    bench.part_servers[0].ask(replace(second, serial=9), heard.append)
    assert "of another model" in heard[0].text
    assert bench.part_servers[0].server.version == 0


# Servers that disagree ------------------------------------------------------------------------------------------


def test_a_push_refused_at_one_server_is_taken_back_there_alone() -> None:
    """Its memory there is that of before, its part has an update less, and both go on."""
    bench = Bench(job_of(workers=1, sending=Sending(TopK(0.25), decay=1.0)), 2)
    bench.begin()
    for _ in range(3):
        bench.turn()
    pushers = bench.workers[0].pushers
    bench.open[1] = replace(bench.open[1], fingerprint=1)
    before = pushers[1].memory
    for _ in range(3):
        bench.turn()
    assert [part_server.server.version for part_server in bench.part_servers] == [3, 2]
    assert [part_server.server.clocks.completed for part_server in bench.part_servers] == [[3], [3]]
    assert pushers[1].memory is not None
    assert pushers[1].memory is not before
    for _ in range(200):
        bench.turn()
    versions = [part_server.server.version for part_server in bench.part_servers]
    assert versions[0] == versions[1] + 1
    best = torch.cat([tensor.reshape(-1) for tensor in optimum(0).values()])
    assert (bench.values() - best).abs().max() < 0.05


def test_the_fewest_steps_are_agreed_to_and_every_server_finds_the_same_speed() -> None:
    made: list[int] = []

    def counted(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        made.append(grant.steps)
        time.sleep(0.01)
        return quadratic(parameters, grant)

    worker = PartedWorker(0, counted, START, servers=2)
    replies = [Granted(0, 4, 9, 0, steps, torch.ones(4, dtype=torch.float64)) for steps in (8, 2)]
    pushes = [one for join, reply in zip(joins_of(worker), replies, strict=True) for one in worker.receive(join, reply)]
    assert made == [2]
    speeds = [push.steps / push.seconds for push in pushes if isinstance(push, PushRequest)]
    assert speeds[0] == pytest.approx(speeds[1])
    assert speeds[0] < 2 / 0.01


def test_matched_steps_over_two_servers_stay_alike() -> None:
    bench = Bench(job_of(length=Matched(8), pace=Bounded(0)), 2)
    bench.begin()
    for _ in range(20):
        bench.turn()
    speeds = [part_server.server.state_dict()["speeds"] for part_server in bench.part_servers]
    assert speeds[0] == pytest.approx(speeds[1])


def test_a_server_that_comes_back_as_it_was_before_its_restart_is_told() -> None:
    worker = PartedWorker(0, quadratic, START, servers=1)
    [join] = joins_of(worker)
    values = torch.ones(8, dtype=torch.float64)
    [push] = worker.receive(join, Granted(0, 9, 9, 1, 1, values))
    with pytest.raises(StateError, match="as it was before its restart 1, at version 3"):
        worker.receive(push, Granted(0, 3, 3, 0, 1, values))


def test_a_worker_that_holds_a_grant_sees_that_its_server_was_restarted(tmp_path: Path) -> None:
    """Others wait for it there, so it joins at once, and not when its push is refused."""
    job = job_of(workers=1, folder=tmp_path)
    first, heard = PartServer(job, 0, 2), Heard()
    worker = PartedWorker(0, quadratic, START, servers=2)
    hellos = worker.begin()
    first.ask(hellos[0], heard.append)
    joins = [join for hello in hellos for join in worker.receive(hello, heard[0])]
    first.ask(joins[0], heard.append)
    assert worker.receive(joins[0], heard[1]) == []  # the other server has not granted anything yet
    look, other = worker.poll()
    assert (look.server, other.server) == (0, 1)
    first.ask(look, heard.append)
    assert worker.receive(look, heard[2]) == []
    look, _ = worker.poll()
    PartServer(job, 0, 2, was_restarted=True).ask(look, heard.append)
    [join] = worker.receive(look, heard[3])
    assert isinstance(join, Join)
    assert join.server == 0


def test_a_look_leaves_a_request_open_and_finds_one_that_was_lost() -> None:
    """A grant that comes after a look counts; a request that the server does not keep is made again."""
    job = job_of(pace=Bounded(0))  # the other worker is waited for
    part_server, worker = PartServer(job, 0, 1), PartedWorker(0, quadratic, START, servers=1)
    granted, seen, heard = Heard(), Heard(), Heard()
    [hello] = worker.begin()
    part_server.ask(hello, heard.append)
    [join] = worker.receive(hello, heard[0])
    part_server.ask(join, granted.append)
    [push] = worker.receive(join, granted.pop())
    [look] = worker.poll()
    part_server.ask(look, seen.append)  # the push is on its way still, or was lost: so it is taken for lost
    [again] = worker.receive(look, seen.pop())
    assert isinstance(again, Join)
    part_server.ask(push, granted.append)
    part_server.ask(again, granted.append)
    assert [type(reply) for reply in granted] == [Gone]
    for _ in range(2):
        [look] = worker.poll()
        part_server.ask(look, seen.append)
        assert seen[-1].keeps == again.serial
        assert worker.receive(look, seen[-1]) == []
    part_server.watched([1])
    [push] = worker.receive(again, granted[-1])
    assert isinstance(push, PushRequest)
    assert (push.number, worker.clock) == (0, 2)  # it computed twice, and the server has neither


def test_what_is_not_finite_is_sent_to_none() -> None:
    def broken(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        return Result({name: tensor * float("nan") for name, tensor in parameters.items()}, 0.0)

    bench = Bench(job_of(workers=1), 2, broken)
    bench.begin()
    bench.turn()
    with pytest.raises(StepError, match="not finite"):
        bench.turn()


def test_a_second_process_takes_a_workers_place() -> None:
    """The first hears that it is gone, and neither waits for ever nor counts."""
    bench = Bench(job_of(workers=1), 2)
    bench.begin()
    for _ in range(2):
        bench.turn()
    old = list(bench.open)
    second = PartedWorker(0, quadratic, START, servers=2, process=77)
    heard = Heard()
    for request in (*second.begin(), *old):
        bench.part_servers[request.server].ask(request, heard.append)
    assert [type(reply) for reply in heard] == [Here, Here, Gone, Gone]
    assert [type(request) for request in bench.workers[0].receive(old[0], heard[2])] == [Hello] * 2
    assert [part_server.server.version for part_server in bench.part_servers] == [0, 0]


def test_an_unknown_worker_is_told() -> None:
    part_server = PartServer(job_of(), 0, 2)
    heard: Heard = []
    part_server.ask(Hello(0, 7, process=1, serial=1), heard.append)
    assert heard[0].text == "worker 7 is unknown: this server has workers 0 to 1"
    worker = PartedWorker(7, quadratic, START, servers=1)
    with pytest.raises(PushError, match="worker 7 is unknown"):
        worker.receive(worker.begin()[0], heard[0])


def test_a_clock_below_zero_is_refused() -> None:
    with pytest.raises(PushError, match="clocks are 0 or more"):
        server_of(job_of(), 0, 2).join(0, -1)


def test_who_never_came_is_not_waited_for() -> None:
    now = [0.0]
    job = job_of(pace=Bounded(0), patience_s=5.0)
    part_server = PartServer(job, 0, 1, clock=lambda: now[0])
    worker = PartedWorker(0, quadratic, START, servers=1, process=1)
    heard: Heard = []
    [request] = worker.begin()
    for _ in range(2):  # hello, and join
        part_server.ask(request, heard.append)
        [request] = worker.receive(request, heard[-1])
    part_server.ask(request, heard.append)  # its first push; for the second it has to wait
    assert len(heard) == 2
    part_server.watched()
    assert len(heard) == 2
    now[0] = 6.0
    part_server.watched()
    assert [type(reply) for reply in heard] == [Here, Granted, Granted]


# Snapshots and journals -----------------------------------------------------------------------------------------


def test_a_server_of_a_part_goes_on_from_its_folder(tmp_path: Path) -> None:
    job = job_of(workers=1, folder=tmp_path, snapshot_every=2)
    bench = Bench(job, 2)
    bench.begin()
    for _ in range(5):
        bench.turn()
    assert [part_server.server.version for part_server in bench.part_servers] == [3, 3]
    again = PartServer(job, 1, 2, was_restarted=True)
    assert (again.server.version, again.server.life) == (2, 1)
    assert [row.version for row in again.journal.rows()] == [0, 1, 2]
    finished = again.finish()
    assert (finished.version, finished.life) == (2, 1)
    assert finished.rows == again.journal.rows()
    with pytest.raises(StateError, match="was restarted and finds no snapshot in"):
        PartServer(job_of(workers=1, folder=tmp_path / "empty"), 0, 2, was_restarted=True)
    with pytest.raises(StateError):
        PartServer(job_of(workers=3, folder=tmp_path), 0, 2)


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    row = JournalRow(1.5, 0, 1, 2, 3, 4, 0.25)
    Journal(path).add(row)
    with path.open("ab") as file:
        file.write(b"half a row")
    journal = Journal(path)
    journal.add(row._replace(version=4))
    assert Journal(path).rows() == [row, row._replace(version=4)]


def test_a_journal_that_begins_late_has_a_history_too() -> None:
    """Its server went on from a snapshot of version 0.2, which kept no journal, and was restored later on."""
    rows = [JournalRow(0.0, life, 0, version, version, 0, 0.0) for life, version in ((1, 7), (1, 8), (1, 9), (2, 8))]
    assert [(row.life, row.version) for row in history(rows, version=9)] == [(1, 7), (2, 8)]
    assert [(row.life, row.version) for row in history(rows[:3], version=9)] == [(1, 7), (1, 8)]


# Watching -------------------------------------------------------------------------------------------------------


class Broke(Served):
    """A server that can go on no more."""

    requests = AnyRequest

    def ask(self, request: Any, reply: Reply) -> None:
        reply(Failed("OSError: no space left on device"))


def test_a_server_that_fails_is_said_whenever_it_is_asked() -> None:
    watch = ServerWatch(job_of(), LocalConnections([PartServer(job_of(), 0, 2), Broke()]), missed)
    with pytest.raises(CommunicationError, match="server 1 fails: OSError: no space left on device"):
        watch.poll([], 1.0)
    watch = ServerWatch(job_of(), LocalConnections([PartServer(job_of(), 0, 2), Broke()]), missed)
    with pytest.raises(CommunicationError, match="server 1 fails: OSError: no space left on device"):
        watch.finish()


def missed(server: int, error: Exception) -> None:
    raise AssertionError


# Clients --------------------------------------------------------------------------------------------------------


class Flaky(LocalConnections):
    """Connections to servers of which one cannot be reached for so many requests."""

    def __init__(self, servers: Sequence[PartServer], fails: int) -> None:
        super().__init__(servers)
        self.fails = fails

    def send(self, server: int, number: int, request: Any) -> None:
        if server == 0 and self.fails:
            self.fails -= 1
            raise ConnectionRefusedError("connection refused")
        super().send(server, number, request)


def test_a_client_asks_again_until_its_servers_are_there() -> None:
    job = job_of(workers=1, pushes=20)
    part_servers = [PartServer(job, part, 2) for part in range(2)]
    client = WorkerClient(PartedWorker(0, quadratic, START, servers=2), Flaky(part_servers, fails=3), 20.0)
    client.send(client.worker.begin())
    while min(part_server.server.version for part_server in part_servers) < job.pushes:
        client.turn()
    for part_server in part_servers:
        part_server.finish()
    while not client.worker.is_done:
        client.turn()
    assert [part_server.server.version for part_server in part_servers] == [20, 20]


def test_a_client_gives_up_a_server_that_is_not_there() -> None:
    part_servers = [PartServer(job_of(workers=1), part, 2) for part in range(2)]
    worker = PartedWorker(0, quadratic, START, servers=2)
    with pytest.raises(CommunicationError, match=r"worker 0 finds no server 0 after . s: .*connection refused"):
        WorkerClient(worker, Flaky(part_servers, fails=100), 0.3).run()


def test_a_single_server_takes_clocks_too() -> None:
    server = ParameterServer(START, ASGD(0.1), workers=2, pace=Bounded(0))
    assert server.expect(0) == 0
    assert server.join(0, 5) == []
    assert [grant.worker for grant in server.join(1, 5)] == [0, 1]
