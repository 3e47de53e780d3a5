"""The engine without processes: on threads it computes what virtual ranks do, and counts what it sends."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from engines import Engines, run_step
from gradwire import cost, parse
from gradwire.core.grain import flat_grain
from gradwire.core.state import State, walk
from gradwire.drivers.cost import requests_of
from gradwire.drivers.engine import Engine
from gradwire.drivers.interpreter import sent_bytes
from gradwire.drivers.lockstep import Lockstep
from gradwire.drivers.traced import Traced
from gradwire.drivers.virtual import VirtualRanks, gathered
from gradwire.reducers.step import Step

GRAIN = 60
RANKS = 4
SPECS = [
    *("none", "int4", "topk:0.1", "powersgd:2", "sign", "fp16,exchange=ring", "none,exchange=tree", "qsgd:15"),
    *("topk:0.1,node=2", "int4,node=2", "median", "rfa:3", "trimmed:1", "adaptive:fp32", "randomk:0.2", "signsgd_mv"),
]

Gradients = dict[str, Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 6), nn.Linear(6, 3))


def drawn(step: int, ranks: int = RANKS) -> list[Gradients]:
    """Gradients of one step on every rank."""
    generator = torch.Generator().manual_seed(step)
    named = list(model().named_parameters())
    return [{name: torch.randn(p.shape, generator=generator) for name, p in named} for _ in range(ranks)]


def owed(engine: Engine) -> list[Tensor]:
    return [leaf.tensor.clone() for _, state in engine.states() for _, leaf in walk(state) if leaf.owed or leaf.scaled]


def test_what_is_owed_follows_the_loss_scale() -> None:
    engines = Engines(parse("topk:0.1"), model(), 1, grain_numel=GRAIN)
    engines.step(drawn(0, 1))
    (engine,) = engines.ranks
    before = owed(engine)
    engine.rescale(0.25)
    assert sum(float(tensor.abs().sum()) for tensor in before) > 1.0
    for was, now in zip(before, owed(engine), strict=True):
        assert torch.equal(now, was * 0.25)


@pytest.mark.parametrize("spec", SPECS)
def test_engines_on_threads_compute_what_virtual_ranks_do(spec: str) -> None:
    """Over steps with one that is not finite: equal means and states, and as many bytes as `cost` says."""
    reducer = parse(spec)
    engines, virtual = Engines(reducer, model(), RANKS, 3, GRAIN), VirtualRanks(reducer, model(), RANKS, 3, GRAIN)
    for step in range(4):
        gradients = drawn(step)
        if step == 2:
            gradients[1]["0.weight"][3, 4] = float("inf")
        means = engines.step(gradients)
        virtual.step(gradients)
        expected = dict(virtual.model.named_parameters())
        for rank, engine in enumerate(engines.ranks):
            for unit, mean in zip(engine.plan.units, means[rank], strict=True):
                for name, start, numel, offset in unit.grain.segments:
                    wanted = expected[name].grad
                    assert wanted is not None
                    found = mean[offset : offset + numel]
                    assert torch.equal(found.nan_to_num(7.0), wanted.view(-1)[start : start + numel].nan_to_num(7.0))
            for (_, mine), (_, other) in zip(engine.states(), virtual.engines[rank].states(), strict=True):
                assert_equal(mine, other)


def assert_equal(mine: State, other: State) -> None:
    left, right = dict(walk(mine)), dict(walk(other))
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        if leaf.kind != "scratch":
            assert torch.equal(leaf.tensor, right[path].tensor), path


@pytest.mark.parametrize("spec", ["none", "topk:0.1,node=2", "rfa:3"])
def test_an_engine_counts_what_it_sends_as_cost_does(spec: str) -> None:
    engines = Engines(parse(spec), model(), RANKS, grain_numel=GRAIN)
    engines.step(drawn(0))
    for rank, (engine, transport) in enumerate(zip(engines.ranks, engines.transports, strict=True)):
        stats, predicted = engine.stats, cost(spec, model(), RANKS, grain_numel=GRAIN, rank=rank)
        assert stats.payload_bytes == predicted.payload_bytes == sum(r.nbytes for r in transport.requests)
        assert stats.wire_bytes == predicted.wire_bytes
        assert stats.dense_bytes == predicted.dense_bytes == engine.dense_bytes
        assert stats.dense_wire_bytes == 2 * (RANKS - 1) * stats.dense_bytes // RANKS
        assert stats.ratio == stats.dense_wire_bytes / stats.wire_bytes
        assert (stats.steps, stats.bad_steps) == (1, 0)


@pytest.mark.parametrize("spec", ["none", "int4", "topk:0.1,node=2", "powersgd:2"])
def test_a_trace_tells_what_each_unit_sends(spec: str) -> None:
    reducer = parse(spec)
    engines = Engines(reducer, model(), RANKS, grain_numel=GRAIN)
    traced = [engine.trace() for engine in engines.ranks]
    engines.step(drawn(0))
    for rank, (engine, watched) in enumerate(zip(engines.ranks, traced, strict=True)):
        assert sorted(watched.unit_bytes) == list(range(len(engine.plan.units)))
        assert sum(watched.unit_bytes.values()) == pytest.approx(
            engine.stats.wire_bytes, abs=2 * len(engine.plan.units)
        )
        for number, unit in enumerate(engine.plan.units):  # as if it travelled alone
            step = Step(0, rank, RANKS)
            alone = sum(sent_bytes(request, rank, RANKS) for request in requests_of(unit, step))
            assert watched.unit_bytes[number] == alone, unit.grain.name
    engines.ranks[0].stop_tracing()
    sent = watched_bytes(traced[0])
    engines.step(drawn(1))
    assert watched_bytes(traced[0]) == sent
    assert watched_bytes(traced[1]) > sent


def watched_bytes(traced: Traced) -> int:
    return sum(traced.unit_bytes.values())


def test_what_is_owed_of_each_parameter_is_a_part_of_what_is_owed() -> None:
    """Of element-wise residuals and of owners' shards, wherever these are cut."""
    engines = Engines(parse("int4"), model(), RANKS, grain_numel=GRAIN)
    engines.step(drawn(0))
    for rank, engine in enumerate(engines.ranks):
        for grain, state in engine.states():
            for path, leaf in walk(state):
                parts = [leaf.of_segment(segment, rank) for segment in grain.segments]
                assert leaf.owed
                assert torch.cat(parts).double().square().sum() == leaf.tensor.double().square().sum(), path
                assert all(part.numel() <= segment.numel for part, segment in zip(parts, grain.segments, strict=True))


def test_times_of_an_engine_lie_within_those_of_its_thread() -> None:
    engines = Engines(parse("int4"), model(), 1, grain_numel=GRAIN)
    began, worked = time.perf_counter(), time.thread_time()
    for step in range(3):
        run_step(engines.ranks[0], drawn(step, 1)[0])
    stats = engines.ranks[0].stats
    assert 0 < stats.encode_s <= time.thread_time() - worked
    assert 0 < stats.wait_s <= time.perf_counter() - began


def test_means_are_those_of_the_step_at_hand() -> None:
    (engine,) = Engines(parse("none"), model(), 1, grain_numel=GRAIN).ranks
    run_step(engine, drawn(0, 1)[0], release=False)
    assert engine.value(0).numel() == engine.plan.units[0].grain.numel
    engine.begin()
    with pytest.raises(KeyError):
        engine.value(0)


def test_means_are_given_away_as_soon_as_they_are_known_and_not_kept() -> None:
    kept, given = (Engines(parse("int4"), model(), 1, grain_numel=GRAIN).ranks[0] for _ in range(2))
    gradients = drawn(0, 1)[0]
    run_step(kept, gradients, release=False)
    found: dict[int, torch.Tensor] = {}
    before: list[int] = []
    with torch.no_grad():
        given.begin(lambda unit, mean: found.update({unit: mean.clone()}))
        for i, unit in enumerate(given.plan.units):
            assert i not in found
            before.append(len(found))
            given.deliver(i, 0, gathered(unit.grain, gradients).view(-1))
            given.pump()
        assert before[-1]  # the first ones are known before the last gradients come
        given.finish()
    for i in range(len(given.plan.units)):
        assert torch.equal(found[i], kept.value(i))
        assert not given.value(i).numel()


def test_a_bad_step_is_known_as_soon_as_it_ends() -> None:
    """On a CPU: the step after it need not begin first."""
    (engine,) = Engines(parse("topk:0.1"), model(), 1, grain_numel=GRAIN).ranks
    run_step(engine, drawn(0, 1)[0])
    assert not engine.found_bad()
    run_step(engine, {name: gradient * float("nan") for name, gradient in drawn(1, 1)[0].items()})
    assert engine.found_bad()
    assert not engine.stats.bad_steps  # it is counted where the next one begins


def test_the_first_bad_mean_is_named_after_later_steps_too() -> None:
    """On a GPU whether a step was bad is known to its host only after the next one, which may be bad as well."""
    engines = Engines(parse("topk:0.1"), model(), 1, grain_numel=GRAIN)
    (engine,) = engines.ranks
    for step, broken in enumerate(["", "2.weight", "0.weight", ""]):
        gradients = drawn(step, 1)
        if broken:
            gradients[0][broken].fill_(float("nan"))
        engines.step(gradients)
        if step == 0:
            assert engine.bad_mean() is None
        else:
            found = engine.bad_mean()
            assert found is not None
            assert found[0] == 1
            assert "2.weight" in [segment.name for segment in found[1].segments]


def test_one_virtual_rank_goes_on_where_it_was_saved() -> None:
    whole, again = (VirtualRanks(parse("topk:0.1"), model(), 1, 3, GRAIN) for _ in range(2))
    whole.step(drawn(0, 1))
    again.load_state_dicts(whole.state_dicts())
    for ranks in (whole, again):
        ranks.step(drawn(1, 1))
    assert again.index == whole.index == 2
    for (_, mine), (_, other) in zip(again.engines[0].states(), whole.engines[0].states(), strict=True):
        assert_equal(mine, other)


def test_lockstep_counts_its_steps() -> None:
    ranks = Lockstep(parse("none"), flat_grain(4), world_size=2)
    for _ in range(3):
        ranks.step([torch.ones(4), torch.ones(4)])
    assert ranks.index == 3


def test_what_is_taken_back_is_owed_as_before_and_nothing_else() -> None:
    (engine,) = Engines(parse("topk:0.1"), model(), 1, grain_numel=GRAIN).ranks
    run_step(engine, drawn(0, 1)[0])
    before = owed_by_name(engine)
    run_step(engine, drawn(1, 1)[0])
    engine.take_back({"1.weight"})
    after = owed_by_name(engine)
    assert torch.equal(after.pop("1.weight"), before["1.weight"])
    assert not any(torch.equal(tensor, before[name]) for name, tensor in after.items())


def owed_by_name(engine: Engine) -> dict[str, Tensor]:
    """What is owed of each parameter, end to end."""
    pieces: dict[str, list[Tensor]] = {}
    for (grain, _), tensor in zip(engine.states(), owed(engine), strict=True):
        for name, _, numel, offset in grain.segments:
            pieces.setdefault(name, []).append(tensor[offset : offset + numel])
    return {name: torch.cat(parts) for name, parts in pieces.items()}
