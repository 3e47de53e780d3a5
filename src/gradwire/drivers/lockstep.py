"""N virtual ranks in one process: no ports, no processes. For laws, tests and trying things out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.core import saved
from gradwire.core.collective import Agree, AllGather, AllReduce, AllToAll, Collective, SendRecv, Total
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.drivers.coalesce import Sum, add_grains, sum_of
from gradwire.reducers.base import Program, Reduced, Reducer, Step, advance


def run_lockstep(programs: Sequence[Program]) -> list[Reduced]:
    """Run one program per rank to its end, all ranks a collective at a time.

    Raises:
        AssertionError: ranks that yield different collectives, or end at different times.
    """
    return run_step([programs])[0]


def run_step(grains: Sequence[Sequence[Program]]) -> list[list[Reduced]]:
    """Run a step of several grains: `grains[g][rank]` is the program of a grain on a rank.

    Raises:
        AssertionError: ranks that yield different collectives, or end at different times.
    """
    turns: dict[int, list[Turn]] = {}
    inboxes: dict[int, Inbox] = {i: [None] * len(programs) for i, programs in enumerate(grains)}
    while inboxes:
        for i, inbox in inboxes.items():
            turns[i] = _until_total(grains[i], inbox)
        waiting = [i for i in range(len(grains)) if isinstance(turns[i][0], Total)]
        inboxes = dict(zip(waiting, _totals([turns[i] for i in waiting]), strict=True))
    return [[turn for turn in turns[i] if isinstance(turn, Reduced)] for i in range(len(grains))]


Inbox = list[Tensor | None]
Turn = Collective | Reduced


def _until_total(programs: Sequence[Program], inbox: Inbox) -> list[Turn]:
    """Run one grain's programs to their end or to the next `Total`."""
    while True:
        turns = [advance(program, value) for program, value in zip(programs, inbox, strict=True)]
        done = [turn for turn in turns if isinstance(turn, Reduced)]
        assert len(done) in (0, len(programs)), "ranks ended at different times"
        if done or any(isinstance(turn, Total) for turn in turns):
            return turns
        inbox = list(perform([turn for turn in turns if not isinstance(turn, Reduced)]))


def _totals(grains: Sequence[Sequence[Turn]]) -> list[Inbox]:
    """Answer the totals that every rank of every grain asks for."""
    by_rank = [[turn for turn in ranks if isinstance(turn, Total)] for ranks in zip(*grains, strict=True)]
    mine = [add_grains(totals) for totals in by_rank]
    assert all(sums.keys() == mine[0].keys() for sums in mine), "ranks asked for different totals"
    return [[_total(mine, rank, sum_of(totals[i])) for rank, totals in enumerate(by_rank)] for i in range(len(grains))]


def _total(by_rank: Sequence[Mapping[Sum, Tensor]], rank: int, name: Sum) -> Tensor:
    if name[0] == "grains":
        return by_rank[rank][name].clone()
    first, *others = (sums[name] for sums in by_rank)
    for other in others:
        first = first + other
    return first.clone()


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
        reducer.require_ranks(world_size)
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

    def state_dicts(self) -> list[saved.Saved]:
        """Return every rank's state as `Handle.state_dict` does: tensors, numbers and strings, by parameter name."""
        return saved.pack_all(self._grains(), self.reducer, step=self.index, seed=self.seed)

    def load_state_dicts(self, states: Sequence[saved.Saved]) -> None:
        """Take up the states of all ranks; resuming is exact.

        Raises:
            StateError: states that are damaged or do not belong here; nothing is changed then.
        """
        loaded = saved.unpack_all(states, self._grains(), self.reducer)
        self.index, self.seed = loaded[0].step, loaded[0].seed
        self.states = [state for rank in loaded for state in rank.states]

    def _grains(self) -> list[saved.Grains]:
        return [[(self.grain, state)] for state in self.states]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
