"""Policies by layer: what a parameter is for, which method serves it, and widths that are measured at a budget."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwire
from gradwire.cli.main import main
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.roles import role_of_name, roles_of
from gradwire.drivers.cost import specs_of
from gradwire.drivers.plan import plan
from gradwire.drivers.stack import stack
from gradwire.drivers.virtual import VirtualRanks
from gradwire.ranks.supervised import run_function
from gradwire.reducers.budget import allocate
from gradwire.tasks.builtin import make_task
from layer_cases import LAYERS, SPEC, STACK, model

CASES = str(Path(__file__).with_name("layer_cases.py"))


class Tied(nn.Module):
    """An output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.norm, self.hidden = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 9, bias=False)
        self.out.weight = self.wte.weight


# Roles --------------------------------------------------------------------------------------------------------------


def roles(net: nn.Module) -> dict[str, str]:
    return {name: role for (name, _), role in zip(net.named_parameters(), roles_of(net).values(), strict=True)}


def test_modules_tell_roles() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    found = roles(net)
    assert found == {
        "0.weight": "other",
        "0.bias": "bias",
        "1.weight": "norm",
        "1.bias": "norm",
        "3.weight": "other",
        "3.bias": "bias",
        "4.weight": "output",
        "4.bias": "bias",
    }


def test_a_tied_output_layer_is_an_embedding_and_no_other_layer_takes_its_place() -> None:
    found = roles(Tied())
    assert found["wte.weight"] == "embedding"
    assert found["hidden.weight"] == "other"


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("model.embed_tokens.weight", (9, 4), "embedding"),
        ("encoder.layer.0.attention.output.dense.weight", (4, 4), "other"),
        ("encoder.layer.0.output.LayerNorm.weight", (4,), "norm"),
        ("h.0.ln_2.bias", (4,), "norm"),
        ("h.0.attn.c_attn.bias", (12,), "bias"),
        ("classifier.weight", (2, 4), "output"),
    ],
)
def test_names_tell_roles_where_nothing_else_is_known(name: str, shape: tuple[int, ...], role: str) -> None:
    assert role_of_name(name, shape) == role


# Rules --------------------------------------------------------------------------------------------------------------


def served(spec: str, net: nn.Module) -> dict[str, str]:
    """What serves each parameter."""
    found: dict[str, str] = {}
    for grain, reducer in plan(specs_of(net), gradwire.parse(spec)).units:
        found |= {segment.name: repr(reducer) for segment in grain.segments}
    return found


def test_default_gives_more_bits_to_embeddings_and_the_output_and_leaves_vectors_as_they_are() -> None:
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    found = served("int4,layers=default", net)
    for name in ("0.weight", "3.weight"):
        assert "bits=8" in found[name]
    assert "bits=4" in found["1.weight"]
    for name in ("1.bias", "2.weight", "2.bias", "3.bias"):
        assert "Identity()" in found[name]
    assert "BF16()" in served("int8,layers=default", net)["0.weight"]


def test_the_first_rule_that_a_parameter_meets_counts() -> None:
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    found = served("int4,layers=(output:none/1.*:(topk:0.1,ef=off)/default)", net)
    assert "Identity()" in found["2.weight"]
    assert "TopK(density=0.1" in found["1.weight"]
    assert "ErrorFeedback" not in found["1.weight"]
    assert "TopK(density=0.1" in found["1.bias"]  # before the rule for biases
    assert "bits=8" in found["0.weight"]


REFUSED = {
    "none,layers=default": "changes nothing",
    "krum:1,layers=default": "would send gradients past",
    "int4,layers=nothing": "cannot read 'nothing' of layers=",
    "int4,layers=bias:": "cannot read 'bias:' of layers=",
    "int4,layers=bias:krum:1": "a layer is a part of one",
    "int4,layers=(bias:(int8,warmup=2))": "no option of a layer",
    "topk:0.1,layers=measured": "write it after one of int2 to int8",
    "powersgd:2,layers=measured": "write it after one of int2 to int8",
    "int4,layers=measured,node=2": "without node=",
    "int4,layers=measured,exchange=allgather": "with exchange=twoshot alone",
    "int4,budget=int3": "an option of layers=measured",
    "int4,layers=default,measure=9": "an option of layers=measured",
    "int4,layers=measured,measure=0": "1 step or more",
    "int4,layers=measured,budget=0.05": "integers of 2 bits, the fewest, take 0.066",
    "int4,layers=measured,budget=int8": "nothing to choose",
    "int4,layers=measured,budget=none": "nothing to choose",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(spec: str) -> None:
    with pytest.raises((SpecError, CompositionError), match=REFUSED[spec].replace("(", r"\(")):
        gradwire.parse(spec)


# Budgets ------------------------------------------------------------------------------------------------------------

ERRORS = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=4)


@given(ERRORS, st.floats(1.0, 5.0))
def test_widths_are_the_best_but_for_one_step(scales: list[float], bits: float) -> None:
    """Against all choices: errors fall by 4 with each bit, as those of integers do."""
    errors = [[scale * 4.0**-choice for choice in range(5)] for scale in scales]
    nbytes = [[float(1 + choice) for choice in range(5)] for _ in scales]
    budget = bits * len(scales)
    chosen = allocate(errors, nbytes, budget)
    assert sum(nbytes[i][c] for i, c in enumerate(chosen)) <= budget
    every = itertools.product(range(5), repeat=len(scales))
    fits = [all_ for all_ in every if sum(nbytes[i][c] for i, c in enumerate(all_)) <= budget]
    best = min(sum(errors[i][c] for i, c in enumerate(all_)) for all_ in fits)
    assert sum(errors[i][c] for i, c in enumerate(chosen)) <= best * (1 + 1e-9)


def test_a_budget_below_the_smallest_choices_gives_these() -> None:
    assert allocate([[3.0, 1.0], [9.0, 1.0]], [[2.0, 3.0], [2.0, 3.0]], 1.0) == [0, 0]


def gradients(net: nn.Module, ranks: int, sizes: dict[str, float]) -> list[dict[str, torch.Tensor]]:
    return [
        {name: torch.randn_like(p) * sizes.get(name, 1e-3) for name, p in net.named_parameters()} for _ in range(ranks)
    ]


def widths(ranks: VirtualRanks) -> list[dict[str, float]]:
    return [
        {
            segment.name: float(state.part("inner").tensor("bits")[0])
            for grain, state in engine.states()
            for segment in grain.segments
        }
        for engine in ranks.engines
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_large_errors_get_more_bits_and_the_bytes_are_those_of_the_budget(ranks: int) -> None:
    torch.manual_seed(0)
    net = model()
    sizes = {"0.weight": 10.0, "2.weight": 1.0, "4.weight": 0.1}
    virtual, uniform = (VirtualRanks(gradwire.parse(spec), net, ranks) for spec in (SPEC, "int4"))
    for _ in range(3):
        virtual.step(gradients(net, ranks, sizes))
        uniform.step(gradients(net, ranks, sizes))
    found = widths(virtual)
    assert all(own == found[0] for own in found)
    first, second, third = (found[0][name] for name in LAYERS)
    assert first > second >= third
    before, dense = virtual.engines[0].stats.payload_bytes, uniform.engines[0].stats.payload_bytes
    virtual.step(gradients(net, ranks, sizes))
    uniform.step(gradients(net, ranks, sizes))
    spent = virtual.engines[0].stats.payload_bytes - before
    assert spent <= uniform.engines[0].stats.payload_bytes - dense
    assert spent >= 0.8 * (uniform.engines[0].stats.payload_bytes - dense)


def test_widths_follow_what_is_measured_later() -> None:
    torch.manual_seed(0)
    net = model()
    virtual = VirtualRanks(gradwire.parse(f"{SPEC},ef=off"), net, 2)

    def first_layers_bits(sizes: dict[str, float]) -> float:
        for _ in range(3):
            virtual.step(gradients(net, 2, sizes))
        grains = virtual.engines[0].states()
        return next(float(state.tensor("bits")[0]) for grain, state in grains if grain.segments[0].name == "0.weight")

    assert first_layers_bits({"0.weight": 10.0, "2.weight": 0.1}) > 4
    assert first_layers_bits({"0.weight": 0.1, "2.weight": 10.0}) < 4


def test_a_step_that_is_not_finite_measures_nothing() -> None:
    net = model()
    for spec in (SPEC, f"{SPEC},guard=off,ef=off"):
        virtual = VirtualRanks(gradwire.parse(spec), net, 2)
        for _ in range(3):
            bad = gradients(net, 2, {})
            bad[1]["2.weight"][0, 0] = float("nan")
            virtual.step(bad)
        states = [state.get("inner", state) for _, state in virtual.engines[0].states()]
        assert {float(state.tensor("bits")[0]) for state in states} == {4.0}  # type: ignore[union-attr]


# On real processes --------------------------------------------------------------------------------------------------


@functools.cache
def outcomes() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_function(f"{CASES}:others", 2, {"folder": folder}, 240)


def test_fp16_keeps_a_gradient_of_100_000_on_one_of_two_ranks() -> None:
    for rank in outcomes():
        for mean in rank["large"]:
            assert mean == pytest.approx(50_000.5, rel=1e-3)


def test_an_overflow_on_one_rank_has_all_ranks_skip_the_same_step() -> None:
    one, other = (rank["overflow"] for rank in outcomes())
    assert one == other
    assert one["moved"] == [True, True, True, False, True, True]
    assert one["scale"] == [1024.0] * 3 + [512.0] * 3


def test_a_measured_run_goes_on_from_a_save_as_if_there_had_been_no_break() -> None:
    one, other = (rank["measured"] for rank in outcomes())
    assert one == other
    assert one["saved"] == one["loaded"]
    assert one["whole"] == one["resumed"]
    assert len(set(one["saved"].values())) > 1


def test_a_plain_loop_and_sharded_models_measure_too() -> None:
    one, other = outcomes()
    assert one["session"] == other["session"]
    assert len(set(one["session"]["bits"].values())) > 1
    assert one["sharded"][0]["bits"] == other["sharded"][0]["bits"]
    assert len(set(one["sharded"][0]["bits"].values())) > 1
    for rank in (one, other):
        assert all(found["loss"] < 1.4 for found in rank["sharded"])
        assert rank["sharded"][0]["norm"] == one["sharded"][0]["norm"]


def test_a_stack_of_a_sharded_model_is_what_ranks_send() -> None:
    *_, last = stack(STACK, model(), world_size=2)
    assert last.added == ",parameters=bf16"
    for rank in outcomes():
        assert rank["sharded"][2]["sent"] == pytest.approx(last.wire_bytes, rel=0.02)


# Stacks -------------------------------------------------------------------------------------------------------------


def test_a_stack_has_a_level_for_each_layer_and_ends_at_the_cost_of_the_whole() -> None:
    spec = "topk:0.1+int8,layers=default,warmup=3"
    levels = stack(spec, model(), world_size=3)
    assert [level.added for level in levels] == ["fp32", "topk:0.1,warmup=3", "+int8", ",layers=default"]
    assert levels[0].wire_bytes == gradwire.cost("none", model(), 3).wire_bytes
    assert levels[2].wire_bytes == gradwire.cost("topk:0.1+int8", model(), 3).wire_bytes
    assert levels[3].wire_bytes == gradwire.cost(spec, model(), 3, step=9).wire_bytes


def test_what_parameters_are_gathered_in_is_a_layer_of_sharded_models() -> None:
    levels = stack("int4,parameters=int8", model(), world_size=2)
    plain = 4 * sum(p.numel() for p in model().parameters())
    assert levels[0].gradient_bytes == plain / 2
    assert levels[0].parameter_bytes == plain
    assert levels[1].gradient_bytes == levels[2].gradient_bytes < 0.15 * levels[0].gradient_bytes
    assert levels[2].parameter_bytes < 0.3 * levels[1].parameter_bytes == 0.3 * levels[0].parameter_bytes


def test_the_command_prints_what_each_layer_saves(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cost", "--stack", "topk:0.01+int8,parameters=bf16", "--task", "digits"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "fp32", "topk:0.01", "+int8", ",parameters=bf16"]
    levels = stack(arguments[2], make_task("digits", 0, None).model, 4)
    for line, (before, level) in zip(lines[2:], itertools.pairwise(levels), strict=True):
        assert f"{before.wire_bytes - level.wire_bytes:,} B" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cost", "--stack"], "name at least one method"),
        (["cost", "--stack", "int4", "--rate", "1gbit"], "no --rate"),
        (["cost", "--stack", "powersgd:2,parameters=int8"], "cannot be stopped halfway"),
    ],
)
def test_the_command_says_what_it_cannot_stack(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--task", "digits"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
