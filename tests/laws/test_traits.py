"""What a reducer says of itself where it is made of others: they are asked in one place, `Reducer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
from torch import Tensor
from typing_extensions import override

from gradwire.codecs import Identity
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers import AllReduceExchange, Guard, Partition, Program, Reducer, Step, Wrapper
from gradwire.reducers.base import weakest

from .subjects import grain_for, reducers

REDUCERS = reducers()
FOLDS: dict[str, Callable[[Iterable[Any]], object]] = {
    "averages": all,
    "carries_momentum": any,
    "conserves_sum": all,
    "ends_alike": all,
    "fewest_ranks": max,
    "keeps_input": any,
    "keyed": any,
    "linear": all,
    "lossless": all,
    "payload_share": max,
    "private": any,
    "rank_multiple": max,  # of nothing and one thing
    "repeatable": all,
    "scatters": any,
    "scope": max,  # "tensor" comes after "flat"
    "shows_non_finite": all,
    "sums_in_16_bits": any,
    "weighs": any,
}


@dataclass(frozen=True)
class Silent(Wrapper):
    """A wrapper that declares nothing."""

    inner: Reducer

    def around(self, inner: Reducer) -> Reducer:
        return Silent(inner)

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return self.inner.reduce(grain, x, state, step)


def traits(reducer: Reducer) -> dict[str, object]:
    return {name: getattr(reducer, name) for name in FOLDS}


@pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)
def test_a_wrapper_that_declares_nothing_says_what_the_inner_reducer_says(reducer: Reducer) -> None:
    grain = grain_for(reducer, 600)
    assert traits(Silent(reducer)) == traits(reducer)
    assert Silent(reducer).contraction(grain) == reducer.contraction(grain)
    assert traits(Guard(reducer)) == traits(reducer)


@pytest.mark.parametrize("name", FOLDS)
def test_a_policy_says_what_holds_for_all_it_is_made_of(name: str) -> None:
    plain, said = AllReduceExchange(Identity()), attrgetter(name)
    for reducer in REDUCERS.values():
        policy = Partition((("*bias", reducer),), plain)
        assert policy.children() == (reducer, plain)
        assert said(policy) == FOLDS[name]([said(reducer), said(plain)])
    # No method that is whole says another thing than the plain one, and of weights only an option says so.
    said_elsewhere = {"ends_alike", "scatters", "weighs"}
    assert name in said_elsewhere or any(said(reducer) != said(plain) for reducer in REDUCERS.values())


def test_the_weakest_of_several_bounds_holds_for_all() -> None:
    grain = grain_for(REDUCERS["topk:0.01"], 1000)
    strong, weak = REDUCERS["int8"], REDUCERS["topk:0.01"]
    policy = Partition((("*bias", strong),), weak)
    assert policy.contraction(grain) == weakest([strong.contraction(grain), weak.contraction(grain)])
    assert policy.contraction(grain) == pytest.approx(0.01)
