"""Elastic workers that are stopped and continued at any point: none turns a run, or its result, into another one."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import elastic_schedule
from elastic_runs import OVER, Crew, Stop, stop_of, stopped_run_of, until
from elastic_schedule import LOST_AFTER_S, Kill, VirtualRun, check, check_drawn, stops_of
from elastic_schedule import Stop as Pause
from gradwire import CommunicationError
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.messages import NO_COPY, Came, Closed, ExpectedWorker, Head, line_of, written
from gradwire.sync.elastic.protocol import Needs, RoundLog, decided, may_close, read
from gradwire.sync.elastic.rounds import Behind, Rounds

HEAD = Head(200, 199, {0: ExpectedWorker("finished")})


def test_a_list_is_not_closed_before_somebody_has_the_copy_of_the_head() -> None:
    old, unborn, current = Came(1, "stopped", copy=50), Came(2, "new", copy=NO_COPY), Came(0, "finished", copy=199)
    assert not may_close(HEAD, {1: old, 2: unborn}, Needs(), lambda _: False, late=True)
    said = [line_of(old), line_of(Closed(1)), line_of(unborn), line_of(Closed(2))]
    assert read(HEAD, "".join(said).encode(), "keep").decision is None
    ended = read(HEAD, "".join([*said, line_of(current), line_of(Closed(0))]).encode(), "keep").decision
    assert ended is not None
    assert (ended.trainers, ended.newcomers) == ((0,), (1, 2))
    assert decided(HEAD, {0: current, 1: old}, "keep").source == 0


# 3 workers, 12 windows, under a made-up order of events ---------------------------------------------------------------


@pytest.mark.draw(3)
@pytest.mark.parametrize("seed", range(12))
def test_workers_that_are_stopped_anywhere_never_differ(seed: int) -> None:
    ends = check(VirtualRun(seed, 3, 12, stops_of(seed, 3, 200)).play(), OVER)
    assert sum(ends.values()) == 3


@pytest.mark.draw(1)
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_a_hundred_runs_never_fork(first: int) -> None:
    for seed in range(first, first + 20):
        check(VirtualRun(seed, 3, 12, stops_of(seed, 3, 200)).play(), OVER)


@pytest.mark.draw(1)
@pytest.mark.parametrize("first", range(0, 100, 50))
def test_workers_at_a_slow_store_that_are_killed_and_started_anew_never_differ(first: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(first, first + 50):
        ends += check_drawn(seed).counts
    assert min(ends["finished"], ends["killed"], ends["refused"]) > 0


@pytest.mark.draw(8)
@pytest.mark.parametrize("point", range(1, 60, 2))
def test_a_worker_that_is_stopped_until_all_is_over_finishes_alike_or_is_refused(point: int) -> None:
    run = VirtualRun(point, 2, 5, [Pause(0, point, None)], begin_with=2 if point % 4 == 1 else 1).play()
    stopped, other = run.players
    assert stopped.result is not None or stopped.error is not None
    if other.result is not None:
        assert stopped.result in (None, other.result)


@pytest.mark.one_draw_in(2)
def test_who_was_away_for_long_is_handed_the_newest_copy() -> None:
    run = VirtualRun(3, 3, 400, [Pause(0, 80, 2 * LOST_AFTER_S)]).play()
    assert len({player.result for player in run.players}) == 1
    missed = run.players[1].windows.keys() - run.players[0].windows.keys()
    assert len(missed) > 20


def test_where_the_newest_copy_is_lost_nobody_goes_on_from_an_older_one() -> None:
    run = VirtualRun(5, 2, 40, [Pause(0, 60, None), Kill(1, windows=20)]).play()
    stopped, killed = run.players
    assert killed.killed
    assert 0 < max(stopped.windows) < 20
    assert f"state_dict() is of window {max(stopped.windows)}" in str(stopped.error)


@pytest.mark.one_draw_in(2)
def test_who_comes_back_does_not_make_the_others_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at hand, though they have not looked for it since: they void no round after the other because of it."""
    monkeypatch.setattr(elastic_schedule, "LOST_AFTER_S", 10.0)
    monkeypatch.setattr(elastic_schedule, "DEADLINE_S", 30.0)
    for seed in range(1010, 1030):
        pause = Pause(seed % 3, 20 + seed % 60, 10.2 + (seed % 17) / 10)
        ends = check(VirtualRun(seed, 3, 3, [pause], begin_with=1 + 2 * (seed % 2)).play(), OVER)
        assert ends["finished"] >= 2


def test_a_sign_of_life_counts_before_the_next_look() -> None:
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    one, other = Heartbeat(store, "one", 3600.0), Heartbeat(store, "other", 3600.0)
    for _ in range(6):
        one._look()  # pyright: ignore[reportPrivateUsage]
    assert not one.alive(other.number)
    other.beat()
    assert one.alive(other.number)
    other.close(leaves=True)
    one._look()  # pyright: ignore[reportPrivateUsage]
    assert not one.alive(other.number)
    one.close(leaves=True)


# One worker at a store ------------------------------------------------------------------------------------------------


class Alone:
    """A worker that comes to a round; it looks for the others at once, and then after an hour."""

    def __init__(self, head: Head) -> None:
        self.store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self.other, self.heartbeat = Heartbeat(self.store, "other", 3600.0), Heartbeat(self.store, "w", 3600.0)
        self.store.set("now", written(head))
        self.rounds = Rounds(self.store, self.heartbeat, "keep", Needs(), 3600.0, 3600.0)

    def come(self, copy: int) -> RoundLog:
        return self.rounds.come(Came(self.heartbeat.number, "w", copy))

    def close(self) -> None:
        for heartbeat in (self.heartbeat, self.other):
            heartbeat.close(leaves=True)


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[Alone]:
    made = Alone(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("alone", [Head(), Head(5, 4, {1: ExpectedWorker("w")})], indirect=True)
def test_a_round_that_is_long_over_is_not_begun_anew(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sleeps after it has asked which round is the newest; the log of that is gone when it wakes up."""
    newest, head = written(Head(30, 29, {0: ExpectedWorker("other")})), alone.rounds.head
    monkeypatch.setattr(alone.heartbeat, "beat", lambda: alone.store.set("now", newest))
    with pytest.raises(Behind):
        alone.come(head.copy)
    assert not alone.store.check([f"round/{head.round}"])


@pytest.mark.parametrize("alone", [Head(5, 4, {1: ExpectedWorker("w")})], indirect=True)
def test_who_comes_without_the_copy_does_not_wait_for_itself(alone: Alone) -> None:
    for copy in (NO_COPY, 3):
        with pytest.raises(CommunicationError, match=OVER):
            alone.come(copy)


@pytest.mark.parametrize("alone", [Head(5, 4, {1: ExpectedWorker("w")}, {0: ExpectedWorker("other")})], indirect=True)
def test_who_was_too_late_for_a_void_round_may_have_the_copy(alone: Alone) -> None:
    now = RoundLog(alone.rounds.head, {1: Came(1, "w")})
    assert alone.rounds._holder_may_come(now)  # pyright: ignore[reportPrivateUsage]
    alone.other.close(leaves=True)
    alone.heartbeat._look()  # pyright: ignore[reportPrivateUsage]
    assert not alone.rounds._holder_may_come(now)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("alone", [Head(5, 4, {1: ExpectedWorker("w")})], indirect=True)
def test_who_comes_gives_a_sign_of_life(alone: Alone) -> None:
    before = alone.store.get("beat/1")
    assert alone.come(4).decision is not None
    assert alone.store.get("beat/1") != before


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as made:
        yield made


PLAN = {"samples": 8_000, "options": {"begin_with": 2, "lost_after_s": 1.0, "deadline_s": 15.0}}


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(
    "stop", [Stop(1, "before", 20, "over"), Stop(0, "after", 21, "lost"), Stop(2, "issue", 10, "killed")]
)
@pytest.mark.draw(1)
def test_processes_that_are_stopped_never_differ(stop: Stop, crew: Crew) -> None:
    found = stopped_run_of(crew, f"stopped {stop}", stop, 3, PLAN)
    assert found.was_stopped
    assert found.finished + found.refused >= 1


@pytest.mark.parametrize("first", range(0, 40, 10))
@pytest.mark.long
def test_processes_that_are_stopped_by_a_seed_never_differ(first: int, crew: Crew) -> None:
    for seed in range(first, first + 10):
        stopped_run_of(crew, f"seed {seed}", stop_of(seed, 3, 3.0), 3, PLAN)


@pytest.mark.one_draw_in(2)
def test_a_finished_run_is_not_forked_by_who_was_stopped(crew: Crew) -> None:
    """One of two is stopped in the middle, and continued after the other one has finished."""
    plan = {"run": "forked", "samples": 8_000, "options": {"begin_with": 2, "lost_after_s": 1.0}, "pause_s": 0.01}
    workers = [crew.start(slot, name=f"w{slot}", **plan) for slot in range(2)]
    until(workers, lambda: workers[1].windows >= 5, 60)
    workers[1].kill(signal.SIGSTOP)
    until(workers, lambda: workers[0].process.poll() is not None, 120)
    assert workers[0].process.returncode == 0, crew.tail(workers[0])
    workers[1].kill(signal.SIGCONT)
    until(workers, lambda: workers[1].process.poll() is not None, 60)
    assert workers[1].process.returncode == 1, workers[1].said[-1]
    at = workers[1].windows
    assert f"{OVER}: it has ended" in crew.tail(workers[1])
    assert f"state_dict() is of window {at}, since which the run has gone on" in crew.tail(workers[1])
    assert max(words["ended"] for words in workers[0].said if "ended" in words) > at
    for worker in workers:
        worker.close()
