"""Layers of experts: every output and gradient is that of loops over tokens in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from framework_runs import EXAMPLES, run_two
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("moe_cases.py"))


@st.composite
def layers(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """A layer without a capacity, and the tokens of each rank."""
    local = draw(st.sampled_from([2, 4] if ranks == 1 else [1, 2, 4]))
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


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize(("ranks", "node"), [(2, None), (4, None), (4, 2), (8, 4), (1, None)])
@pytest.mark.draw(1)
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
    for said in run_function(f"{CASES}:faulty", 2, {"fault": fault}, 200):
        assert told in said


def test_two_levels_give_the_bits_of_one_and_send_fewer_messages_between_nodes() -> None:
    """On two nodes of two ranks each rank sends one message to the other node where it sent two."""
    for found in run_function(f"{CASES}:two_levels", 4, {}, 200):
        assert found == {"equal": True, "messages": [2, 1], "bytes": "equal"}


@pytest.mark.parametrize("codec", ["int8:256", "fp8"])
def test_compressed_exchanges_send_half_of_bf16_and_a_quarter_of_fp32(codec: str) -> None:
    for found in run_function(f"{CASES}:compressed", 2, {"codec": codec}, 200):
        assert found["fp32"] >= 3.9 * found[codec]
        assert found["bf16"] >= 1.9 * found[codec]
        assert found["error"] < 0.05
        assert found["counted"] == found["formula"]


@pytest.mark.parametrize("drop", ["before", "after"])
def test_capacity_drops_what_is_beyond_it_and_counts_it(drop: str) -> None:
    found = run_function(f"{CASES}:dropping", 2, {"drop": drop}, 200)
    # all tokens choose expert 0: before the exchange each rank keeps ceil(6 / 4) = 2 of its 6, after it the first
    # rank's tokens take the ceil(12 / 4) = 3 places
    assert [each["kept"] for each in found] == ([[0, 1], [0, 1]] if drop == "before" else [[0, 1, 2], []])
    assert [each["dropped"] for each in found] == ([4, 4] if drop == "before" else [9, 0])
    assert all(each["factor"] > 1.0 for each in found)
    assert found[0]["factor"] == found[1]["factor"]


def test_recomputation_repeats_the_choice() -> None:
    for found in run_function(f"{CASES}:recomputed", 2, {}, 200):
        assert found == {"gradients": True, "counted_once": True, "announced_once": True}


def test_gradients_do_not_depend_on_how_experts_and_batches_are_spread() -> None:
    """Dropless, with z-loss: by the ranks of the expert axis, and by micro-batches that accumulate."""
    assert all(max(errors) < 1e-12 for errors in run_function(f"{CASES}:layouts", 4, {}, 200))


@pytest.mark.parametrize("method", ["none", "int8"])
def test_experts_beside_ddp_get_the_mean_over_all_ranks(method: str) -> None:
    for found in run_function(f"{CASES}:beside_ddp", 4, {"method": method}, 200):
        assert found["dense"] < 1e-6
        assert found["experts"] < (1e-6 if method == "none" else 0.02)


def test_experts_are_sharded_by_fsdp2_over_their_own_axis() -> None:
    for found in run_function(f"{CASES}:sharded", 4, {}, 200):
        assert found["dense"] < 1e-5
        assert found["experts"] < 1e-5


@pytest.mark.long
def test_the_example_learns_alike_with_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    said = {codec: run_two([str(EXAMPLES / "train_experts.py"), "--codec", codec], tmp_path / codec[:4]).logs
            for codec in ("", "int8:64")}  # fmt: skip
    sent = {codec: [int(re.findall(r"([\d,]+) bytes sent", log)[0].replace(",", "")) for log in logs]
            for codec, logs in said.items()}  # fmt: skip
    losses = {codec: [float(loss) for loss in re.findall(r"loss ([\d.]+)", logs[0])] for codec, logs in said.items()}
    assert all(plain >= 3.7 * coded for plain, coded in zip(sent[""], sent["int8:64"], strict=True))
    assert losses[""][-1] < 0.7 * losses[""][0]
    assert losses["int8:64"] == pytest.approx(losses[""], rel=0.02)
