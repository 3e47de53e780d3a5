"""Plans and the engine of gradients that come in parts: arithmetic, and one rank alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.grain import ParameterSpec
from gradwire.core.state import walk
from gradwire.drivers.engine import Engine
from gradwire.drivers.lockstep import Meeting, VirtualTransport
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.reducers import Partition, is_vector
from gradwire.spec import parse

CPU = torch.device("cpu")


def chunked(name: str, shape: tuple[int, ...], ranks: int) -> Chunked:
    rows = -(-shape[0] // ranks)
    return Chunked(ParameterSpec(name, shape, torch.float32, CPU), rows * torch.Size(shape[1:]).numel())


def engine(spec: str, ranks: int = 1, grain_numel: int | None = None) -> Engine:
    parts = [[chunked("a", (5, 3), ranks), chunked("b", (7,), ranks)], [chunked("c", (4, 4), ranks)]]
    plan = plan_parts(parts, parse(spec).scattered(), range(ranks), grain_numel)
    return Engine(plan, VirtualTransport(Meeting(ranks), 0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("grain_numel", [None, 8, 40])
def test_every_element_is_in_one_place_and_nothing_else_is_anywhere(ranks: int, grain_numel: int | None) -> None:
    shapes = {"a": (5, 3), "b": (7,), "c": (4, 4), "d": (1, 2)}
    parts = [[chunked(n, shapes[n], ranks) for n in names] for names in ("ab", "cd")]
    plan = plan_parts(parts, parse("int8").scattered(), range(ranks), grain_numel)
    found: dict[str, list[int]] = {name: [] for name in shapes}
    for unit, (grain, reducer) in enumerate(plan.units):
        width = plan.widths[unit]
        assert grain.numel == width * ranks
        assert grain_numel is None or width <= max(1, grain_numel // ranks)
        assert reducer.scatters
        taken: list[int] = []
        for name, start, numel, offset in grain.segments:
            found[name] += range(start, start + numel)
            taken += range(offset, offset + numel)
            (part,) = [p for p in parts if any(c.spec.name == name for c in p)]
            (chunk,) = [c.chunk for c in part if c.spec.name == name]
            assert start // chunk == (start + numel - 1) // chunk == offset // width  # its owner's row
        assert len(set(taken)) == len(taken)
    for name, elements in found.items():
        assert sorted(elements) == list(range(torch.Size(shapes[name]).numel()))
    assert [list(part) for part in plan.parts] == [
        list(range(len(plan.parts[0]))),
        list(range(plan.parts[1].start, len(plan.waves))),
    ]


def test_one_row_of_several_has_its_own_elements() -> None:
    (unit,) = plan_parts([[chunked("a", (5, 3), 2)]], parse("none"), range(1, 2)).units
    assert [(s.start, s.numel, s.offset) for s in unit.grain.segments] == [(9, 6, 0)]
    assert unit.grain.numel == 9


def test_a_policy_gives_each_reducer_units_of_its_own() -> None:
    policy = Partition(((is_vector, parse("bf16")),), parse("int8")).scattered()
    plan = plan_parts([[chunked("a", (8, 4), 2), chunked("b", (8,), 2), chunked("c", (8, 4), 2)]], policy, range(2))
    names = [{segment.name for segment in grain.segments} for grain, _ in plan.units]
    assert names == [{"a", "c"}, {"b"}]
    assert len(plan.waves) == 1  # and one collective


def test_whole_matrices_are_refused() -> None:
    with pytest.raises(CompositionError, match="'a' is sharded, and low rank wants whole matrices"):
        plan_parts([[chunked("a", (64, 64), 2)]], parse("powersgd:2"), range(1))


def reduced(engine: Engine, part: int, value: float) -> list[Tensor]:
    """Reduce a part whose gradients are all the same; return the means."""
    return run(engine, part, lambda x: x.fill_(value))


def run(engine: Engine, part: int, fill: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Reduce a part; return the means."""
    means: list[Tensor] = []

    def filled(unit: int, x: Tensor) -> None:
        fill(x)

    engine.run_part(part, filled, lambda unit, mean: means.append(mean.clone()))
    return means


def owed(engine: Engine) -> list[float]:
    return [float(leaf.tensor.abs().sum()) for _, state in engine.states() for _, leaf in walk(state)]


def test_a_part_that_does_not_come_keeps_its_state() -> None:
    e = engine("topk:0.1")
    e.begin()
    reduced(e, 0, 1.0)
    reduced(e, 1, 1.0)
    e.finish()
    first, second = owed(e)
    assert first > 0 < second
    e.begin()
    reduced(e, 1, 1.0)
    e.finish()
    assert owed(e)[0] == first
    assert owed(e)[1] > second
    assert e.index == e.stats.steps == 2


def test_what_is_not_finite_in_one_part_leaves_all_states_as_they_were() -> None:
    e = engine("topk:0.1")
    e.begin()
    assert all(mean.isfinite().all() for mean in reduced(e, 0, 1.0))
    assert all(mean.isnan().all() for mean in reduced(e, 1, float("nan")))
    e.finish()
    assert owed(e) == [0.0, 0.0]
    assert e.stats.bad_steps == 1


def test_a_part_that_comes_twice_owes_from_both() -> None:
    once, twice = engine("topk:0.1"), engine("topk:0.1")
    for e, times in ((once, 1), (twice, 2)):
        e.begin()
        given = sum(float(sum(mean.sum() for mean in reduced(e, 0, 1.0))) for _ in range(times))
        e.finish()
        assert given + owed(e)[0] == pytest.approx(22.0 * times)
    assert owed(twice)[0] > owed(once)[0]


def test_a_step_that_broke_off_is_forgotten() -> None:
    e = engine("topk:0.1")
    e.begin()
    reduced(e, 0, 1.0)
    e.begin()
    e.finish()
    assert owed(e) == [0.0, 0.0]


def test_memory_for_gradients_lasts_no_longer_than_their_part_unless_it_is_kept() -> None:
    for spec, kept in (("int8,ef=off", False), ("int4,residual=bf16", False), ("int8", True)):
        e = engine(spec)
        e.begin()
        reduced(e, 0, 1.0)
        reduced(e, 1, 1.0)
        e.finish()
        assert any(buffer.numel() for buffer in e.buffers()) == kept


def test_nothing_is_owed_of_padding() -> None:
    """A sign has no zero: of what is not there it would keep what its scale makes of it."""
    padded = plan_parts([[chunked("a", (5, 3), 2)]], parse("sign"), range(1, 2))
    e = Engine(padded, VirtualTransport(Meeting(1), 0))
    for _ in range(2):
        e.begin()
        run(e, 0, lambda x: x.copy_(torch.tensor([3.0, -1, 2, 1, 1, 1, 0, 0, 0])))
        e.finish()
        (leaf,) = [leaf for _, state in e.states() for _, leaf in walk(state) if leaf.kind == "element"]
        assert leaf.tensor[:6].abs().sum() > 0
        assert leaf.tensor[6:].tolist() == [0.0] * 3
