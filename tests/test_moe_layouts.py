"""Layers of experts: grouped products, bytes by every count, what depends on the layout, and what follows a load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gradwire.codecs.block_int import BlockInt
from gradwire.parallel.moe import DynamicCapacity, ExchangeAxis, Experts, MoE, NoisyTopK, Payloads
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
@pytest.mark.draw(1)
def test_grouped_products_are_those_of_experts_one_by_one(ranks: int) -> None:
    @given(cases=st.lists(layers_in_fp32(ranks), min_size=6, max_size=10))
    @settings(max_examples=2, phases=[Phase.generate])  # to shrink a case would start ranks again and again
    def check(cases: list[dict[str, Any]]) -> None:
        for errors in run_function(f"{CASES}:grouped_errors", ranks, {"cases": cases}, 200):
            assert max(errors) < 1e-5, list(zip(errors, cases, strict=True))

    check()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.draw(1)
def test_bytes_of_a_step_are_those_of_the_formula_and_of_the_cost_driver(ranks: int) -> None:
    cases = [
        {"codec": None, "node": None, "chunks": 2},
        {"codec": None, "node": 2, "chunks": 1},
        {"codec": "int8:64", "node": None, "chunks": 1},
        {"codec": "int4:32", "node": 2, "chunks": 2},
    ]
    for rank in run_function(f"{CASES}:bytes_of_steps", ranks, {"cases": cases}, 200):
        for found, case in zip(rank, cases, strict=True):
            assert found["counted"] == found["cost"] == found["formula"] > 0, case


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.draw(1)
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
    """On expert axes of 1, 2 and 4 ranks, with 1, 2 and 3 micro-batches. That of Switch depends on who its tokens are:
    those of a rank and a micro-batch, or those of all ranks."""
    for found in run_function(f"{CASES}:losses_of_layouts", 4, {}, 200):
        for name in ("task", "z"):
            assert found[name] == pytest.approx([found[name][0]] * 9, rel=1e-12), name
        (whole,) = found["whole"]
        for name in ("switch", "switch over all"):
            by_parts = [found[name][parts::3] for parts in range(3)]
            assert all(same == pytest.approx([same[0]] * 3, rel=1e-12) for same in by_parts)
            assert len({round(same[0], 6) for same in by_parts}) == 3
        assert found["switch over all"][0] == pytest.approx(whole, rel=1e-12)
        assert abs(found["switch"][0] - whole) > 1e-3


def test_a_capacity_follows_what_all_ranks_drop() -> None:
    """The factor of each step is that of the step before it, moved by the share that all ranks dropped there."""
    steps = 9
    capacities = [
        DynamicCapacity(1.0, drop, target=0.1, least=0.5, most=3.5, rate=1.25) for drop in ("before", "after")
    ]
    told = {"capacities": [asdict(capacity) for capacity in capacities], "steps": steps}
    ranks = run_function(f"{CASES}:following", 2, told, 200)
    assert ranks[0] == ranks[1]
    for found, capacity in zip(ranks[0], capacities, strict=True):
        factors, counts = found["factor"], list(zip(found["dropped"], found["chosen"], strict=True))
        expected = [capacity.next_factor(factor, *count) for factor, count in zip(factors, counts, strict=True)]
        assert factors == [1.0, *expected[:-1]]
        # two of eight experts take all, of which a factor of 1 serves a quarter, and one of 3.5 seven eighths
        shares = [dropped / chosen for dropped, chosen in counts]
        assert shares[0] == pytest.approx(0.75, abs=0.05)
        assert shares[steps - 1] == pytest.approx(0.125, abs=0.05)
        assert factors[steps - 1] == 3.5
        assert factors[-1] < 3.5
        assert found["in evaluation"] == factors[-1]


@pytest.mark.parametrize(("ranks", "node"), [(2, None), (4, 2)])
def test_a_bias_for_near_experts_keeps_rows_near(ranks: int, node: int | None) -> None:
    found = run_function(f"{CASES}:near", ranks, {"node": node, "biases": [0.0, 0.1, 100.0]}, 200)
    for none, some, strong in found:
        assert none["own"] < some["own"] < strong["own"] == strong["choices"]
        assert none["of node"] < some["of node"] <= strong["of node"]
        for each in (none, some, strong):  # the bias moves the choice, and not what a choice is worth
            assert each["weights"] < 1e-6
            assert each["output"] < 1e-5
    whole = [sum(each["bytes"] for each in ranks) for ranks in zip(*found, strict=True)]
    assert whole[0] > whole[1] > whole[2]


def test_a_resumed_layer_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """Noise, codecs that draw, and a capacity that follows need what a layer has counted."""

    def layer() -> MoE:
        axis, codec = ExchangeAxis(), BlockInt(8, 64, stochastic=True)
        capacity = DynamicCapacity(1.0, target=0.01)
        payloads = Payloads.all(codec)
        return MoE(NoisyTopK(64, 8), Experts(64, 16, 8, axis), axis, capacity=capacity, payloads=payloads)

    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    whole, resumed, without = layer(), layer(), layer()
    for _ in range(3):
        whole(x)
    torch.save(whole.state_dict(), tmp_path / "layer.pt")
    saved = torch.load(tmp_path / "layer.pt", weights_only=True)
    resumed.load_state_dict(saved)
    counted = saved.pop("_extra_state")
    without.load_state_dict(saved, strict=False)
    expected = whole(x)
    assert counted[0] == 3
    assert torch.equal(resumed(x), expected)
    assert torch.equal(resumed.factor, whole.factor)
    assert not torch.equal(without(x), expected)
    assert not torch.equal(without.factor, whole.factor)


def test_a_report_tells_load_drops_and_bytes_of_experts() -> None:
    for found in run_function(f"{CASES}:reported", 4, {}, 200):
        assert found["alike"]
        assert found["reported bytes"] == found["wire_bytes"] > 0
        assert (found["passes"], found["load"]) == (2, 2 * 6 * 2)
        name, _, meaning = found["row"]
        for text in found["text"]:
            (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
            assert line.endswith(meaning)
