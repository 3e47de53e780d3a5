"""Layers of experts: grouped products, bytes by every count, what depends on the layout, and what follows a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gradwire.parallel.moe import DynamicCapacity
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("moe_layout_cases.py"))


@st.composite
def layers_in_fp32(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """A layer whose products `grouped_mm` takes: rows of a multiple of 16 bytes."""
    local = draw(st.sampled_from([1, 2, 4]))
    return {
        "hidden": 4 * draw(st.integers(1, 6)),
        "inner": 4 * draw(st.integers(1, 5)),
        "experts": local * ranks,
        "k": draw(st.integers(1, min(3, local * ranks))),
        "activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "chunks": draw(st.sampled_from([c for c in (1, 2) if local % c == 0])),
        "seed": draw(st.integers(0, 1000)),
        "tokens": draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks)),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_grouped_products_are_those_of_experts_one_by_one(ranks: int) -> None:
    @given(cases=st.lists(layers_in_fp32(ranks), min_size=4, max_size=8))
    @settings(max_examples=3, phases=[Phase.generate])  # to shrink a case would start ranks again and again
    def check(cases: list[dict[str, Any]]) -> None:
        for errors in run_function(f"{CASES}:grouped_errors", ranks, {"cases": cases}, 200):
            assert max(errors) < 1e-5, list(zip(errors, cases, strict=True))

    check()


@pytest.mark.parametrize(
    ("ranks", "node", "codec", "chunks"),
    [(2, None, None, 2), (4, None, "int8:64", 1), (4, 2, None, 1), (4, 2, "int4:32", 2)],
)
def test_bytes_of_a_step_are_those_of_the_formula_and_of_the_cost_driver(
    ranks: int, node: int | None, codec: str | None, chunks: int
) -> None:
    told = {"codec": codec, "node": node, "chunks": chunks, "tokens": [13, 0, 7, 22][:ranks]}
    for found in run_function(f"{CASES}:bytes_of_a_step", ranks, told, 200):
        assert found["counted"] == found["cost"] == found["formula"] > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_planner_knows_what_a_balanced_layer_sends(ranks: int) -> None:
    for found in run_function(f"{CASES}:planned_and_sent", ranks, {"node": None, "tokens": 32}, 200):
        assert found["sent"] == found["planned"]
        assert len(found["sent"]) == 2


def test_the_planner_knows_what_two_levels_send_inside_of_a_node() -> None:
    """Between nodes it counts a token once for each node, as DeepEP sends it, and the layer once for each choice."""
    for found in run_function(f"{CASES}:planned_and_sent", 4, {"node": 2, "tokens": 32}, 200):
        inside = [each for each in found["sent"] if each[0] == [2, 1]]
        between = [each for each in found["sent"] if each[0] == [2, 2]]
        assert inside == [each for each in found["planned"] if each[0] == [2, 1]]
        once_a_node = [each for each in found["planned"] if each[0] == [2, 2]]
        assert len(inside) == len(between) == 2
        assert all(sent[1] >= planned[1] for sent, planned in zip(between, once_a_node, strict=True))
        assert all(sent[1] == 2 * 32 * 2 * 128 for sent in between)


def test_losses_do_not_depend_on_the_layout_but_that_of_switch() -> None:
    for found in run_function(f"{CASES}:losses_of_layouts", 4, {}, 200):
        for name in ("task", "z"):
            assert found[name] == pytest.approx(found[name][0], rel=1e-12), name
        of_parts = [found["switch"][parts::3] for parts in range(3)]
        assert all(same == pytest.approx(same[0], rel=1e-12) for same in of_parts)  # by degree: tokens are the same
        assert len({round(same[0], 6) for same in of_parts}) == 3  # by micro-batches: they are not


def test_the_loss_of_switch_over_an_axis_is_that_of_all_its_tokens() -> None:
    for found in run_function(f"{CASES}:switch_of_ranks", 4, {}, 200):
        assert found["over"] == pytest.approx(found["whole"], rel=1e-12)
        assert abs(found["apart"] - found["whole"]) > 1e-3


@pytest.mark.parametrize("drop", ["before", "after"])
def test_a_capacity_follows_what_all_ranks_drop(drop: str) -> None:
    """The factor of each step is that of the step before it, moved by the share that all ranks dropped there."""
    steps = 9
    ranks = run_function(f"{CASES}:following", 2, {"drop": drop, "steps": steps}, 200)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    capacity = DynamicCapacity(1.0, target=0.1, least=0.5, most=3.5, rate=1.25)
    for step in range(1, 2 * steps):
        before = found["factor"][step - 1]
        dropped, chosen = int(found["dropped"][step - 1]), int(found["chosen"][step - 1])
        assert found["factor"][step] == pytest.approx(capacity.next_factor(before, dropped, chosen), rel=1e-12)
    shares = [dropped / chosen for dropped, chosen in zip(found["dropped"], found["chosen"], strict=True)]
    assert (
        shares[0] > 0.5 > 0.15 > shares[steps - 1]
    )  # two of eight experts take all, which a factor of 3.5 nearly serves
    assert found["factor"][steps - 1] == 3.5
    assert found["factor"][-1] < 3.5
    assert found["in evaluation"] == [found["factor"][-1]]


@pytest.mark.parametrize(("ranks", "node"), [(2, None), (4, 2)])
def test_a_bias_for_near_experts_keeps_rows_near(ranks: int, node: int | None) -> None:
    told = {"node": node}
    none, some, strong = (
        run_function(f"{CASES}:near", ranks, {**told, "bias": bias}, 200) for bias in (0.0, 0.1, 100.0)
    )
    for rank in range(ranks):
        assert none[rank]["bytes"] == none[rank]["plain bytes"]
        assert none[rank]["own"] < some[rank]["own"] < strong[rank]["own"] == strong[rank]["choices"]
        assert none[rank]["of node"] < some[rank]["of node"]
        assert all(found[rank]["weights"] < 1e-6 for found in (none, some, strong))  # it moves the choice only
        assert strong[rank]["output"] < 1e-5
    whole = [sum(rank["bytes"] for rank in found) for found in (none, some, strong)]
    assert whole[0] > whole[1] > whole[2]


def test_a_report_tells_load_drops_and_bytes_of_experts() -> None:
    for found in run_function(f"{CASES}:reported", 4, {}, 200):
        assert found["alike"]
        assert found["beside"] == found["wire_bytes"] > 0
        assert (found["passes"], found["load"]) == (2, 2 * 6 * 2)
        name, _, meaning = found["row"]
        for text in found["text"]:
            (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
            assert line.endswith(meaning)
