"""Another method in mid-run: what was owed is delivered all the same, and a change that fails changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from engines import Engines
from gradwire import AttachError, Session, StepError, parse
from gradwire.core.carry import carry_over
from gradwire.core.saved import pack_all
from gradwire.core.state import CARRIED, Leaf, walk
from gradwire.drivers.engine import Engine
from gradwire.ranks.supervised import run_function
from laws.damage import difference

CASES = str(Path(__file__).with_name("change_cases.py"))


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 240)


# Virtual ranks ----------------------------------------------------------------------------------------------------

VIRTUAL = [
    *(("topk:0.01", "int4"), ("powersgd:4", "none"), ("int4", "topk:0.01"), ("int4", "int8"), ("none", "topk:0.01")),
    *(("topk:0.01,exchange=twoshot", "powersgd:2"), ("int4,node=2", "int4"), ("topk:0.1,residual=bf16", "none")),
    *(("topk:0.01", "topk:0.01,residual=bf16"), ("topk:0.01", "powersgd:2,warmup=100"), ("dgc:0.01", "topk:0.1")),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(40, 30), nn.Linear(30, 8), nn.LayerNorm(8)


def gradients(ranks: int, step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = {name: p.shape for name, p in Net().named_parameters()}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(ranks)]


def by_name(engine: Engine, flats: list[Tensor]) -> dict[str, Tensor]:
    """What units have, by parameter."""
    found = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in Net().named_parameters()}
    for name, slices in engine.plan.slices.items():
        for unit, start, numel, offset in slices:
            found[name][start : start + numel] += flats[unit][offset : offset + numel]
    return found


def owed(engines: Engines) -> dict[str, Tensor]:
    """The sum over ranks of what is owed, by parameter; owners owe n times over."""
    n = len(engines.ranks)
    sums = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in Net().named_parameters()}
    for rank, engine in enumerate(engines.ranks):
        flats: list[Tensor] = []
        for grain, state in engine.states():
            flat = torch.zeros(grain.numel, dtype=torch.float64)
            for leaf in (leaf for _, leaf in walk(state) if leaf.owed and not leaf.momentum):
                first, times = leaf.first(rank), n if leaf.kind == "owned" else 1
                here = flat[first : first + leaf.tensor.numel()]
                here += times * leaf.tensor.view(-1)[: here.numel()]
            flats.append(flat)
        for name, values in by_name(engine, flats).items():
            sums[name] += values
    return sums


def followed(old: Engines, spec: str, grain_numel: int) -> Engines:
    """Engines of another method that go on where the old ones ended."""
    n = len(old.ranks)
    new = Engines(parse(spec), Net(), n, grain_numel=grain_numel)
    for rank, (before, engine) in enumerate(zip(old.ranks, new.ranks, strict=True)):
        engine.set_states(carry_over(before.states(), engine.states(), rank, n))
        engine.index = before.index
    return new


@pytest.mark.parametrize(("first", "second"), VIRTUAL, ids=" to ".join)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_element_that_was_given_is_delivered_or_owed(first: str, second: str, ranks: int) -> None:
    old = Engines(parse(first), Net(), ranks, grain_numel=500)
    for step in range(3):
        old.step(gradients(ranks, step))
    before, new = owed(old), followed(old, second, 300)
    for name, values in owed(new).items():
        torch.testing.assert_close(values, before[name], rtol=1e-5, atol=1e-5)
    given = gradients(ranks, 3)
    delivered = by_name(new.ranks[0], new.step(given)[0])
    after = owed(new)
    lossy = "bf16" in second
    for name in before:
        sums = before[name] + sum(one[name].double().reshape(-1) for one in given)
        tolerance = 0.05 if lossy else 1e-4  # a residual of 16 bits is rounded, as its method says
        torch.testing.assert_close(ranks * delivered[name] + after[name], sums, rtol=1e-4, atol=tolerance)


def test_momentum_is_not_taken_for_what_is_owed() -> None:
    old = Engines(parse("dgc:0.01"), Net(), 2, grain_numel=500)
    for step in range(3):
        old.step(gradients(2, step))
    (kept, *_), (taken, *_) = old.ranks[0].states(), followed(old, "topk:0.1", 500).ranks[0].states()
    residual = dict(walk(kept[1]))
    assert bool(next(leaf.tensor for path, leaf in residual.items() if path.endswith("velocity")).any())
    assert torch.equal(
        next(leaf.tensor for path, leaf in walk(taken[1]) if path.endswith("residual")),
        next(leaf.tensor for path, leaf in residual.items() if path.endswith("residual")),
    )


@pytest.fixture
def carrying() -> Engines:
    """Two ranks that carry what `topk` owed to a method without residuals."""
    old = Engines(parse("topk:0.1"), Net(), 2, grain_numel=500)
    for step in range(3):
        old.step(gradients(2, step))
    return followed(old, "none", 500)


def carried(engine: Engine) -> list[Tensor]:
    leaves = [state.get(CARRIED) for _, state in engine.states()]
    return [leaf.tensor.clone() for leaf in leaves if isinstance(leaf, Leaf)]


def test_what_is_carried_is_kept_until_a_step_is_good(carrying: Engines) -> None:
    before = carried(carrying.ranks[0])
    assert any(bool(tensor.any()) for tensor in before)
    bad = gradients(2, 3)
    bad[1]["b.weight"][0, 0] = float("inf")
    carrying.step(bad)
    assert all(torch.equal(a, b) for a, b in zip(carried(carrying.ranks[0]), before, strict=True))
    carrying.step(gradients(2, 3))
    assert carried(carrying.ranks[0]) == []


def test_what_is_carried_for_a_mean_that_is_dropped_is_carried_on(carrying: Engines) -> None:
    engine = carrying.ranks[0]
    flats = carried(engine)
    before = by_name(engine, flats)
    carrying.step(gradients(2, 3))
    engine.take_back({"b.weight"})
    after = by_name(engine, carried(engine))
    assert bool(before["b.weight"].any())
    for name, values in after.items():
        assert torch.equal(values, before[name] if name == "b.weight" else torch.zeros_like(values))


def test_what_is_carried_follows_the_loss_scale(carrying: Engines) -> None:
    before = carried(carrying.ranks[0])
    carrying.ranks[0].rescale(4.0)
    assert all(torch.equal(a, 4 * b) for a, b in zip(carried(carrying.ranks[0]), before, strict=True))


# Two real ranks ---------------------------------------------------------------------------------------------------

PAIRS = [["topk:0.01", "int4"], ["powersgd:4", "none"], ["int4", "topk:0.01"], ["none", "median"]]


@functools.cache
def changed(ranks: int) -> list[dict[str, Any]]:
    return run("changed", ranks, pairs=PAIRS)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_training_goes_on_and_nothing_is_lost(pair: list[str], ranks: int) -> None:
    first, second = pair
    for by_attach in (False, True):
        everywhere = [found[f"{first} {second} {by_attach}"] for found in changed(ranks)]
        assert len({found["digest"] for found in everywhere}) == 1
        for found in everywhere:
            assert found["method"] == second
            assert found["steps"] == [6, 3]
            assert "step=6" in found["repr"]
            for given, accounted in found["accounts"][: 2 if second == "median" else 3]:
                assert accounted == pytest.approx(given, abs=1e-4)


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_attach_and_a_session_change_alike(pair: list[str]) -> None:
    for found in changed(2):
        first, second = (found[f"{' '.join(pair)} {by_attach}"] for by_attach in (False, True))
        assert first["digest"] == second["digest"]


def test_a_resume_after_a_change_is_exact(tmp_path: Path) -> None:
    for found in run("resumed", 2, folder=str(tmp_path), pairs=PAIRS[:3]):
        for ends in found.values():
            assert len(set(ends)) == 1


def test_what_unused_layers_carry_is_neither_lost_nor_delivered_twice() -> None:
    for found in run("unused", 2):
        assert abs(found["kept"]) > 0.01
        assert found["accounted"] == pytest.approx(found["given"], abs=1e-4)


def test_a_change_that_fails_leaves_the_old_method_in_place() -> None:
    first, last = run("refused", 2)
    for told in (first, last):
        assert told["spec"].startswith("SpecError: unknown method")
        assert "CompositionError" in told["too few ranks"]
        assert "AttachError: ranks disagree on the method: rank 1 has" in told["disagree"]
        assert " from step " in told["disagree"]
        assert "the steps of a private mean are accounted for together" in told["private"]
        assert "StepError: a step of this session is under way: change the method" in told["within backward"]
        assert told["digests"][0] == told["digests"][1]
    assert first["digests"] == last["digests"]
    assert last["spec of one"].startswith("SpecError")
    assert last["making"] == "MemoryError: no room"
    assert first["spec of one"].startswith("AttachError: change failed on rank 1, and changed nothing on any: unknown")
    assert first["making"].startswith("AttachError: change failed on rank 1, and changed nothing on any: no room")
    assert first["absent"].startswith("CommunicationError: rank 1 has not come to change within 1 s")


# One rank, in this process ----------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Iterator[Session]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with Session({"a": torch.zeros(300), "b": torch.zeros(8, 8)}, "topk:0.1", deadline_s=5) as made:
        yield made
    dist.destroy_process_group()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"a": torch.randn(300, generator=generator), "b": torch.randn(8, 8, generator=generator)}


def test_a_step_under_way_and_a_closed_session_refuse_a_change(session: Session) -> None:
    with session.step() as step:
        with pytest.raises(StepError, match="a step of this session is under way"):
            session.change("int4")
        step.deliver_all(tensors())
    with pytest.raises(StepError, match="was not delivered"):
        session.reduce_({"a": torch.zeros(300)})
    with Session({"a": torch.zeros(3)}, "none", deadline_s=5) as other:
        with pytest.raises(StepError, match="'b' is none"):
            other.reduce_({"b": torch.zeros(3)})
        other.change("int4")  # nothing of that step was communicated
    with pytest.raises(StepError, match="this session is closed: make a new one"):
        other.change("int8")


def test_a_private_mean_is_not_changed_either(session: Session) -> None:
    with (
        Session({"a": torch.zeros(3)}, "dp:1", deadline_s=5) as private,
        pytest.raises(AttachError, match="the steps of a private mean are accounted for together"),
    ):
        private.change("none")


def test_a_change_after_a_load_goes_on_with_its_seed_and_step(session: Session) -> None:
    session.reduce_(tensors())
    state = {**session.state_dict(), "seed": 11, "step": 40}
    session.load_state_dict(state)
    session.change("randomk:0.1")
    assert (session.seed, session.engine.seed, session.engine.index) == (11, 11, 40)
    assert session.state_dict()["reducer"] == repr(parse("randomk:0.1"))


def test_a_change_in_inference_mode_and_two_in_a_row(session: Session) -> None:
    session.reduce_(tensors())
    before = session.residual_norm()
    with torch.inference_mode():
        session.change("none")
    session.change("fp16")
    assert session.residual_norm() == pytest.approx(before) != 0
    state = session.state_dict()
    session.reduce_({name: torch.zeros_like(tensor) for name, tensor in tensors().items()})
    assert session.residual_norm() == 0
    session.load_state_dict(state)
    assert difference(session.state_dict(), state) is None
    assert session.report().residual_norm == pytest.approx(before)


def test_states_that_carry_are_resharded(carrying: Engines) -> None:
    states = pack_all([engine.states() for engine in carrying.ranks], "none", step=3, seed=0)
    mean = sum(by_name(engine, carried(engine))["a.weight"] for engine in carrying.ranks) / 2
    new = gradwire.reshard(states, 3)
    pieces = new[2]["parameters"]["a.weight"][f"element:{CARRIED}"]
    torch.testing.assert_close(torch.cat([piece["values"] for piece in pieces]).double(), mean)
