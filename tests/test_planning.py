"""The planner: formulas of papers, published figures, laws of its parts, its search, and what it refuses."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli.main import main
from gradwire.core.errors import SpecError
from gradwire.core.figures import spoken_seconds
from gradwire.planning import (
    Efficiencies,
    ParallelLayout,
    Transformer,
    device_memory,
    hardware,
    model,
    plan,
    step_time,
)
from gradwire.planning.hardware import KNOWN as CLUSTERS
from gradwire.planning.memory import layer_activations
from gradwire.planning.messages import between_stages, hop_of_keys, layer_of_experts, layer_of_tensors
from gradwire.planning.rates import ReachedRates
from gradwire.planning.reasons import PlannedLayout, neighbours
from gradwire.planning.search import layouts

ROOT = Path(__file__).parents[1]
GPT3, A100, H100 = model("gpt3-175b"), hardware("a100-80g"), hardware("h100-80g")
OLD = ParallelLayout(
    tp=8, sharding="none", recompute="none", sequence_parallel=False, flash=False, dropout=True, overlap=False
)


@pytest.fixture
def validation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("planning")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("planning_elsewhere")


# Formulas of papers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [1, 8])
def test_activations_of_a_layer_are_those_of_the_paper(t: int, sequence_parallel: bool) -> None:
    s, b, h, a = 2048, 4, GPT3.hidden, GPT3.heads
    layout = replace(OLD, tp=t, micro=b, batch=b, sequence_parallel=sequence_parallel)
    whole = s * b * h * (34 + 5 * a * s / h)
    split = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer_activations(GPT3, layout).kept == pytest.approx(whole / t if sequence_parallel else split)
    full = layer_activations(GPT3, replace(layout, recompute="full")).kept
    assert full == pytest.approx(2 * s * b * h / (t if sequence_parallel else 1))
    selective = layer_activations(GPT3, replace(layout, recompute="selective")).kept
    assert selective == pytest.approx(layer_activations(GPT3, layout).kept - s * b * h * 5 * a * s / (h * t))


def test_operations_of_a_step_are_those_of_the_paper() -> None:
    b, s, layers, h, v = 1536, 2048, 96, 12_288, 51_200
    expected = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert GPT3.model_flops(b) == pytest.approx(expected)


@pytest.mark.parametrize(("sharding", "a_parameter"), [("none", 18.0), ("optimizer", 7.5), ("parameters", 16 / 8)])
def test_state_of_a_parameter(sharding: str, a_parameter: float) -> None:
    held = device_memory(GPT3, ParallelLayout(dp=8, batch=8, sharding=sharding))
    assert held.parameters + held.gradients + held.optimizer == pytest.approx(a_parameter * GPT3.parameters)


def test_the_last_stage_of_an_interleaved_pipeline_holds_several_micro_batches() -> None:
    wordy = replace(GPT3, vocabulary=2**23)  # the logits make the last stage the fullest
    plain = ParallelLayout(tp=8, pp=4, batch=8)
    held, held_interleaved = (device_memory(wordy, each) for each in (plain, replace(plain, interleave=3)))
    assert held_interleaved.activations == pytest.approx((2 * 4 + 1) / 3 * held.activations)
    assert held_interleaved.working == held.working


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama2-70b", 69.0, 69.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("llama3-405b", 405.9, 405.9),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("bloom-176b", 176.2, 176.2),
    ],
)
def test_parameters_are_as_published(name: str, billions: float, active: float) -> None:
    assert model(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert model(name).active_parameters / 1e9 == pytest.approx(active, rel=0.01)


# Published figures -------------------------------------------------------------------------------------------


def test_published_step_times(validation: Any) -> None:
    rows = validation.published_steps()
    assert len(rows) == 9
    assert validation.fitted(rows) == Efficiencies(), "fit the defaults anew: python benchmarks/planning.py"
    errors = [abs(row.predicted(Efficiencies()) / row.seconds - 1) for row in rows]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.12


def test_published_layouts(validation: Any) -> None:
    found = validation.layout_figures(Efficiencies())
    assert len(found["rows"]) == 22
    assert found["rank_correlation"] >= 0.8
    assert found["ranked_first_against_best"] <= 0.05
    assert found["memory_median_error"] <= 0.1
    assert found["memory_worst_error"] <= 0.2
    assert found["out_of_memory_named"]


def test_other_clusters(elsewhere: Any) -> None:
    rows = elsewhere.megatron_on_a100()
    errors = [abs(row["error"]) for row in rows]
    assert len(rows) == 11
    assert sum(errors) / len(errors) < 0.05
    assert all(error < 0.1 for error in [*errors, *(abs(row["error"]) for row in elsewhere.llama3())])


def test_what_fsdp_trained_fits_but_for_three_rows(elsewhere: Any) -> None:
    rows = elsewhere.by_fsdp()
    assert len(rows) == 86
    assert sum(not row["fits"] for row in rows) == 3, "docs/plan.md tells which"


def test_memory_of_long_sequences_is_as_published(elsewhere: Any) -> None:
    *sequences, tensors = elsewhere.memory_of_torchtitan()
    assert all(abs(row["error"]) < 0.02 for row in sequences)
    assert tensors["error"] < -0.1, "docs/plan.md says that gathered tensors are not in the estimate"


def test_models_with_experts(elsewhere: Any) -> None:
    rows = elsewhere.with_experts()
    plain = [row["error"] for row in rows if row["like_the_planner"] == "yes"]
    assert len(plain) == 5
    assert sum(abs(error) < 0.05 for error in plain) == 4
    assert max(map(abs, plain)) < 0.3
    assert max(abs(row["error"]) for row in rows) > 0.3, (
        "docs/plan.md says that what is not like the planner is far off"
    )


# Laws --------------------------------------------------------------------------------------------------------

LAYOUTS = [
    ParallelLayout(dp=16, tp=8, pp=8, batch=1536, interleave=3),
    ParallelLayout(dp=16, tp=4, pp=8, cp=2, batch=1536, micro=2, recompute="full"),
    ParallelLayout(dp=128, tp=8, batch=1536, sharding="parameters", recompute="full"),
    replace(OLD, dp=16, pp=8, batch=1536, host_s=1e-3),
]
RATES = ("peak_tflops", "memory_gb_per_s", "node_gb_per_s", "network_gbit_per_s")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.says)
def test_no_part_is_negative_and_no_faster_machine_is_slower(layout: ParallelLayout) -> None:
    taken = step_time(GPT3, layout, A100)
    assert min(taken) >= 0
    assert taken.total == pytest.approx(sum(taken))
    for rate in RATES:
        assert step_time(GPT3, layout, replace(A100, **{rate: 2 * getattr(A100, rate)})).total <= taken.total
    long = step_time(GPT3, replace(layout, batch=2 * layout.batch), A100)
    assert taken.total < long.total <= 2 * taken.total + 1e-9
    assert device_memory(GPT3, layout).total <= device_memory(GPT3, replace(layout, micro=2 * layout.micro)).total


def test_each_axis_has_a_part_of_its_own() -> None:
    mixtral = model("mixtral-8x7b").with_sequence(32_768)
    plain = step_time(mixtral, ParallelLayout(dp=64, batch=512), H100)
    for part, layout in (
        ("tensor", ParallelLayout(dp=8, tp=8, batch=512)),
        ("pipeline", ParallelLayout(dp=16, pp=4, batch=512)),
        ("bubble", ParallelLayout(dp=16, pp=4, batch=512)),
        ("expert", ParallelLayout(dp=64, ep=8, batch=512)),
    ):
        assert getattr(plain, part) < 1e-9 < getattr(step_time(mixtral, layout, H100), part)
    slow = replace(H100, network_gbit_per_s=1.0)  # hops that attention cannot hide
    ring = ParallelLayout(dp=4, cp=16, batch=512)
    assert plain.context == 0 < step_time(mixtral, ring, slow).context
    assert step_time(mixtral, ParallelLayout(dp=64, batch=512, recompute="full"), H100).recomputation > 0
    assert step_time(mixtral, ParallelLayout(dp=64, batch=512), slow).data > plain.data


def test_messages_of_split_models_take_what_their_closed_forms_say() -> None:
    rates = ReachedRates(H100, Efficiencies())
    tokens, hidden = 4096, 6144
    for tp in (1, 2, 8):
        closed = 2 * rates.all_reduce_s(2 * tokens * hidden, tp, 1)
        assert rates.asked_s(layer_of_tensors(tokens * hidden, 2, tp)) == pytest.approx(closed)
    for ep in (1, 8, 64):
        closed = 2 * rates.all_to_all_s(2 * tokens * 2 * hidden, ep, 1)
        assert rates.asked_s(layer_of_experts(tokens, hidden, 2, 64, ep, 0)) == pytest.approx(closed)
    for cp, tp in ((2, 1), (16, 8)):
        rate, latency = rates.link(cp, tp)
        hop = 2 * 2 * tokens * 1024 / rate + latency
        assert rates.asked_s(hop_of_keys(tokens * 1024, cp, tp)) == pytest.approx(hop)
    rate, latency = rates.link(2, 8)
    assert rates.asked_s(between_stages(tokens * hidden, 4, 8)) == pytest.approx(2 * tokens * hidden / rate + latency)
    assert rates.asked_s(between_stages(tokens * hidden, 1, 8)) == rates.asked_s(hop_of_keys(8, 1, 8)) == 0


def test_tokens_that_travel_once_to_a_node_take_less_of_the_network() -> None:
    sizes = model("qwen3-235b-a22b")
    layout = ParallelLayout(dp=64, ep=32, batch=64)
    often, once = (step_time(sizes, replace(layout, dispatch=kind), H100) for kind in ("all_to_all", "once_a_node"))
    assert once.expert < 0.7 * often.expert
    inside = replace(layout, ep=8)
    assert step_time(sizes, replace(inside, dispatch="once_a_node"), H100) == step_time(sizes, inside, H100)
    with pytest.raises(SpecError, match="dispatch=deep is not known"):
        replace(layout, dispatch="deep")


def test_a_product_takes_no_less_than_its_arithmetic_and_its_memory() -> None:
    rates = ReachedRates(A100, Efficiencies(1, 1, 1))
    large = rates.product_s(8192, 8192, 8192)
    ideal = 2 * 8192**3 / (312e12 * A100.sustained)
    assert ideal < large < 1.1 * ideal
    assert rates.product_s(1, 8192, 8192) >= 2 * (8192 * 8192 + 2 * 8192) / 2.039e12
    assert rates.all_reduce_s(1e9, 8, 1) == pytest.approx(2 * 7 / 8 * 1e9 / 300e9, rel=0.01)
    assert rates.all_reduce_s(1e9, 16, 8) == pytest.approx(2 * 15 / 16 * 1e9 / 25e9, rel=0.01)
    assert rates.all_to_all_s(1e9, 8, 1) == pytest.approx(7 / 8 * 1e9 / 300e9, rel=0.01)


# The search --------------------------------------------------------------------------------------------------


def test_search_finds_the_fastest_that_fits() -> None:
    began = time.perf_counter()
    found = plan(GPT3, A100, gpus=1024, batch=1536)
    assert time.perf_counter() - began < 10
    fitting = [each for each in layouts(GPT3, A100, 1024, 1536) if device_memory(GPT3, each).total <= 85e9]
    assert found.fitting == len(fitting) < found.tried
    assert found.best[0].time.total == min(step_time(GPT3, each, A100).total for each in fitting)
    assert [one.time.total for one in found.best] == sorted(one.time.total for one in found.best)
    assert 0.3 < found.utilisation < 0.7
    assert all(one.why for one in found.neighbours)
    assert any("does not fit" in one.why for one in found.neighbours)
    assert found.helps[0][0] == "twice the rate of matrix products"


def test_micro_batches_are_as_large_as_a_rank_has_samples() -> None:
    found = {(each.dp, each.micro) for each in layouts(model("gpt2"), H100, 8, 2048)}
    assert {micro for dp, micro in found if dp == 8} == {2**i for i in range(9)}
    best = plan(model("gpt2"), H100, 8, 2048).best[0]
    assert best.layout.micro > 16


def test_a_neighbour_that_is_faster_is_told_as_faster() -> None:
    small, layout = model("llama2-7b"), ParallelLayout(dp=8, tp=2, batch=64, recompute="full")
    planned = PlannedLayout(layout, device_memory(small, layout), step_time(small, layout, H100))
    told = {one.change: one.why for one in neighbours(small, H100, planned, None, ("none",), (1,))}
    saved = planned.time.total - step_time(small, replace(layout, recompute="none"), H100).total
    assert saved > 0
    assert told["recompute=none"] == f"{spoken_seconds(saved)} faster, but was not searched"


def test_more_memory_helps_as_a_search_with_it_says() -> None:
    sizes, small = model("gpt3-22b"), hardware("a100-40g")
    found = plan(sizes, small, 16, 64)
    roomy = plan(sizes, replace(small, memory_gb=2 * small.memory_gb), 16, 64).best[0]
    says, saved = next((says, saved) for says, saved in found.helps if "twice the memory" in says)
    assert roomy.layout.says in says
    assert saved == pytest.approx(found.best[0].time.total - roomy.time.total)


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_every_cluster_has_a_plan_for_a_small_model(name: str) -> None:
    assert plan(model("llama2-7b"), CLUSTERS[name], 16, 256).best[0].time.total > 0


# The command -------------------------------------------------------------------------------------------------


def test_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "mixtral-8x7b", "--hardware", "h100-80g", "--gpus", "64", "--batch", "256"]
    assert main([*asked, "--show", "2"]) == 0
    shown = capsys.readouterr().out
    for words in ("G parameters", "Why its neighbours lost", "What would help", "expert", "activations", "(MFU)"):
        assert words in shown
    assert main([*asked, "--json", "--show", "2", "--tokens", "1T", "--price", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["best"]) == 2
    assert told["hours"] == pytest.approx(1e12 / (256 * 4096) * told["best"][0]["step_s"] / 3600)
    assert (told["gpu_hours"], told["money"]) == (64 * told["hours"], 128 * told["hours"])
    first = told["best"][0]
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_s"])
    assert sum(first["memory_parts_bytes"].values()) == pytest.approx(first["memory_bytes"])
    again = step_time(model("mixtral-8x7b"), ParallelLayout(**first["layout"]), H100)
    assert again.total == pytest.approx(first["step_s"])


def test_command_tells_what_more_gpus_bring(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama2-70b", "--hardware", "h100-80g", "--batch", "1024", "--scale", "8..512"]
    assert main([*asked, "--json", "--tokens", "2T"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["gpus"] for row in rows] == [8, 16, 32, 64, 128, 256, 512]
    assert "fits into no layout on 8 h100-80g" in rows[0]["why"]
    fitting = [row["best"][0]["step_s"] for row in rows if "best" in row]
    assert len(fitting) >= 4
    assert all(row["gpu_hours"] == row["gpus"] * row["hours"] for row in rows if "best" in row)
    assert not any("money" in row for row in rows)
    assert all(1.5 * more < fewer for fewer, more in pairwise(fitting))
    assert main([*asked, "--tokens", "2T", "--price", "2.5"]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("GPU hours", "money", "8 GPUs: llama2-70b fits into no layout"))
    for scale, says in (("64", "is no range"), ("64..8", "no range: write the smaller number first")):
        assert main([*asked[:-1], scale]) == 2
        assert says in capsys.readouterr().err


def test_hours_and_money() -> None:
    found = plan(model("llama2-7b"), H100, 8, 64)
    assert found.hours(3600 * found.tokens_per_s) == pytest.approx(1)
    with pytest.raises(SpecError, match="above 0"):
        found.hours(0)


def test_a_model_by_its_sizes() -> None:
    mine = Transformer("mine", layers=24, hidden=2048, heads=16, vocabulary=32_000, sequence=2048)
    assert plan(mine, H100, 8, 64).best[0].layout.gpus == 8
