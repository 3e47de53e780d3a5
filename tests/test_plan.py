"""Plans: every element once, in grains that depend on names, shapes, dtypes and policy alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradwire import cost, parse
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.drivers.plan import GPU_GRAIN_NUMEL, GRAIN_NUMEL, Plan, plan

CPU = torch.device("cpu")
SPECS = ("none", "topk:0.1", "int4", "powersgd:2", "sign,vectors=off", "powersgd:1,warmup=2")
shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from([torch.float32, torch.float16])), max_size=12).map(
    lambda drawn: [ParameterSpec(f"layer{i}.weight", s, d, CPU) for i, (s, d) in enumerate(drawn)]
)


def covered(planned: Plan) -> dict[str, list[tuple[int, int]]]:
    """The ranges of each parameter that grains hold."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for unit in planned.units:
        for segment in unit.grain.segments:
            ranges.setdefault(segment.name, []).append((segment.start, segment.start + segment.numel))
    return ranges


@given(model=models, spec=st.sampled_from(SPECS), limit=st.integers(1, 400))
def test_every_element_is_in_one_grain(model: list[ParameterSpec], spec: str, limit: int) -> None:
    planned = plan(model, parse(spec), limit)
    ranges = covered(planned)
    assert set(ranges) == {p.name for p in model}
    for parameter in model:
        pieces = sorted(ranges[parameter.name])
        assert pieces[0][0] == 0
        assert pieces[-1][1] == parameter.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))


@given(model=models, spec=st.sampled_from(SPECS), limit=st.integers(1, 400))
def test_grains_are_well_formed(model: list[ParameterSpec], spec: str, limit: int) -> None:
    planned = plan(model, parse(spec), limit)
    dtypes = {p.name: p.dtype for p in model}
    names = [unit.grain.name for unit in planned.units]
    assert len(set(names)) == len(names), "two grains would draw the same random bits"
    for grain, reducer in planned.units:
        offset = 0
        for segment in grain.segments:
            assert segment.offset == offset
            assert dtypes[segment.name] == grain.dtype
            offset += segment.numel
        assert offset == grain.numel == math.prod(grain.shape)
        if reducer.scope == "flat":
            assert grain.numel <= limit
        else:
            assert len(grain.segments) == grain.shape[0]


@given(model=models, spec=st.sampled_from(SPECS), limit=st.integers(1, 400))
def test_a_plan_is_a_function_of_the_model(model: list[ParameterSpec], spec: str, limit: int) -> None:
    """Nothing but the parameters enters, so DDP's buckets, their order and their rebuilding cannot."""
    assert plan(model, parse(spec), limit) == plan(list(model), parse(spec), limit)


def test_waves_run_in_the_order_gradients_come() -> None:
    model = [ParameterSpec(f"w{i}", (100,), torch.float32, CPU) for i in range(6)]
    firsts = [wave[0].grain.segments[0].name for wave in plan(model, parse("none"), grain_numel=200).waves]
    assert firsts == ["w5", "w3", "w1"]


def test_matrices_go_together_and_small_vectors_with_them() -> None:
    """Two rounds, whatever the number of layers: collectives are what such a method pays for."""
    shapes = [(32, 16), (32,), (16, 32), (16,)] * 4
    model = [ParameterSpec(f"layer{i}", shape, torch.float32, CPU) for i, shape in enumerate(shapes)]
    planned = plan(model, parse("powersgd:2"))
    assert [u.grain.shape for u in planned.units] == [(4, 16, 32), (4, 32, 16), (4 * 32 + 4 * 16,)]
    assert [len(wave) for wave in planned.waves] == [3]
    assert cost(parse("powersgd:2"), model, world_size=4).collectives == 2


def test_small_models_are_cut_finer_where_payloads_are_large() -> None:
    """More of what is large hides behind the backward pass; what is small would only pay for more collectives."""
    model = [ParameterSpec(f"w{i}", (512, 512), torch.float32, CPU) for i in range(8)]
    found = {spec: len(plan(model, parse(spec)).waves) for spec in ("none", "fp16", "int4", "topk:0.01", "powersgd:4")}
    assert found == {"none": 8, "fp16": 8, "int4": 8, "topk:0.01": 4, "powersgd:4": 2}


def test_a_wave_of_matrices_has_an_end() -> None:
    model = [ParameterSpec(f"w{i}", (40, 40), torch.float32, CPU) for i in range(20)]
    waves = plan(model, parse("powersgd:2"), grain_numel=1600).waves
    assert [sum(unit.grain.numel for unit in wave) // 1600 for wave in waves] == [8, 8, 4]


LARGE = [ParameterSpec(f"w{i}", (1 << 14, 1 << 12), torch.float32, CPU) for i in range(32)]
"""2^31 elements."""


def test_waves_of_a_large_model_hold_several_grains() -> None:
    """About 128 waves, whatever the size; grains, which keys and states belong to, are cut as ever."""
    large, tight = plan(LARGE, parse("int4")), plan(LARGE, parse("int4"), GRAIN_NUMEL)
    assert [len(wave) for wave in large.waves] == [*[16] * 127, 15, 1]
    assert {unit.grain.numel for unit in large.units} == {GRAIN_NUMEL}
    assert tight == large
    assert cost("int4", LARGE, 8).collectives == 2 * 129


def test_waves_of_a_model_that_is_not_large_hold_one_grain() -> None:
    waves = plan(LARGE[:2], parse("int4")).waves
    assert [len(wave) for wave in waves] == [1] * 128


def test_grains_on_a_gpu_are_larger_the_larger_the_model_is() -> None:
    """The same holds for shards. A wave of matrices has room for four grains, and is never smaller than on a CPU."""
    gpu = torch.device("cuda", 0)
    large = [spec._replace(device=gpu) for spec in LARGE]
    planned = plan(large, parse("int4"))
    assert [[unit.grain.numel for unit in wave] for wave in planned.waves] == [[GPU_GRAIN_NUMEL]] * 128
    parts = plan_parts([[Chunked(spec, 1 << 24) for spec in large]], parse("int4").scattered(), range(4))
    assert {unit.grain.numel for unit in parts.units} == {GPU_GRAIN_NUMEL}
    middling = [ParameterSpec(f"w{i}", (1024, 1024), torch.float32, gpu) for i in range(96)]
    for method in ("none", "int4"):
        assert [unit.grain.numel for unit in plan(middling, parse(method)).units] == [16 << 20] * 6
    assert [unit.grain.numel for unit in plan(middling, parse("powersgd:4")).units] == [60 << 20, 36 << 20]
    assert [unit.grain.numel for unit in plan(middling[:16], parse("none")).units] == [4 << 20] * 4
    assert [unit.grain.numel for unit in plan(middling[:16], parse("powersgd:4")).units] == [10 << 20, 6 << 20]
    on_a_cpu = [spec._replace(device=CPU) for spec in middling]
    assert [unit.grain.numel for unit in plan(on_a_cpu, parse("powersgd:4")).units] == [8 << 20] * 12
    assert plan(middling[:1], parse("int4")).units[0].grain.numel == 1 << 20


def test_devices_share_no_wave() -> None:
    model = [
        ParameterSpec("bias", (8,), torch.float32, torch.device("meta")),
        ParameterSpec("w", (40, 40), torch.float32, CPU),
    ]
    assert len(plan(model, parse("powersgd:2")).waves) == 2


def test_a_large_parameter_is_cut_evenly() -> None:
    model = [ParameterSpec("w", (1001,), torch.float32, CPU)]
    assert [u.grain.numel for u in plan(model, parse("none"), grain_numel=400).units] == [334, 334, 333]


def test_tied_weights_are_planned_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    assert [p.name for p in parameter_specs(model.named_parameters())] == ["0.weight"]
    assert cost(parse("none"), model, world_size=2).dense_bytes == 8 * 8 * 4


@pytest.mark.parametrize("spec", SPECS)
def test_an_empty_model_costs_nothing(spec: str) -> None:
    found = cost(parse(spec), nn.Sequential(), world_size=4)
    assert (found.payload_bytes, found.wire_bytes, found.collectives) == (0, 0, 0)
