"""Ranks that tell each other a few words: who comes, who does not, and nobody waits for ever. Threads, one store."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.session import meeting as meeting_module
from gradwire.session.meeting import GroupMeeting

Turn = Callable[[GroupMeeting], Any]


def met(*ranks: Turn, called: Sequence[int] = range(10)) -> list[Any]:
    """What every rank got, or was told."""
    store, results = HashStore(), list[Any]([None] * len(ranks))

    def act(rank: int, turn: Turn) -> None:
        try:
            results[rank] = turn(GroupMeeting(store, "test", rank, called[: len(ranks)]))
        except CommunicationError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=act, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def says(words: Any, call: str = "save", deadline_s: float = 30) -> Turn:
    return lambda meeting: meeting.exchange(call, words, deadline_s)


def test_everyone_hears_everyone_in_rank_order() -> None:
    def thrice(rank: int) -> Turn:
        return lambda meeting: [meeting.exchange("save", [rank, turn], 30) for turn in range(3)]

    assert met(*map(thrice, range(4))) == [[[[rank, turn] for rank in range(4)] for turn in range(3)]] * 4


class Late(GroupMeeting):
    """Sees what it waits for 0.3 s after that has come."""

    @staticmethod
    def _until(come: Callable[[], bool], end: float) -> bool:
        came = GroupMeeting._until(come, end)
        time.sleep(0.3)
        return came


def test_the_lead_stays_until_all_have_read_what_it_told() -> None:
    """The store may live in its process, which may end as soon as this has returned."""
    store, heard = HashStore(), list[Any]()
    late = threading.Thread(target=lambda: heard.append(Late(store, "test", 1, range(2)).exchange("save", 1, 30)))
    began_s = time.monotonic()
    late.start()
    assert GroupMeeting(store, "test", 0, range(2)).exchange("save", 0, 30) == [0, 1]
    assert time.monotonic() - began_s > 0.6  # it came 0.3 s late, and read 0.3 s late
    late.join(30)
    assert heard == [[0, 1]]


def test_a_rank_that_stays_away_is_named_to_all_who_came() -> None:
    told = met(says(0, deadline_s=0.3), says(1), lambda _: "away")
    assert told[0] == told[1] == "rank 2 has not come to save within 0.3 s: every rank must call it"


def test_ranks_are_called_by_their_numbers_in_the_run() -> None:
    told = met(says(0, deadline_s=0.3), lambda _: "away", called=[4, 7])
    assert told[0] == "rank 7 has not come to save within 0.3 s: every rank must call it"
    told = met(says(0), says(1, "load"), called=[4, 7])
    assert told[0] == told[1] == "rank 7 called load while rank 4 called save: all ranks must call the same"
    _, told = met(lambda _: None, says(1, deadline_s=-4.8), called=[4, 7])
    assert told == "rank 4 has not come to save within 0.2 s: every rank must call it"


def test_a_lead_that_stays_away_is_named() -> None:
    _, told = met(lambda _: None, says(1, deadline_s=-4.8))
    assert told == "rank 0 has not come to save within 0.2 s: every rank must call it"


def test_ranks_that_call_different_things_are_told() -> None:
    told = met(says(0), says(1, "load"))
    assert told[0] == told[1] == "rank 1 called load while rank 0 called save: all ranks must call the same"


def test_after_a_meeting_that_failed_the_next_one_is_held() -> None:
    def tries(first_s: float, wait_s: float) -> Turn:
        def turn(meeting: GroupMeeting) -> Any:
            try:
                meeting.exchange("save", "early", first_s)
            except CommunicationError:
                time.sleep(wait_s)
            return meeting.exchange("save", "late", 30)

        return turn

    def late(meeting: GroupMeeting) -> Any:
        time.sleep(0.6)
        return meeting.exchange("save", "late", 30)

    assert met(tries(0.2, 0.0), late) == [["late", "late"]] * 2
    assert met(late, tries(-4.8, 0.0)) == [["late", "late"]] * 2


def test_a_meeting_that_ended_without_a_rank_is_not_open_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "_GRACE_S", 0.2)
    store = HashStore()
    lead, late = (GroupMeeting(store, "test", rank, range(2)) for rank in range(2))
    with pytest.raises(CommunicationError, match="rank 1 has not come to save"):
        lead.exchange("save", "early", 0.2)
    with pytest.raises(CommunicationError, match="rank 0 has not come to save"):
        late.exchange("save", "late", 0.2)
