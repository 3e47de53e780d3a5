"""The carrier with faults does what it says, and random schedules of protocol objects over it break no promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import part_schedules
import round_schedules
from gradwire.asynchronous import ASGD, Bounded
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import PartedWorker, PartServer
from gradwire.asynchronous.several.messages import (
    Gone,
    Granted,
    Hello,
    Here,
    Join,
    Look,
    Progress,
    PushRequest,
    Refused,
    Stop,
    Watch,
)
from gradwire.core.errors import CompositionError, RecordError
from gradwire.core.record import Count, Record
from gradwire.peers.faulty import CarrierFaults, FaultyConnections, FaultyNetwork
from gradwire.peers.protocol import Reply, Served
from promises import Broken

QUIET = CarrierFaults(lost=0, repeated=0, late=0, cut=0, kills=0, stops=0)


class Add(Record, frozen=True):
    """A request."""

    number: Count


class Sum(Record, frozen=True):
    """A reply."""

    number: int


class Summing(Served):
    """Replies with the sum of what it was asked."""

    requests = Add

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.peers_lost: list[int] = []

    def ask(self, request: Add, reply: Reply) -> None:
        self.heard.append(request.number)
        reply(Sum(sum(self.heard)))

    def lost(self, peer: int) -> None:
        self.peers_lost.append(peer)


class Bench:
    """A server, and a peer that asks it for 1, 2, 3, ... at these times."""

    def __init__(self, faults: CarrierFaults, at_s: list[float], seed: int = 0) -> None:
        self.network, self.served = FaultyNetwork(faults, seed), list[Summing]()
        self.sums: list[int] = []
        self.errors: list[str] = []
        self.at_s = at_s
        self.server = self.network.serve(self._serve)
        self.peer = self.network.join(7, self._main, Sum)

    def _serve(self) -> Summing:
        self.served.append(Summing())
        return self.served[-1]

    def _main(self, connections: FaultyConnections) -> Iterator[float]:
        for number, at_s in enumerate(self.at_s, 1):
            while connections.now_s() < at_s:
                yield at_s - connections.now_s()
                self._take(connections)
            connections.ask(0, Add(number))
        while True:
            yield 1.0
            self._take(connections)

    def _take(self, connections: FaultyConnections) -> None:
        while (arrived := connections.wait(0.0)) is not None:
            if arrived.error is None:
                self.sums.append(arrived.reply.number)
            else:
                self.errors.append(str(arrived.error))


def test_nothing_goes_wrong_where_nothing_is_to() -> None:
    bench = Bench(QUIET, [0.0, 0.1, 0.5, 2.0])
    bench.network.run(5.0)
    assert (bench.sums, bench.errors, bench.served[0].peers_lost) == ([1, 3, 6, 10], [], [])
    assert not +bench.network.happened


def test_nonsense_is_refused() -> None:
    for lost, late, cut in ((-0.1, 0.0, 0.0), (0.0, 1.5, 0.0), (0.6, 0.0, 0.6)):
        with pytest.raises(CompositionError, match="shares from 0 to 1"):
            CarrierFaults(lost=lost, late=late, cut=cut)
    with pytest.raises(CompositionError, match="of 0 or more"):
        CarrierFaults(silent_s=-1.0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_seed_draws_the_same_run_again(is_packed: bool) -> None:
    faults = CarrierFaults(is_packed=is_packed, until_s=5.0)
    runs = [Bench(faults, [0.1 * number for number in range(50)], seed=3) for _ in range(2)]
    for bench in runs:
        bench.network.plan_faults()
        bench.network.run(20.0)
    first, second = ((bench.sums, bench.errors, bench.network.happened) for bench in runs)
    assert first == second
    assert sum(first[2].values()) > 5


def test_lost_messages_get_no_reply_and_repeated_ones_count_twice() -> None:
    bench = Bench(CarrierFaults(lost=1, repeated=0, late=0, cut=0, until_s=1.0), [0.0, 2.0])
    bench.network.run(5.0)
    assert (bench.served[0].heard, bench.sums, bench.errors) == ([2], [2], [])
    bench = Bench(CarrierFaults(lost=0, repeated=1, late=0, cut=0, until_s=0.05, is_ordered=True), [0.0])
    bench.network.run(5.0)
    assert (bench.served[0].heard, bench.sums) == ([1, 1], [1])


def test_messages_keep_their_order_only_where_they_are_to() -> None:
    at_s = [0.001 * number for number in range(30)]
    ordered, disordered = (
        Bench(CarrierFaults(0, 0, 0, 0, 0, 0, is_ordered=is_ordered), at_s) for is_ordered in (True, False)
    )
    for bench in (ordered, disordered):
        bench.network.run(5.0)
    assert ordered.served[0].heard == list(range(1, 31))
    assert disordered.served[0].heard != sorted(disordered.served[0].heard) == list(range(1, 31))


def test_both_ends_find_that_a_connection_was_cut_and_connect_again() -> None:
    bench = Bench(CarrierFaults(lost=0, repeated=0, late=0, cut=1, until_s=1.0), [0.0, 2.0])
    bench.network.run(5.0)
    assert (bench.served[0].heard, bench.sums) == ([2], [2])
    assert bench.errors == ["the connection was cut"]
    assert set(bench.served[0].peers_lost) <= {7}


def test_a_killed_server_is_another_one_afterwards() -> None:
    bench = Bench(QUIET, [0.0, 1.0, 10.0])
    bench.network.run(0.5)
    bench.network.kill(bench.server)
    bench.network.run(0.9)
    assert not bench.server.is_up
    bench.network.run(20.0)
    assert bench.server.lives == 2
    assert bench.served[1].heard[-1] == 3
    assert bench.errors in ([], ["nobody listens there"])


def test_a_server_hears_that_a_peer_was_killed() -> None:
    bench = Bench(QUIET, [0.0])
    bench.network.run(0.5)
    bench.network.end(bench.peer)
    bench.network.run(1.0)
    assert bench.served[0].peers_lost == [7]


def test_a_stopped_server_is_missed_and_receives_all_at_once_when_it_is_continued() -> None:
    bench = Bench(CarrierFaults(0, 0, 0, 0, 0, 0, silent_s=1.0), [0.0, 1.1, 1.2, 4.0])
    bench.network.run(1.0)
    bench.network.stop(bench.server, 0.9)
    bench.network.run(1.8)
    assert bench.served[0].heard == [1]
    bench.network.run(2.0)
    assert bench.served[0].heard == [1, 2, 3]
    bench.network.stop(bench.server, 8.0)
    bench.network.run(9.0)
    assert bench.errors == ["the connection was cut"]
    bench.network.run(12.0)
    assert bench.served[0].peers_lost == [7, 7]  # the connection from before, and the one that was made meanwhile
    assert (bench.served[0].heard, bench.sums) == ([1, 2, 3, 4], [1, 3, 6])


def test_what_is_no_request_is_found_where_records_are_packed() -> None:
    class Wrong(Record, frozen=True):
        number: str

    bench = Bench(QUIET, [])

    def main(connections: FaultyConnections) -> Iterator[float]:
        connections.ask(0, Wrong("1"))
        yield 1.0

    bench.network.join(8, main, Sum)
    with pytest.raises(RecordError, match=r"no Add: its \w+ should be a whole number, not a text"):
        bench.network.run(2.0)


def test_a_process_sends_and_receives_nothing_while_it_computes() -> None:
    bench, sums = Bench(QUIET, []), list[tuple[float, int]]()

    def main(connections: FaultyConnections) -> Iterator[float]:
        connections.ask(0, Add(1))
        connections.sleep(2.0)
        connections.ask(0, Add(2))
        while len(sums) < 2:
            yield 0.5
            while (arrived := connections.wait(0.0)) is not None:
                sums.append((connections.now_s(), arrived.reply.number))

    process = bench.network.join(8, main, Sum)
    bench.network.run(1.9)
    assert (bench.served[0].heard, sums) == ([1], [])
    bench.network.run(5.0)
    assert [number for _, number in sums] == [1, 3]
    assert sums[0][0] == 2.0
    assert not process.is_up


# Servers of parts -----------------------------------------------------------------------------------------------------


def check_all(count: int, first: int = 0, **kinds: Any) -> None:
    for seed in range(first, first + count):
        part_schedules.check(seed, **kinds)


@pytest.mark.draw(2)
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_schedules_of_parts_break_no_promise(first: int) -> None:
    check_all(50, first)


@pytest.mark.parametrize("seed", [56639, 70797, 97573])
def test_schedules_that_once_broke_a_promise(seed: int) -> None:
    part_schedules.check(seed)  # a worker was forgotten while it paused; a server forgot whom it had let begin behind


@pytest.mark.parametrize("mutant", [part_schedules.Own, part_schedules.Trusting, part_schedules.Forgetful])
def test_schedules_find_servers_that_do_otherwise(mutant: type[part_schedules.WatchedPart]) -> None:
    with pytest.raises(Broken):
        check_all(100, part=mutant)


def test_schedules_find_workers_that_never_look() -> None:
    with pytest.raises(Broken, match="for ever"):
        check_all(100, worker=part_schedules.Blind)


def test_servers_with_clocks_of_their_own_would_wait_for_each_other_in_a_circle() -> None:
    """A schedule in which they do; with the workers' own clocks it goes on."""
    with pytest.raises(Broken, match="wait for ever"):
        part_schedules.check(84, part_schedules.Own)
    part_schedules.check(84)


# Federations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [round_schedules.check_rounds, round_schedules.check_buffered])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_schedules_of_federations_break_no_promise(check: Callable[[int], Any], first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)


def serve_rounds(schedule: round_schedules.RoundSchedule) -> round_schedules.RoundServer:
    return round_schedules.rounds_of(schedule, round_schedules.TrustingRounds)


def serve_buffer(schedule: round_schedules.RoundSchedule) -> round_schedules.BufferServer:
    return round_schedules.buffer_of(schedule, round_schedules.TrustingBuffer)


@pytest.mark.parametrize("serve", [serve_rounds, serve_buffer])
def test_schedules_find_federations_that_trust_what_comes(serve: Any) -> None:
    with pytest.raises(Broken):
        check_served(100, serve)


def check_served(count: int, serve: Any) -> None:
    for seed in range(count):
        round_schedules.check(seed, serve)


# What schedules found -------------------------------------------------------------------------------------------------


def test_a_worker_that_a_server_has_forgotten_joins_again() -> None:
    """An older process's hello came late, so the server has that one for this worker, and says so to a look."""
    worker = PartedWorker(0, None, {"x": torch.zeros(4)}, servers=2)
    first, second = worker.begin()
    assert isinstance(first, Hello)
    [early, look] = worker.poll()
    assert isinstance(look, Look)
    [again] = worker.receive(early, Gone())
    assert isinstance(again, Hello)
    assert worker.receive(early, Gone()) == []  # it comes late, and says nothing of the new hello
    assert worker.receive(again, Here()) == []
    joins = worker.receive(second, Here(1))
    values = torch.zeros(2)
    assert [type(join) for join in joins] == [Join, Join]
    worker.receive(joins[0], Granted(0, 0, 0, 0, 1, values))
    [held, _] = worker.poll()
    [join] = worker.receive(held, Gone())
    assert (type(join), join.server, worker.holds(0)) == (Join, 0, False)
    assert not isinstance(join, PushRequest)


def test_a_server_that_is_done_hands_out_nothing_when_a_worker_leaves() -> None:
    job = Job({"x": torch.zeros(4)}, ASGD(1.0), part_schedules.never, workers=2, pushes=10, pace=Bounded(0))
    served, replies = PartServer(job, 0, 2), list[Any]()
    served.ask(Hello(0, 0, 1, 1), replies.append)
    served.ask(Join(0, 0, 1, 2, clock=1), replies.append)  # it waits for worker 1
    served.finish()
    served.lost(1)
    served.ask(Watch([0, 1]), replies.append)
    assert [type(reply) for reply in replies] == [Here, Stop, Progress]


def test_nothing_is_remembered_of_workers_that_there_are_not() -> None:
    served, replies = PartServer(part_schedules.Schedule(0).job, 0, 2), list[Any]()
    for worker in range(100, 200):
        served.ask(Hello(0, worker, 1, 1), replies.append)
        served.ask(Join(0, worker, 1, 2, clock=1), replies.append)
    assert {type(reply) for reply in replies} == {Refused}
    assert not served._last  # pyright: ignore[reportPrivateUsage]
