"""What lies in the memory of a mean that was taken is nobody's: the next mean may be written over it.

Engines with a sink give such memory to the next grain. Here it is filled with NaN first, and means and states are the
same bits as without a sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.core.spare import Spare
from gradwire.core.state import flatten
from gradwire.drivers import engine
from gradwire.drivers.lockstep import Lockstep, Meeting, together
from gradwire.reducers import Reducer

from .subjects import grain_for, normal, ranks_for, reducers

NUMEL, STEPS = 600, 4


class PoisonedSpare(Spare):
    """Overwrites what it is given."""

    def give(self, memory: Tensor) -> None:
        memory.fill_(float("nan"))
        super().give(memory)


def step_with_sinks(ranks: Lockstep, tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `Lockstep.step`, but each mean is copied as soon as it is known."""
    meeting, taken = Meeting(ranks.world_size), dict[int, Tensor]()
    for rank, (own, tensor) in enumerate(zip(ranks.engines, tensors, strict=True)):
        transport: Any = own.transport
        transport.meeting = meeting
        own.begin(lambda _, mean, rank=rank: taken.update({rank: mean.clone()}))
        own.deliver(0, 0, tensor.reshape(-1))
    together([own.script() for own in ranks.engines])
    for own in ranks.engines:
        own.finish()
        own.release()
    return [taken[rank] for rank in range(ranks.world_size)]


REPEATABLE = {spec: reducer for spec, reducer in reducers().items() if reducer.repeatable}


@pytest.mark.parametrize("reducer", REPEATABLE.values(), ids=REPEATABLE)
def test_memory_of_means_is_free_once_they_are_taken(reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    grain, count = grain_for(reducer, NUMEL), ranks_for(reducer, 2)
    plain = Lockstep(reducer, grain, count)
    monkeypatch.setattr(engine, "Spare", PoisonedSpare)
    reused = Lockstep(reducer, grain, count)
    for index in range(STEPS):
        tensors = [normal(grain.shape, count * index + rank) for rank in range(count)]
        for mean, other in zip(plain.step(tensors), step_with_sinks(reused, tensors), strict=True):
            assert torch.equal(mean.reshape(-1), other)
    for state, other in zip(plain.states, reused.states, strict=True):
        found = flatten(other)
        for name, tensor in flatten(state).items():
            assert torch.equal(tensor, found[name]), name


def test_a_mean_lies_where_the_one_before_it_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = reducers()["int4"]
    ranks, places = Lockstep(reducer, grain_for(reducer, NUMEL), 2), list[int]()
    empty = Spare.empty

    def noted(self: Spare, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = empty(self, numel, dtype, device)
        places.append(found.data_ptr())
        return found

    monkeypatch.setattr(Spare, "empty", noted)
    for index in range(3):
        step_with_sinks(ranks, [normal((NUMEL,), 2 * index + rank) for rank in range(2)])
    assert len(set(places)) == 2  # one for each rank
