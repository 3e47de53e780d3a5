"""Data from elsewhere fit their types, or are refused in a sentence that says where and why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gradwire.core.checked import Read, checked, facts
from gradwire.core.errors import StateError
from gradwire.core.record import Count


class Half(Read):
    """Half of a number."""

    @staticmethod
    def read(value: Any) -> object:
        if not isinstance(value, int):
            raise ValueError("Expected what can be halved")
        return value / 2


class Pair(NamedTuple):
    left: Count
    right: float


@dataclass
class Plan:
    name: str
    halves: list[Half]
    pairs: tuple[Pair, ...] = ()
    by_rank: dict[int, str] | None = None
    mean: Tensor | None = None
    is_new: bool = False


GOOD: dict[str, Any] = {"name": "a", "halves": [3], "pairs": [[1, 2]], "by_rank": {"0": "x"}, "mean": torch.ones(2)}


def test_data_become_what_their_type_says() -> None:
    plan = checked({**GOOD, "unknown": 1}, Plan, "plan", StateError)
    assert (plan.name, plan.halves, plan.pairs, plan.by_rank) == ("a", [1.5], (Pair(1, 2.0),), {0: "x"})
    assert plan.mean is GOOD["mean"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "plan.name should be a text, not 3"),
        ({"halves": [1, "x"]}, "plan.halves[1] should be what can be halved, not 'x'"),
        ({"halves": {}}, "plan.halves should be a list, not {}"),
        ({"pairs": [[1, 2.0], [-1, 2.0]]}, "plan.pairs[1][0] should be a whole number from 0, not -1"),
        ({"pairs": [[1, "x"]]}, "plan.pairs[0][1] should be a number, not 'x'"),
        ({"pairs": [[1]]}, "plan.pairs[0] should be a list of 2, not [1]"),
        ({"pairs": [[True, 1.0]]}, "plan.pairs[0][0] should be a whole number, not True"),
        ({"by_rank": {"0": 1}}, "plan.by_rank[...] should be a text"),
        ({"by_rank": {"x": "y"}}, "plan.by_rank should have keys that are each a whole number, not {'x': 'y'}"),
        ({"by_rank": []}, "plan.by_rank should be a mapping, not []"),
        ({"mean": [1.0]}, "plan.mean should be a tensor, not [1.0]"),
        (
            {"is_new": torch.ones(2)},
            "plan.is_new should be true or false, not a tensor of shape (2,) and torch.float32",
        ),
        ({"name": list(range(99))}, f"plan.name should be a text, not {str(list(range(99)))[:40]}..."),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError) as refusal:
        checked({**GOOD, **change}, Plan, "plan", StateError)
    assert str(refusal.value) == said


@pytest.mark.parametrize("data", [None, [], 3, "x", torch.ones(2)], ids=lambda data: type(data).__name__)
def test_what_is_no_mapping_is_refused(data: object) -> None:
    for kind in (Plan, facts({"step": Count})):
        with pytest.raises(StateError, match="plan"):
            checked(data, kind, "plan", StateError)
    with pytest.raises(StateError, match="a mapping"):
        checked(data, Mapping[str, Any], "plan", StateError)


def test_facts_need_some_fields_and_may_have_others() -> None:
    task = facts({"name": str}, size=Count)
    assert checked({"name": "digits", "other": None}, task, "task", StateError).name == "digits"
    with pytest.raises(StateError, match=r"^task has no 'name': make it anew$"):
        checked({"size": 3}, task, "task", StateError, remedy=": make it anew")
    with pytest.raises(StateError, match=r"^the task's size should be a whole number from 0, not -3$"):
        checked({"name": "digits", "size": -3}, task, "the task", StateError, "'s ")


MEETING = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
import msgspec
from gradwire.core.checked import thread_safe
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(3) as threads:
    for _ in range(100):
        part = make_dataclass("Part", [("sizes", tuple[int, ...]), ("rate", float)])
        kind = msgspec.defstruct("Whole", [("parts", tuple[part, ...]), ("names", dict[str, tuple[str, ...]])])
        barrier = threading.Barrier(3)
        def read(_: int) -> object:
            barrier.wait(60)
            return msgspec.convert({"parts": [{"sizes": [1], "rate": 2.0}], "names": {"a": ["b"]}}, thread_safe(kind))
        assert len({*map(str, threads.map(read, range(3)))}) == 1
"""


def test_threads_may_meet_a_type_at_the_same_time() -> None:
    """Without `thread_safe` this ends by a segmentation fault in one of the first rounds."""
    subprocess.run([sys.executable, "-c", MEETING], timeout=120, check=True)
