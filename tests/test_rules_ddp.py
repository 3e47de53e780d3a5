"""Aggregation rules on real processes over Gloo give bit for bit what virtual ranks in lockstep give."""

import functools
from pathlib import Path
from typing import Any

import pytest

from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("rule_cases.py"))
SPECS = [
    "median",
    "trimmed:1",
    "krum:0",
    "multikrum:0",
    "rfa",
    "clip:0.5",
    "adasum",
    "krum:0+int8,ef=off",
    "trimmed:1+int4,ef=off",
    "mixed",
]


@functools.cache
def outcomes() -> list[dict[str, Any]]:
    return run_function(f"{CASES}:many", 3, {"specs": SPECS}, 120)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("spec", SPECS)
def test_real_ranks_do_what_virtual_ranks_do(spec: str) -> None:
    for outcome in outcomes():
        assert len(outcome["equal"][spec]) == 3 * 8
        assert all(outcome["equal"][spec])


def test_too_few_ranks_are_refused_at_attach() -> None:
    for outcome in outcomes():
        assert "needs at least 7 ranks, and this run has 3" in outcome["refused"]
