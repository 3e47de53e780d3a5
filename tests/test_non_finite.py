"""A value that is not finite on one rank: who is named, and what a step that is skipped leaves as it was."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from gradwire.ranks.supervised import run_function
from non_finite_cases import BAD, BROKEN, RANK, STEPS

CASES = str(Path(__file__).with_name("non_finite_cases.py"))
RANKS = 2

WHOLE = ["none", "bf16", "int4", "topk:0.1", "powersgd:2", "topk:0.1,residual=factored:2", "onebit", "median"]
SKIPPING = [
    *(("ddp", method, "skip") for method in WHOLE if method != "median"),
    ("ddp with unused ones", "int4", "skip"),
    ("ddp with views", "int4", "skip"),
    *(("session", method, "skip") for method in WHOLE),
    *(("fsdp2", method, "skip") for method in ("none", "int8", "int4", "topk:0.1")),
]
WARNING = [("ddp", "none", "warn"), ("ddp", "int4", "warn"), ("fsdp2", "int4", "warn")]


@functools.cache
def runs() -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    cases = [*SKIPPING, *WARNING]
    ranks = run_function(f"{CASES}:all_trained", RANKS, {"cases": cases}, 240)
    return {case: [rank[number] for rank in ranks] for number, case in enumerate(cases)}


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("case", SKIPPING, ids=" ".join)
def test_a_step_that_is_skipped_leaves_everything_as_it_was(case: tuple[str, str, str]) -> None:
    found = runs()[case]
    for rank in found:
        assert rank["skipped"] == [number == BAD for number in range(STEPS)]
        assert rank["none"]
        assert rank["same"] == [True, True, True]
        assert rank["finite"]
        assert rank["moves"]
        assert (rank["counted"], rank["row"]) == (1, True)
    assert len({rank["model"] for rank in found}) == 1


@pytest.mark.parametrize("case", [*SKIPPING, *WARNING], ids=" ".join)
def test_the_rank_and_the_parameter_are_named(case: tuple[str, str, str]) -> None:
    for rank in runs()[case]:
        (said,) = rank["said"]
        assert said.startswith(f"rank {RANK}'s gradient of '")
        assert f"in step {BAD}," in said
        if case[0] != "fsdp2":  # all of them are there
            assert f"of {BROKEN!r} was" in said
            assert "before the exchange" in said


@pytest.mark.parametrize("case", WARNING, ids=" ".join)
def test_without_skipping_the_model_is_spoilt(case: tuple[str, str, str]) -> None:
    for rank in runs()[case]:
        assert not rank["finite"]
        assert not any(rank["skipped"])
        assert 'on_non_finite="skip"' in rank["said"][0]


def test_a_mean_that_overflows_in_the_exchange_is_named() -> None:
    for rank in run_function(f"{CASES}:overflown", RANKS, {}, 60):
        (said,) = rank["said"]
        assert said.startswith("the mean of 'overflows' was not finite in step 0, after the exchange")
        assert rank["kept"] == {"step": 0, "rank": None, "tensor": "overflows", "where": "after the exchange"}


def test_what_does_not_go_together_is_refused() -> None:
    for differs, unknown, scaled in run_function(f"{CASES}:refused", RANKS, {}, 60):
        assert differs.startswith("AttachError")
        assert "on_non_finite='skip'" in differs
        assert "on_non_finite='stop': give one of 'warn', 'skip'" in unknown
        assert "a GradScaler skips steps" in scaled
