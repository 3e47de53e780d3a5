"""Gradients of zero after others leave everything finite, though what is remembered shrinks to nothing.

A head whose loss is switched off and a layer that is frozen in effect have such gradients. They also begin small, so
that what is remembered reaches subnormal numbers within few steps, also where a step takes a twentieth of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gradwire.core.state import flatten, walk
from gradwire.drivers.lockstep import Lockstep
from gradwire.kernels import low_rank
from gradwire.kernels.low_rank import reference
from gradwire.reducers import Reducer, Step
from gradwire.sync import parse
from gradwire.sync.methods import METHODS
from gradwire.sync.optimizers.orthonormal import OrthonormalMomentum
from spec_places import where_of

from .checks import same_state, snapshot
from .subjects import grain_for, normal, ranks_for, reducers

OTHERS, ZEROS = 20, 1000
QUIET = 10
"""Steps without a change of any bit, after which a method that draws nothing at random will change none."""

NUMEL = 60
"""So few that a matrix is sent within few steps: 7 x 8 of them."""


def remembers(reducer: Reducer) -> bool:
    return any(walk(reducer.init(grain_for(reducer, NUMEL), Step(0, 0, ranks_for(reducer, 2)))))


WITH_MEMORY = {spec: reducer for spec, reducer in reducers().items() if remembers(reducer)}


@pytest.fixture
def flushing() -> Iterator[None]:
    """A processor that takes subnormal numbers for zero, where this one can."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def check_stays_finite(reducer: Reducer, size: float, zeros: int) -> None:
    """Steps of gradients of some size, and then of zeros: every mean and every state is finite."""
    grain, count = grain_for(reducer, NUMEL), ranks_for(reducer, 2)
    ranks, before, quiet = Lockstep(reducer, grain, count), list[dict[str, Tensor]](), 0
    for index in range(OTHERS + zeros):
        live = size if index < OTHERS else 0.0
        means = ranks.step([normal(grain.shape, count * index + rank) * live for rank in range(count)])
        found = [*means, *(tensor for state in ranks.states for tensor in flatten(state).values())]
        assert all_finite(found), f"not finite {index - OTHERS + 1} steps after the gradients stopped"
        quiet = quiet + 1 if index > OTHERS and same_state(ranks.states, before) else 0
        if quiet > QUIET and not reducer.keyed:
            return
        before = snapshot(ranks.states)


def all_finite(tensors: list[Tensor]) -> bool:
    floats = [tensor.reshape(-1).float() for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.cat(floats).isfinite().all())


each_with_memory = pytest.mark.parametrize("reducer", WITH_MEMORY.values(), ids=WITH_MEMORY.keys())


@each_with_memory
@pytest.mark.draw(2)
def test_what_is_remembered_stays_finite(reducer: Reducer) -> None:
    check_stays_finite(reducer, 1.0, ZEROS)


@each_with_memory
@pytest.mark.usefixtures("flushing")
@pytest.mark.draw(5)
def test_what_is_remembered_stays_finite_where_subnormal_numbers_are_zero(reducer: Reducer) -> None:
    check_stays_finite(reducer, 1e-36, 40)


def test_methods_with_memory_are_found() -> None:
    assert {"powersgd:4", "acpsgd:2", "topk:0.1,residual=factored:2", "int4", "onebit"} <= WITH_MEMORY.keys()
    assert "none" not in WITH_MEMORY


@pytest.mark.parametrize("right", ["normalised", "orthonormal"])
@pytest.mark.draw(1)
def test_orthonormal_momentum_stays_finite(right: Literal["normalised", "orthonormal"]) -> None:
    """Its result has the length of a full step however short the momentum is."""
    check_stays_finite(OrthonormalMomentum(4, 0.8, right), 1e-36, ZEROS)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.draw(3)
def test_optimizers_stay_finite(name: str, one_rank: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    spec = METHODS[name].example
    optimizer = parse(spec).optimizer(torch.optim.SGD(model.parameters(), lr=0.25), model, **where_of(spec))
    try:
        for index in range(OTHERS + ZEROS):
            for i, parameter in enumerate(model.parameters()):
                parameter.grad = normal(parameter.shape, 10 * index + i) * (1e-20 if index < OTHERS else 0.0)
            optimizer.step()
        assert all_finite([parameter.detach() for parameter in model.parameters()])
    finally:
        optimizer.close()


@pytest.mark.parametrize("spec", ["powersgd:4", "acpsgd:2", "gradzip:2", "sketch:8"])
def test_a_small_gradient_is_a_gradient(spec: str) -> None:
    """Its squares are below what float32 has numbers for, and its means are those of a large one, bit for bit."""
    reducer, size = reducers()[spec], 2.0**-80
    grain = grain_for(reducer, NUMEL)
    usual, small = (Lockstep(reducer, grain, 2) for _ in range(2))
    for index in range(4):
        xs = [normal(grain.shape, 2 * index + rank) for rank in range(2)]
        for mean, tiny in zip(usual.step(xs), small.step([x * size for x in xs]), strict=True):
            assert torch.equal(mean * size, tiny)


# Mutants ----------------------------------------------------------------------------------------------------------


def of_any_length(vectors: Tensor) -> Tensor:
    """Orthonormal rows without a look at how long they are: 1 / length overflows."""
    for tolerance in reference.TOLERANCES:
        vectors = reference._orthonormal_round(vectors, tolerance)  # pyright: ignore[reportPrivateUsage]
    return vectors


@pytest.mark.parametrize(
    ("spec", "size"), [("powersgd:4", 1.0), ("powersgd:1", 1e-36), ("topk:0.1,residual=factored:2", 1e-36)]
)
def test_lengths_that_overflow_are_noticed(spec: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "orthonormalise", of_any_length)
    with pytest.raises(AssertionError, match="not finite"):
        check_stays_finite(WITH_MEMORY[spec], size, ZEROS)


def test_lengths_that_overflow_are_noticed_in_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "orthonormalise", of_any_length)
    with pytest.raises(AssertionError, match="not finite"):
        test_orthonormal_momentum_stays_finite("normalised")
