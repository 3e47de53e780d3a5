"""Ranks on different processors get the same bits: what they compute from what all of them received has a fixed order.

Some ranks here compute as this processor does best, others as one would that has no vector instructions beyond
SSE2, and others without numba: the operators of torch, MKL, the kernels and the number of threads all differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gradwire
from gradwire.ranks.supervised import run_function
from processors import PLAIN, WITHOUT_NUMBA

CASES = str(Path(__file__).with_name("processor_cases.py"))
RANKS = (2, 7)
STEPS = 40


def specs(ranks: int) -> list[str]:
    """Every example that runs on so many ranks, each with the fewest that do."""
    examples = [spec for method in gradwire.methods().values() for spec in method.examples]
    fewest = {spec: min(n for n in RANKS if n >= gradwire.parse(spec).fewest_ranks) for spec in examples}
    return [spec for spec in examples if fewest[spec] == ranks]


@functools.cache
def outcome(ranks: int, specs: tuple[str, ...]) -> dict[str, list[int]]:
    environments = [({}, PLAIN, WITHOUT_NUMBA)[rank % 3] for rank in range(ranks)]
    arguments = {"specs": list(specs), "threads": [2, 1], "steps": STEPS}
    return run_function(f"{CASES}:different", ranks, arguments, 280, environments=environments)[0]


@pytest.mark.parametrize(("ranks", "spec"), [(ranks, spec) for ranks in RANKS for spec in specs(ranks)])
@pytest.mark.draw(12)
@pytest.mark.one_of("ranks")
def test_ranks_on_different_processors_get_the_same_bits(
    ranks: int, spec: str, siblings: list[Mapping[str, Any]]
) -> None:
    assert outcome(ranks, tuple(case["spec"] for case in siblings if case["ranks"] == ranks))[spec] == []
