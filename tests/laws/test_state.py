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
from gradwire.core.state import Leaf, replace_leaves, walk
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import Reducer

from . import checks
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


def state_dict(lockstep: Lockstep, rank: int) -> saved.Saved:
    """What a handle saves."""
    return {
        "version": saved.VERSION,
        "reducer": repr(lockstep.reducer),
        "step": lockstep.index,
        "seed": lockstep.seed,
        "scale": 1.0,
        "rank": rank,
        "world_size": lockstep.world_size,
        "parameters": saved.save([(lockstep.grain, lockstep.states[rank])], rank),
    }


def through_a_file(state: saved.Saved) -> saved.Saved:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(reducer: Reducer, grain: Grain, states: list[saved.Saved]) -> Lockstep:
    lockstep = Lockstep(reducer, grain, len(states))
    lockstep.index = states[0]["step"]
    lockstep.states = [
        saved.load(grain, fresh, state["parameters"], rank)
        for rank, (fresh, state) in enumerate(zip(lockstep.states, states, strict=True))
    ]
    return lockstep


@each_reducer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_resumed_run_is_the_same_run(reducer: Reducer, dtype: torch.dtype) -> None:
    grain, ranks = two_parameters(reducer, dtype), ranks_for(reducer, 3)
    lockstep = ran(reducer, grain, ranks)
    again = resumed(reducer, grain, [through_a_file(state_dict(lockstep, rank)) for rank in range(ranks)])
    assert checks.same_state(again.states, checks.snapshot(lockstep.states))
    for step in range(2):
        xs = xs_of(grain, ranks, 100 + step)
        for mean, other in zip(lockstep.step(xs), again.step(xs), strict=True):
            assert torch.equal(bits(mean), bits(other)) or not reducer.repeatable


def _magnitude(_: str, leaf: Leaf) -> Leaf:
    return dataclasses.replace(leaf, tensor=leaf.tensor.abs())


@each_reducer
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_resharding_conserves_what_is_owed(reducer: Reducer, before: int, after: int) -> None:
    grain = two_parameters(reducer)
    before, after = ranks_for(reducer, before), ranks_for(reducer, after)
    lockstep = ran(reducer, grain, before)
    states = gradwire.reshard([through_a_file(state_dict(lockstep, r)) for r in range(before)], after)
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


def test_states_that_do_not_belong_together_are_refused() -> None:
    reducer = gradwire.parse("int4")
    grain = two_parameters(reducer)
    lockstep = ran(reducer, grain, 3)
    states = [state_dict(lockstep, rank) for rank in range(3)]
    with pytest.raises(StateError, match="all ranks"):
        gradwire.reshard(states[:2], 2)
    with pytest.raises(StateError, match="all ranks"):
        gradwire.reshard([], 2)
    with pytest.raises(StateError, match="all ranks"):
        gradwire.reshard([*states[:2], {**states[2], "step": 99}], 2)
    other = Grain("c", (Segment("c", 0, 700, 0),), (700,), torch.float32, grain.device)
    with pytest.raises(StateError, match="'c'"):
        resumed(reducer, other, states)
