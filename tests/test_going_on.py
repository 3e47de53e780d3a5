"""The law of saving: a run that is taken up by new processes, where no window ends, ends with the same bits.

Two ranks train by everything there is, seven steps of twelve, save, and go on. Two others load and do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from going_on_cases import RANKS, SAVED, cases
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("going_on_cases.py"))
DEADLINE_S = 280
REFUSED = ("elastic", "post-local")
"""Where no fixed set of ranks has the state: `save` says how it is kept."""
OF_THEIR_OWN = ("asynchronous",)
"""Ranks that do not wait make no run twice; `test_unwaiting_saved.py` has their law."""

pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 40)  # of both runs, for whichever test comes first

NAMES = [trained.name for trained in cases() if not trained.name.startswith(OF_THEIR_OWN)]

Ended = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, asked: list[Mapping[str, Any]]) -> tuple[Ended, Ended]:
    """What each rank has at the end, without a break and with one."""
    given = {"folder": str(tmp_path_factory.mktemp("saved")), "names": [case["name"] for case in asked]}
    whole, again = (run_function(f"{CASES}:{case}", RANKS, given, DEADLINE_S) for case in ("without_break", "taken_up"))
    return whole, again


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(REFUSED)])
@pytest.mark.draw(8)
def test_a_run_that_is_taken_up_ends_with_the_same_bits(name: str, ended: tuple[Ended, Ended]) -> None:
    for whole, again in zip(*ended, strict=True):
        assert whole[name].keys() == {"own", "end", "moved"}, whole[name]
        assert whole[name].pop("moved"), "nothing was trained after the save"
        assert again[name] == {"step": SAVED, **whole[name]}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(REFUSED)])
def test_what_cannot_be_saved_says_how_it_is_kept(name: str, ended: tuple[Ended, Ended]) -> None:
    for rank in ended[0]:
        assert rank[name]["refused"].startswith("gradwire.save takes no "), rank[name]
        assert not rank[name]["written"]
