"""Who is to blame, from what ranks say of themselves; a group of one rank, nothing is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.session.failures import FailureBoard, RankAnswer
from gradwire.session.lane import Lane


@pytest.fixture(autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def board(group: dist.ProcessGroup) -> Iterator[FailureBoard]:
    made = FailureBoard(group, deadline_s=10)
    made.ranks = [0, 1, 2]
    yield made
    made.close(5)


def blamed(board: FailureBoard, *answers: RankAnswer) -> CommunicationError:
    return board._blamed({answer.rank: answer for answer in answers}, " (waited)")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("idle_s", "ranks"), [(4.0, ()), (5.0, ()), (5.5, (2,)), (30.0, (2,))])
def test_a_rank_is_idle_that_handed_over_nothing_for_more_than_half_of_the_wait(
    board: FailureBoard, idle_s: float, ranks: tuple[int, ...]
) -> None:
    error = blamed(board, RankAnswer(0, "waited", 10.0), RankAnswer(1, "waited", 9.0), RankAnswer(2, "idle", idle_s))
    assert error.ranks == ranks
    assert ("for 6 s" in str(error) or "for 30 s" in str(error)) == bool(ranks)


@pytest.mark.parametrize(("started", "waits", "ranks"), [(5, False, (2,)), (5, True, ()), (6, False, ())])
def test_a_rank_is_stuck_that_has_started_less_than_others_and_waits_for_nothing(
    board: FailureBoard, started: int, waits: bool, ranks: tuple[int, ...]
) -> None:
    last = RankAnswer(2, "training", 1.0, started, waits)
    error = blamed(board, RankAnswer(0, "training", 1.0, 6, True), RankAnswer(1, "waited", 9.0, 5, True), last)
    assert error.ranks == ranks
    assert ("is stuck: it has started 5 collectives and others 6" in str(error)) == bool(ranks)


def test_what_a_rank_is_to_raise_is_the_first_error_of_it(board: FailureBoard) -> None:
    first, second = ValueError("first"), ValueError("second")
    assert board.explain(first) is first
    assert board.error is first
    assert board.explain(second) is second
    assert board.error is first


def test_a_pass_may_be_left_by_all_and_not_by_one(board: FailureBoard) -> None:
    """Ranks 1 and 2 are played: each writes down which pass it has left, and what it had started."""
    board.enter_pass()
    number = board.log.issue("AllReduce", 4)
    board.log.wait(number, "AllReduce", 4)

    def alone() -> bool:
        return board._is_left_alone()  # pyright: ignore[reportPrivateUsage]

    def leaves(rank: int, words: str) -> None:
        board._store.set(f"left/{rank}", words)  # pyright: ignore[reportPrivateUsage]

    assert not alone()
    for words in ("[0, 0]", "[1, 1]", "[2, 1]", "no numbers", "[]", '["x", 1]'):
        leaves(1, words)
        assert not alone(), words
    leaves(1, "[1, 0]")
    assert alone()
    board.log.take(number, "AllReduce", 4)
    assert not alone()
    board.leave_pass(ValueError("mine"))
    leaves(2, "[0, 0]")
    board.deadline_s = 0.2
    with pytest.raises(CommunicationError, match="did not answer"):
        board.wait_for_leaving()


def test_a_rank_goes_on_once_all_have_left_the_pass(board: FailureBoard) -> None:
    board.enter_pass()
    board.leave_pass(ValueError("mine"))
    for rank in (1, 2):
        board._store.set(f"left/{rank}", "[1, 0]")  # pyright: ignore[reportPrivateUsage]
    board.wait_for_leaving()
    assert board.error is None


@pytest.mark.parametrize(("started", "ranks"), [(5, (2,)), (6, ())])
def test_who_left_a_pass_is_at_fault_where_others_have_started_more_in_it(
    board: FailureBoard, started: int, ranks: tuple[int, ...]
) -> None:
    left = RankAnswer(2, "training", 1.0, started, False, "ValueError", "left", "")
    for answer in (RankAnswer(1, "training", 1.0, 6, True), left):
        board._store.set(str(answer.rank), answer.to_json())  # pyright: ignore[reportPrivateUsage]
    for _ in range(6):
        board.log.issue("AllReduce", 4)
    found = board._conclusion(None, "")  # pyright: ignore[reportPrivateUsage]
    assert isinstance(found, CommunicationError)
    assert found.ranks == ranks
    assert ("rank 2 failed with ValueError: left" in str(found)) == bool(ranks)


def test_a_rank_that_left_a_pass_in_which_others_wait_is_told_what_it_did(board: FailureBoard) -> None:
    board.enter_pass()
    board.leave_pass(ValueError("mine"))
    for rank in (1, 2):
        board._store.set(str(rank), RankAnswer(rank, "training", 1.0, 1, True).to_json())  # pyright: ignore[reportPrivateUsage]
    found = board._conclusion(None, "")  # pyright: ignore[reportPrivateUsage]
    assert "the other ranks wait in a pass that this rank (0) left: ValueError: mine" in str(found)


def test_a_job_that_never_ends_is_an_error_after_the_deadline(group: dist.ProcessGroup) -> None:
    lane, ended = Lane(group, torch.device("cpu"), 10, "a test"), threading.Event()
    lane.deadline_s = -4.5  # five seconds are added to it
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="the end of the step"):
        lane.call(lambda: ended.wait(9), " while testing")
    assert 0.5 <= time.monotonic() - began < 8
    ended.set()
    lane.close()


def test_a_job_gives_its_result_or_its_own_error(group: dist.ProcessGroup) -> None:
    lane = Lane(group, torch.device("cpu"), 10, "a test")
    lane.deadline_s = -3.0
    assert lane.call(lambda: 7, " while testing") == 7
    with pytest.raises(ZeroDivisionError):
        lane.call(lambda: 1 // 0, " while testing")
    with pytest.raises(CommunicationError, match="failed in an earlier step"):
        lane.require_sound()
    lane.close()
