"""Layers of experts: every output and gradient is that of loops over tokens in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("moe_cases.py"))


@st.composite
def layers(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """A layer without a capacity, and the tokens of each rank."""
    local = draw(st.sampled_from([1, 2, 4]))
    experts = local * ranks
    router = draw(st.sampled_from(["softmax", "sigmoid", "noisy"]))
    k = draw(st.integers(1 if router != "noisy" else 2, min(4, experts)))
    options: dict[str, Any] = {}
    if router == "sigmoid" and experts % 2 == 0 and experts // 2 >= k:
        options = {"groups": 2, "chosen_groups": 1, "group_score": draw(st.sampled_from(["best two", "best share"]))}
    return {
        "hidden": draw(st.integers(1, 9)),
        "inner": draw(st.integers(1, 7)),
        "experts": experts,
        "k": k,
        "router": router,
        "router_options": options,
        "activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "shared": draw(st.booleans()),
        "chunks": draw(st.sampled_from([c for c in (1, 2, 4) if local % c == 0])),
        "seed": draw(st.integers(0, 1000)),
        "tokens": draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks)),
    }


@pytest.mark.parametrize(("ranks", "node"), [(2, None), (4, None), (4, 2), (8, 4), (1, None)])
@pytest.mark.draw(3)
def test_every_gradient_is_that_of_one_process(ranks: int, node: int | None) -> None:
    @given(cases=st.lists(layers(ranks), min_size=4, max_size=6))
    @settings(max_examples=3, phases=[Phase.generate])  # to shrink a case would start ranks again and again
    def check(cases: list[dict[str, Any]]) -> None:
        for errors in run_function(f"{CASES}:twin_errors", ranks, {"cases": cases, "node": node}, 120):
            assert max(errors) < 1e-12, list(zip(errors, cases, strict=True))

    check()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nan", "StepError: rank 1 of the axis has scores of experts that are NaN or infinite"),
        ("width", "CompositionError: rank 1 of the axis has tokens of another width than 8"),
        ("dtype", "of the axis has tokens of another dtype"),
        ("experts", "of the axis were made with different experts"),
        ("capacity", "of the axis were made with different capacity"),
    ],
)
def test_all_ranks_are_told_what_one_does_wrong(fault: str, told: str) -> None:
    for said in run_function(f"{CASES}:faulty", 2, {"fault": fault}, 60):
        assert told in said
