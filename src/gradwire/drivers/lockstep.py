"""N virtual ranks in one process: no ports, no processes. For laws, tests and trying things out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.core.collective import Agree, AllGather, AllReduce, AllToAll, Collective, SendRecv
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Program, Reduced, Reducer, Step, advance


def run_lockstep(programs: Sequence[Program]) -> list[Reduced]:
    """Run one program per rank to its end, all ranks a collective at a time.

    Raises:
        AssertionError: ranks that yield different collectives, or end at different times.
    """
    inbox: list[Tensor | None] = [None] * len(programs)
    while True:
        turns = [advance(program, value) for program, value in zip(programs, inbox, strict=True)]
        done = [turn for turn in turns if isinstance(turn, Reduced)]
        if done:
            assert len(done) == len(programs), "ranks ended at different times"
            return done
        inbox = list(perform([turn for turn in turns if not isinstance(turn, Reduced)]))


def perform(requests: Sequence[Collective]) -> list[Tensor]:
    """Do what every rank asks for, given all ranks' requests in rank order; sums run in rank order.

    On an axis each of its sub-groups does so for itself.
    """
    first = requests[0]
    assert all(type(r) is type(first) and r.axis == first.axis for r in requests), "ranks yielded different collectives"
    axis, ranks = first.axis, range(len(requests))
    if axis is None:
        return _perform(requests)
    assert len(requests) % (axis.size * axis.stride) == 0, f"{axis} is no axis of a mesh of {len(requests)} ranks"
    groups = {members: _perform([requests[rank] for rank in members]) for members in map(axis.members, ranks)}
    return [groups[axis.members(rank)][axis.index(rank)] for rank in ranks]


def _perform(requests: Sequence[Collective]) -> list[Tensor]:
    """Do what the ranks of one group ask for."""
    first = requests[0]
    if isinstance(first, SendRecv):
        return _deliver([r for r in requests if isinstance(r, SendRecv)])
    if isinstance(first, AllReduce):
        stack = [r.tensor for r in requests if isinstance(r, AllReduce)]
        total = stack[0].clone()
        for tensor in stack[1:]:
            total = total + tensor if first.op == "sum" else torch.maximum(total, tensor)
        return [total.clone() for _ in requests]
    if isinstance(first, AllGather):
        rows = torch.stack([r.tensor for r in requests if isinstance(r, AllGather)])
        return [rows.clone() for _ in requests]
    if isinstance(first, AllToAll):
        cube = torch.stack([r.tensor for r in requests if isinstance(r, AllToAll)])
        return [cube[:, rank].clone() for rank in range(len(requests))]
    flags = torch.stack([r.flag.view(()) for r in requests if isinstance(r, Agree)])
    return [flags.any() for _ in requests]


def _deliver(requests: Sequence[SendRecv]) -> list[Tensor]:
    """Bring every message of a round to its rank."""
    letters: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    for rank, request in enumerate(requests):
        for to, tensor in request.sends:
            letters[rank, to].append(tensor)
    results: list[Tensor] = []
    for rank, request in enumerate(requests):
        found = [request.like.new_empty(0)]
        for source, numel in request.receives:
            assert letters[source, rank], f"rank {rank} waits for a message that rank {source} did not send"
            found.append(letters[source, rank].popleft())
            assert found[-1].shape == (numel,), f"rank {rank} expected {numel} elements of rank {source}"
        results.append(torch.cat(found))
    assert not any(letters.values()), "a message was sent that nobody received"
    return results


class Lockstep:
    """A reducer over `world_size` virtual ranks and one grain, with its states, a step at a time.

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.spec import parse
    >>> ranks = Lockstep(parse("topk:0.5"), flat_grain(4), world_size=2)
    >>> mean, _ = ranks.step([torch.tensor([4.0, 0, 0, 1]), torch.tensor([0.0, 8, 0, 1])])
    >>> mean
    tensor([2., 4., 0., 1.])
    """

    def __init__(self, reducer: Reducer, grain: Grain, world_size: int, seed: int = 0) -> None:
        self.reducer = reducer
        self.grain = grain
        self.world_size = world_size
        self.seed = seed
        self.index = 0
        self.states: list[State] = [reducer.init(grain, self._step(rank)) for rank in range(world_size)]

    def _step(self, rank: int) -> Step:
        return Step(self.index, rank, self.world_size, self.seed)

    def step(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reduce one tensor per rank; return every rank's mean and keep the new states, unless the step is bad."""
        return [reduced.mean for reduced in self.reduce(tensors)]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Reduced]:
        """Do a step and return all that the programs returned. The tensors given are left as they are."""
        programs = [
            self.reducer.reduce(self.grain, _copy(tensor), state, self._step(rank))
            for rank, (tensor, state) in enumerate(zip(tensors, self.states, strict=True))
        ]
        results = run_lockstep(programs)
        self.index += 1
        if not any(bool(r.bad) for r in results if r.bad is not None):
            self.states = [r.state for r in results]
        return results


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
