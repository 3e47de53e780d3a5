"""The planner's methods for gradients, and replicas that are averaged every few steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import cost, parse
from gradwire.catalogue import Recommended, catalogue
from gradwire.cli.main import main
from gradwire.core.errors import GradwireError, SpecError
from gradwire.core.grain import ParameterSpec
from gradwire.core.places import EVERY_STEP
from gradwire.drivers.virtual import VirtualRanks
from gradwire.planning import ParallelLayout, device_memory, hardware, model, plan, step_time
from gradwire.planning.gradients import gradient_traffic
from gradwire.planning.held import held_by_training
from gradwire.planning.reasons import PlannedLayout, helps
from gradwire.planning.search import layouts
from gradwire.reducers.step import PAST_WARM_UPS
from gradwire.session.memory import held_memory

LLAMA, SMALL, A100 = model("llama2-7b"), model("gpt2"), hardware("a100-80g")
SLOW = replace(A100, name="slow", network_gbit_per_s=1.0)
WHOLE = ParallelLayout(dp=16, tp=4, batch=512, micro=4, sharding="none", recompute="none")
SIDE = 2048
MATRICES = ((3 * SIDE, SIDE), (SIDE, SIDE), (4 * SIDE, SIDE), (SIDE, 4 * SIDE))


@pytest.mark.parametrize("spec", ["none", "fp16", "int4", "sign", "topk:0.01", "powersgd:4", "int4,node=4"])
def test_bytes_are_those_of_the_cost_driver(spec: str) -> None:
    meta = torch.device("meta")
    specs = [ParameterSpec(str(i), shape, torch.float32, meta) for i, shape in enumerate(MATRICES)]
    expected = cost(spec, specs, 8, step=PAST_WARM_UPS)
    found = gradient_traffic(spec, MATRICES, 8, shards=False)
    numel = sum(rows * columns for rows, columns in MATRICES)
    sent = sum(
        nbytes / request.nbytes * request.wire_bytes(request.axis.size_of(0) if request.axis else 8)
        for request, nbytes in found.requests
    )
    assert sum(nbytes for _, nbytes in found.requests) * numel == pytest.approx(expected.payload_bytes, rel=1e-3)
    assert sent * numel == pytest.approx(expected.wire_bytes, rel=1e-3)


def test_shards_are_scattered_and_not_gathered() -> None:
    whole, half = (gradient_traffic("int4", MATRICES, 8, shards) for shards in (False, True))
    assert [type(request).__name__ for request, _ in whole.requests] == ["AllToAll", "AllGather"]
    assert [type(request).__name__ for request, _ in half.requests] == ["AllToAll"]
    assert half.requests[0][1] == pytest.approx(4.125 / 8, rel=1e-3)  # 4 bits, and two bytes a block of 128
    assert half.coding_bytes < whole.coding_bytes


def test_a_method_takes_less_of_a_slow_link_and_some_coding() -> None:
    plain, coded = (step_time(LLAMA, replace(WHOLE, method=method), SLOW) for method in ("none", "int4"))
    assert coded.data < plain.data / 3
    assert plain.coding == 0 < coded.coding
    given = replace(SLOW, coding_gb_per_s=10.0)
    parameters = LLAMA.parameters / WHOLE.tp
    assert step_time(LLAMA, replace(WHOLE, method="int4"), given).coding == pytest.approx(4 * parameters / 10e9)
    with pytest.raises(SpecError, match="coding_gb_per_s"):
        replace(SLOW, coding_gb_per_s=0.0)


def test_replicas_that_are_averaged_send_every_few_steps() -> None:
    at_end = replace(WHOLE, overlap=False)
    every_step = step_time(LLAMA, at_end, SLOW)
    for every in (8, 64):
        assert step_time(LLAMA, replace(at_end, every=every), SLOW).data == pytest.approx(every_step.data / every)
    ring = replace(at_end, dp=8, cp=2, every=8)  # the two ranks of a sequence add up their gradients in each step
    assert step_time(LLAMA, ring, A100).data > step_time(LLAMA, replace(at_end, dp=8, cp=1, every=8), A100).data


def test_memory_of_methods_and_of_averages() -> None:
    held = LLAMA.parameters / WHOLE.tp
    assert device_memory(LLAMA, WHOLE).method == 0
    # residuals of the gradient and of an owned shard, and a buffer
    assert device_memory(LLAMA, replace(WHOLE, method="int4")).method == pytest.approx((8 + 4 / 16) * held)
    assert device_memory(LLAMA, replace(WHOLE, every=8)).method == pytest.approx(8 * held)  # a copy, and a buffer
    alone = replace(WHOLE, dp=1, batch=4, method="int4")
    assert device_memory(LLAMA, alone).method == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "int45"}, "did you mean .int5."),
        ({"method": "powersgd:4", "sharding": "optimizer"}, "take sharding=none with it"),
        ({"method": "gossip"}, "gossip"),
        ({"every": 0}, "every=0 is below 1"),
        ({"every": 8, "sharding": "optimizer"}, "take sharding=none"),
        ({"every": 8, "ep": 8, "dp": 2}, "take ep=1"),
        ({"method": "int4,node=3"}, "do not divide the 16 ranks"),
        ({"method": "krum:7"}, "at least"),
    ],
)
def test_impossible_methods(changes: dict[str, Any], says: str) -> None:
    mixtral = model("mixtral-8x7b")
    with pytest.raises(GradwireError, match=says):
        step_time(mixtral, replace(WHOLE, **changes), A100)


def test_search_takes_a_method_only_where_it_is_allowed() -> None:
    assert {each.method for each in layouts(LLAMA, SLOW, 64, 512)} == {"none"}
    plain = plan(LLAMA, A100, 64, 512)
    assert not any("changes training" in change for change, _ in plain.helps)  # nothing to gain in a data centre
    planned = PlannedLayout(WHOLE, device_memory(LLAMA, WHOLE), step_time(LLAMA, WHOLE, SLOW))
    told = [change for change, _ in helps(LLAMA, SLOW, planned, None) if "changes training" in change]
    assert any("--methods none int4" in change for change in told)
    assert any("--every 1 8" in change for change in told)
    alone = plan(SMALL, SLOW, 16, 64)
    allowed = plan(SMALL, SLOW, 16, 64, methods=("none", "int4"), every=(1, 8))
    assert allowed.best[0].time.total < alone.best[0].time.total
    assert (allowed.best[0].layout.method, allowed.best[0].layout.every) == ("int4", 8)
    assert allowed.tried > alone.tried
    assert {"method=none", "every=1"} <= {one.change for one in allowed.neighbours}


def test_command_takes_methods(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama2-7b", "--hardware", "a100-80g", "--gpus", "16", "--batch", "64"]
    assert main([*asked, "--methods", "fp16", "--every", "8", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["best"][0]
    assert (first["layout"]["method"], first["layout"]["every"]) == ("fp16", 8)
    assert first["memory_parts_bytes"]["method"] > 0
    assert main([*asked, "--methods", "int4", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("method=int4", "coding", "method "))
    assert main([*asked, "--every", "0"]) == 2
    assert "every=0 is below 1" in capsys.readouterr().err


# What is held ------------------------------------------------------------------------------------------------

RECOMMENDED = sorted(
    {each.use.spec for each in catalogue() if isinstance(each.use, Recommended) and each.place is EVERY_STEP}
)


@pytest.mark.parametrize("spec", [*RECOMMENDED, "none", "fp16", "topk:0.01", "sign"])
def test_what_a_method_holds_is_what_its_engine_holds(spec: str) -> None:
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96), nn.LayerNorm(96), nn.Linear(96, 8))
    ranks = VirtualRanks(parse(spec), small, world_size=4)
    for _ in range(3):
        ranks.step([{n: torch.randn_like(p) for n, p in small.named_parameters()} for _ in range(4)])
    found, held = held_by_training(small, spec, ranks=4), held_memory(ranks.engines[0])
    state = found.residuals + found.factors + found.other_states
    assert state == pytest.approx(held.state_bytes, rel=0.02, abs=64)
    assert found.buffers == pytest.approx(held.buffer_bytes, rel=0.02, abs=64)
    assert found.residuals == pytest.approx(held.residual_bytes, rel=0.02, abs=64)
