"""How rows travel between processes: the same bytes by every way, and the way that the link asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from exchange_cases import ROWS, SLOW
from gradwire.core.link import Link
from gradwire.drivers.contention import message
from gradwire.drivers.process_group import LARGE_ROWS_BYTES, SMALL_ROW_BYTES
from gradwire.network import Network
from gradwire.ranks.supervised import run_function
from namespaces import needs_namespaces

CASES = str(Path(__file__).with_name("exchange_cases.py"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_a_known_link_the_time_of_a_row_decides(ranks: int) -> None:
    """A slow row is posted to each other rank; any other is in one all-to-all."""
    for found in run_function(f"{CASES}:carried", ranks, {"known": True, "halves": False}, 60):
        for nbytes in ROWS:
            calls = {"sent": ranks - 1} if nbytes >= SLOW else {"swapped": 1}
            assert found[f"swap {nbytes}"] == found[f"gather {nbytes}"] == [True, calls]


@pytest.mark.parametrize(("ranks", "known", "halves"), [(2, False, False), (4, True, True)])
def test_where_no_link_is_known_bytes_decide(ranks: int, known: bool, halves: bool) -> None:
    """Nobody has timed the links of sub-groups by themselves."""
    size = ranks // 2 if halves else ranks
    for found in run_function(f"{CASES}:carried", ranks, {"known": known, "halves": halves}, 60):
        for nbytes in ROWS:
            large = size * nbytes >= LARGE_ROWS_BYTES
            assert found[f"swap {nbytes}"] == [True, {"sent": size - 1} if large else {"swapped": 1}]
            assert found[f"gather {nbytes}"] == [True, {"gathered" if nbytes > SMALL_ROW_BYTES else "swapped": 1}]


def test_a_session_tells_its_transport_what_it_has_timed() -> None:
    by_rank = run_function(f"{CASES}:links", 3, {}, 90)
    assert by_rank[1:] == by_rank[:-1]
    first, second, measured = by_rank[0]
    assert first is not None
    assert first != second
    assert tuple(second) == pytest.approx(tuple(vars(message(Link(*measured), 3)).values()))


def test_a_session_that_times_no_link_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TIME_LINK", "0")
    for first, second, measured in run_function(f"{CASES}:links", 2, {}, 90):
        assert first is None
        assert second is not None
        assert measured is not None


@pytest.mark.net
@pytest.mark.draw(1)
@pytest.mark.parametrize(("rate", "calls"), [("20mbit", {"sent"}), ("2gbit", {"swapped"})])
def test_a_step_on_two_hosts_posts_its_messages_on_a_slow_link_only(rate: str, calls: set[str]) -> None:
    needs_namespaces()
    with Network(2, rate) as network:
        (mean, found), (other, same) = run_function(f"{CASES}:stepped", 2, {}, 90, network=network)
    assert mean == other
    assert found == same
    assert {name for name, count in found.items() if count} == calls
