"""State outlives its run: it is saved by parameter name, and a changed world size conserves what is owed."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.core import saved
from gradwire.core.errors import StateError
from gradwire.core.grain import Grain, Segment
from gradwire.core.state import Leaf, State, replace_leaves, walk
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import Reducer

from . import checks
from .damage import damages, difference
from .subjects import DTYPES, bits, grain_for, ranks_for, reducers, sample

REDUCERS = reducers()
each_reducer = pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS.keys())


def two_parameters(reducer: Reducer, dtype: torch.dtype = torch.float32) -> Grain:
    """A grain of several parameters: `a` is the tail of a cut one where grains are flat."""
    grain = grain_for(reducer, 700, dtype)
    if reducer.scope == "tensor":
        return grain
    return Grain("a..b", (Segment("a", 50, 300, 0), Segment("b", 0, 400, 300)), (700,), dtype, grain.device)


def xs_of(grain: Grain, ranks: int, seed: int) -> list[Tensor]:
    return [sample("normal", grain.shape, grain.dtype, seed * 10 + rank) for rank in range(ranks)]


def ran(reducer: Reducer, grain: Grain, ranks: int, steps: int = 4) -> Lockstep:
    lockstep = Lockstep(reducer, grain, ranks)
    for step in range(steps):
        lockstep.step(xs_of(grain, ranks, step))
    return lockstep


def through_a_file(state: saved.Saved) -> saved.Saved:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(reducer: Reducer, grain: Grain, states: list[saved.Saved]) -> Lockstep:
    lockstep = Lockstep(reducer, grain, len(states))
    lockstep.load_state_dicts(states)
    return lockstep


def oddly_placed(x: Tensor) -> Tensor:
    """The same values, four or two bytes behind a place where memory is aligned, and in other strides."""
    return torch.empty(x.numel() * 3 + 1, dtype=x.dtype)[1:].view(-1, 3)[:, 0].copy_(x.view(-1)).view(x.shape)


def test_the_odd_places_are_odd() -> None:
    x = oddly_placed(torch.zeros(4, 5))
    assert x.data_ptr() % 64
    assert not x.is_contiguous()


@each_reducer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_resumed_run_is_the_same_run(reducer: Reducer, dtype: torch.dtype) -> None:
    grain, ranks = two_parameters(reducer, dtype), ranks_for(reducer, 3)
    lockstep = ran(reducer, grain, ranks)
    states = [through_a_file(state) for state in lockstep.state_dicts()]
    again = resumed(reducer, grain, states)
    assert checks.same_state(again.states, checks.snapshot(lockstep.states))
    assert [layout(state) for state in again.states] == [layout(state) for state in lockstep.states]
    for state, once_more in zip(states, again.state_dicts(), strict=True):
        assert difference(state, once_more) is None
    for step in range(2):
        xs = xs_of(grain, ranks, 100 + step)
        for mean, other in zip(lockstep.step(xs), again.step([oddly_placed(x) for x in xs]), strict=True):
            assert torch.equal(bits(mean), bits(other)) or not reducer.repeatable


def layout(state: State) -> dict[str, tuple[tuple[int, ...], int]]:
    """How every tensor of a state lies in memory, as far as kernels may look at it: strides, and offset from 64."""
    return {path: (leaf.tensor.stride(), leaf.tensor.data_ptr() % 64) for path, leaf in walk(state)}


@each_reducer
@pytest.mark.draw(15)
def test_a_damaged_state_is_refused_and_nothing_is_changed(reducer: Reducer) -> None:
    grain, ranks = two_parameters(reducer), ranks_for(reducer, 2)
    lockstep = ran(reducer, grain, ranks, steps=2)
    states, before = lockstep.state_dicts(), checks.snapshot(lockstep.states)
    for where, damaged in damages(states[1]):
        with pytest.raises(StateError) as refusal:
            lockstep.load_state_dicts([states[0], damaged, *states[2:]])
        assert len(str(refusal.value)) > 20, where
        assert (lockstep.index, lockstep.seed) == (2, 0), where
        assert checks.same_state(lockstep.states, before), where
    lockstep.load_state_dicts(states[::-1])


def _magnitude(_: str, leaf: Leaf) -> Leaf:
    return dataclasses.replace(leaf, tensor=leaf.tensor.abs())


@each_reducer
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_resharding_conserves_what_is_owed(reducer: Reducer, before: int, after: int) -> None:
    grain = two_parameters(reducer)
    before, after = ranks_for(reducer, before), ranks_for(reducer, after)
    lockstep = ran(reducer, grain, before)
    states = gradwire.reshard([through_a_file(state) for state in lockstep.state_dicts()], after)
    again = resumed(reducer, grain, [through_a_file(state) for state in states])
    old, new = checks.owed(lockstep.states, grain), checks.owed(again.states, grain)
    want, got = sum(old.e) / before + old.s, sum(new.e) / after + new.s
    # the mean is taken in the residual's precision: one rounding for every rank and one to divide
    u = checks.unit_roundoff(*(leaf.tensor.dtype for state in lockstep.states for _, leaf in walk(state) if leaf.owed))
    # of each leaf, since those of one element may cancel
    each = checks.owed([replace_leaves(state, _magnitude) for state in lockstep.states], grain)
    sizes = sum(each.e) / before + each.s
    assert bool(((want - got).abs() <= (before + 1) * u * sizes).all())
    checks.check_means(again.reduce(xs_of(grain, after, 7)), xs_of(grain, after, 7))


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "2", None])
def test_no_number_of_ranks_is_refused(number: object) -> None:
    with pytest.raises(StateError, match="give 1 or more"):
        gradwire.reshard([], number)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"), [("reducer", "AllReduceExchange()"), ("seed", 7), ("scale", 2.0), ("step", 99), ("world_size", 4)]
)
def test_states_of_different_runs_are_refused(key: str, value: object) -> None:
    lockstep = ran(gradwire.parse("int4"), two_parameters(gradwire.parse("int4")), 3)
    states = lockstep.state_dicts()
    with pytest.raises(StateError, match=f"differ in '{key}'"):
        gradwire.reshard([*states[:2], {**states[2], key: value}], 2)
    with pytest.raises(StateError, match=f"differ in '{key}'"):
        lockstep.load_state_dicts([*states[:2], {**states[2], key: value}])


@each_reducer
def test_a_parameter_that_one_rank_has_not_saved_is_refused(reducer: Reducer) -> None:
    states = ran(reducer, two_parameters(reducer), ranks_for(reducer, 3)).state_dicts()
    for name, leaves in states[1]["parameters"].items():
        if all(path.startswith("owned:") for path in leaves):
            continue  # a rank may own nothing of it
        kept = {other: pieces for other, pieces in states[1]["parameters"].items() if other != name}
        with pytest.raises(StateError, match=f"rank 1 saved no .*{name!r}"):
            gradwire.reshard([states[0], {**states[1], "parameters": kept}, *states[2:]], 2)


def test_states_that_do_not_belong_together_are_refused() -> None:
    reducer = gradwire.parse("int4")
    grain = two_parameters(reducer)
    lockstep = ran(reducer, grain, 3)
    states = lockstep.state_dicts()
    with pytest.raises(StateError, match="all ranks"):
        gradwire.reshard(states[:2], 2)
    with pytest.raises(StateError, match="all ranks"):
        gradwire.reshard([], 2)
    with pytest.raises(StateError, match=r"ranks \[0, 1, 1\]"):
        gradwire.reshard([*states[:2], states[1]], 2)
    with pytest.raises(StateError, match="3 ranks, and this run has 2"):
        ran(reducer, grain, 2).load_state_dicts(states)
    other = Grain("c", (Segment("c", 0, 700, 0),), (700,), torch.float32, grain.device)
    with pytest.raises(StateError, match=r"'a'.* does not train"):
        resumed(reducer, other, states)
