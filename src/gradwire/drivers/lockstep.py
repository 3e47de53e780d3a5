"""N virtual ranks in one process: no ports, no processes. For laws, tests and trying things out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.core import saved
from gradwire.core.axis import Axis
from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import CommunicationError
from gradwire.core.grain import Grain
from gradwire.core.messages import SendRecv
from gradwire.core.program import Program
from gradwire.core.state import State
from gradwire.drivers.engine import Engine
from gradwire.drivers.interpreter import Interpreter, Pending, Script, is_here, served
from gradwire.drivers.plan import Plan, Unit
from gradwire.reducers.as_saved import as_saved
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import Reduced

T = TypeVar("T")


def run_lockstep(programs: Sequence[Program[T]]) -> list[T]:
    """Run one program per rank to its end.

    Raises:
        AssertionError: ranks that yield different collectives, or end at different times.
    """
    return [result for (result,) in run_ranks([[[program]] for program in programs])]


def run_ranks(waves: Sequence[Sequence[Sequence[Program[T]]]]) -> list[list[T]]:
    """Run a step of several ranks: `waves[rank]` are the waves of a rank's programs. Return each rank's results.

    Raises:
        AssertionError: ranks that yield different collectives, or end at different times.
    """
    meeting = Meeting(len(waves))
    return together(
        [
            Interpreter[T](VirtualTransport(meeting, rank)).script(len(mine), mine.__getitem__)
            for rank, mine in enumerate(waves)
        ]
    )


def together(scripts: Sequence[Script[T]]) -> list[T]:
    """Drive the scripts of all ranks to their ends.

    Raises:
        AssertionError: ranks that ask for different things, or end at different times.
    """
    results: list[T] = []
    for result in outcomes(scripts, until_one_fails=True):
        if isinstance(result, Stuck):
            raise AssertionError(f"ranks ended at different times: {result}")
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


class Stuck(CommunicationError):  # noqa: N818 - what is stuck is the rank that waits
    """A virtual rank waits for ranks that will never come."""


def outcomes(scripts: Sequence[Script[T]], until_one_fails: bool = False) -> list[T | Exception]:
    """Drive the scripts of all ranks: each goes on until it waits for ranks that have not come so far yet.

    Returns:
        What each rank's script returned, or the exception that ended it. A rank that waits for others which have ended,
        or which wait for something else, gets `Stuck`, with those that are at fault.
    """
    waiting: dict[int, Pending | None] = dict.fromkeys(range(len(scripts)))
    results: dict[int, T | Exception] = {}
    while waiting:
        ready = [rank for rank, pending in waiting.items() if is_here(pending)]
        if not ready:
            absent = _absent(waiting)
            text = f"rank {', '.join(map(str, absent))} never came to where the others wait"
            results |= dict.fromkeys(waiting, Stuck(text, absent))
            break
        for rank in ready:
            try:
                while is_here(pending := waiting[rank]):
                    waiting[rank] = scripts[rank].send(None if pending is None else pending.wait())
                    assert waiting[rank] is not None, "a wave is not ready, and nobody is there to make it so"
            except StopIteration as end:
                results[rank] = end.value
                del waiting[rank]
            except Exception as error:
                results[rank] = error
                del waiting[rank]
                if until_one_fails:
                    return [error]
    return [results[rank] for rank in range(len(scripts))]


def _absent(waiting: Mapping[int, Pending | None]) -> tuple[int, ...]:
    """The ranks that the one which is least far waits for."""
    awaited = [pending for pending in map(_within, waiting.values()) if isinstance(pending, _Awaited)]
    if not awaited:
        return tuple(waiting)
    first = min(awaited, key=lambda each: each.number)
    return first.meeting.absent(first.number)


def _within(pending: Pending | None) -> Pending | None:
    """What is awaited, without what transports that wrap another one put around it."""
    while (inner := getattr(pending, "pending", None)) is not None:
        pending = inner
    return pending


class Meeting:
    """Where virtual ranks hand over what they send: the k-th request of each belongs to the k-th of all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._sent: list[int] = [0] * world_size
        self._requests: dict[int, dict[int, Collective]] = {}
        self._results: dict[int, dict[int, Tensor]] = {}

    def hand_over(self, rank: int, request: Collective) -> int:
        """Note what a rank asks for; return its number."""
        number = self._sent[rank]
        self._sent[rank] += 1
        requests = self._requests.setdefault(number, {})
        requests[rank] = request
        if len(requests) == self.world_size:
            del self._requests[number]
            done = self.perform([requests[rank] for rank in range(self.world_size)])
            self._results[number] = dict(enumerate(done))
        return number

    def perform(self, requests: Sequence[Collective]) -> list[Tensor]:
        """Do what every rank asks for, given all ranks' requests in rank order; sums run in rank order.

        On an axis each of its sub-groups does so for itself.
        """
        first = requests[0]
        alike = all(type(r) is type(first) and r.axis == first.axis for r in requests)
        assert alike, "ranks yielded different collectives"
        method: Any = served(self, first)
        axis, ranks = first.axis, range(len(requests))
        if axis is None:
            return method(requests)
        if isinstance(axis, Axis):
            whole = len(requests) % (axis.size * axis.stride) == 0
            assert whole, f"{axis} is no axis of a mesh of {len(requests)} ranks"
        groups = {members: method([requests[rank] for rank in members]) for members in map(axis.members, ranks)}
        return [groups[axis.members(rank)][axis.index(rank)] for rank in ranks]

    def all_reduce(self, requests: Sequence[AllReduce]) -> list[Tensor]:
        """The sum or maximum for each rank."""
        first, *others = requests
        total = first.tensor
        for request in others:
            total = total + request.tensor if first.op == "sum" else torch.maximum(total, request.tensor)
        return [total.clone() for _ in requests]

    def all_gather(self, requests: Sequence[AllGather]) -> list[Tensor]:
        """All rows for each rank."""
        rows = torch.stack([request.tensor for request in requests])
        return [rows.clone() for _ in requests]

    def all_to_all(self, requests: Sequence[AllToAll]) -> list[Tensor]:
        """Row j of each for rank j."""
        cube = torch.stack([request.tensor for request in requests])
        return [cube[:, rank].clone() for rank in range(len(requests))]

    def all_to_all_v(self, requests: Sequence[AllToAllV]) -> list[Tensor]:
        """Row j of each for rank j, end to end."""
        rows = [request.tensor.split(request.sends) for request in requests]
        for rank, request in enumerate(requests):
            sizes = tuple(each.sends[rank] for each in requests)
            assert request.place == rank, f"rank {rank} says that it is rank {request.place}"
            assert request.receives == sizes, f"rank {rank} expects rows of {request.receives} bytes, and gets {sizes}"
        return [torch.cat([of_rank[rank] for of_rank in rows]) for rank in range(len(requests))]

    def send_recv(self, requests: Sequence[SendRecv]) -> list[Tensor]:
        """Every message for the rank that expects it."""
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

    def is_here(self, number: int) -> bool:
        """Whether all ranks have handed over their requests of a number."""
        return number in self._results

    def absent(self, number: int) -> tuple[int, ...]:
        """The ranks that have not handed over a request of a number."""
        return tuple(rank for rank, sent in enumerate(self._sent) if sent <= number)

    def take(self, rank: int, number: int) -> Tensor:
        """A rank's result, which is forgotten."""
        results = self._results[number]
        result = results.pop(rank)
        if not results:
            del self._results[number]
        return result


@dataclass(frozen=True)
class _Awaited:
    """A rank's result of a number."""

    meeting: Meeting
    rank: int
    number: int

    def is_here(self) -> bool:
        return self.meeting.is_here(self.number)

    def wait(self) -> Tensor:
        return self.meeting.take(self.rank, self.number)


class VirtualTransport:
    """One virtual rank's way to the others, at a `Meeting` of all of them."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    @property
    def world_size(self) -> int:
        """How many ranks meet."""
        return self.meeting.world_size

    def issue(self, request: Collective) -> Pending:
        """Hand a request over."""
        return _Awaited(self.meeting, self.rank, self.meeting.hand_over(self.rank, request))


def perform(requests: Sequence[Collective]) -> list[Tensor]:
    """Do what every rank asks for, given all ranks' requests in rank order."""
    return Meeting(len(requests)).perform(requests)


class VirtualEngines:
    """The engines of `world_size` virtual ranks, a step at a time: what `attach` runs, where no transport is.

    Args:
        reducer: what they run.
        planned: its grains.
        world_size: how many there are.
        seed: of all keys.

    Attributes:
        engines: of each rank.
    """

    def __init__(self, reducer: Reducer, planned: Plan, world_size: int, seed: int = 0) -> None:
        reducer.require_ranks(world_size)
        self.reducer, self.world_size = reducer, world_size
        self._transports = [VirtualTransport(Meeting(world_size), rank) for rank in range(world_size)]
        self.engines = [Engine(planned, transport, seed) for transport in self._transports]

    @property
    def index(self) -> int:
        """The next step."""
        return self.engines[0].index

    @index.setter
    def index(self, index: int) -> None:
        for engine in self.engines:
            engine.index = index

    @property
    def seed(self) -> int:
        """Of all keys."""
        return self.engines[0].seed

    def weigh(self, weights: Sequence[float | None]) -> None:
        """Say what each rank counts for from the next step on, as `Session.weigh` does for one step of one rank."""
        for engine, weight in zip(self.engines, weights, strict=True):
            engine.weigh(weight)

    def run(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Do a step of all ranks, from each rank's gradient of each grain. They are left as they are.

        Raises:
            AssertionError: ranks that yield different collectives, or end at different times.
        """
        meeting = Meeting(self.world_size)  # at the one of before a step may have broken off
        for transport, engine, own in zip(self._transports, self.engines, gradients, strict=True):
            transport.meeting = meeting
            engine.begin()
            for unit, gradient in enumerate(own):
                engine.deliver(unit, 0, gradient.reshape(-1))
        together([engine.script() for engine in self.engines])
        for engine in self.engines:
            engine.finish()

    def state_dicts(self) -> list[saved.Saved]:
        """Return every rank's state as `Session.state_dict` does: tensors, numbers and strings, by parameter name."""
        return saved.pack_all(self._grains(), self.reducer, step=self.index, seed=self.seed)

    def load_state_dicts(self, states: Sequence[saved.Saved]) -> None:
        """Take up the states of all ranks; resuming is exact.

        Raises:
            StateError: states that are damaged or do not belong here; nothing is changed then.
        """
        made_of = as_saved(self.reducer, saved.reducer_of(states))
        loaded = saved.unpack_all(states, self._grains(), made_of(self.reducer))
        self.reducer = made_of(self.reducer)
        for engine, own in zip(self.engines, loaded, strict=True):
            engine.serve_by(made_of)
            engine.set_states(own.states)
            engine.index, engine.seed = own.step, own.seed

    def _grains(self) -> list[saved.Grains]:
        return [engine.states() for engine in self.engines]


class Lockstep(VirtualEngines):
    """A reducer over `world_size` virtual ranks and one grain, with its states, a step at a time.

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.spec import parse
    >>> ranks = Lockstep(parse("topk:0.5"), flat_grain(4), world_size=2)
    >>> mean, _ = ranks.step([torch.tensor([4.0, 0, 0, 1]), torch.tensor([0.0, 8, 0, 1])])
    >>> mean
    tensor([2., 4., 0., 1.])
    """

    def __init__(self, reducer: Reducer, grain: Grain, world_size: int, seed: int = 0) -> None:
        super().__init__(reducer, Plan(((Unit(grain, reducer),),)), world_size, seed)
        self.grain = grain

    @property
    def states(self) -> list[State]:
        """Every rank's state, after the last good step."""
        return [state for ((_, state),) in self._grains()]

    def step(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reduce one tensor per rank; return every rank's mean and keep the new states, unless the step is bad."""
        return [reduced.value for reduced in self.reduce(tensors)]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Reduced]:
        """Do a step and return all that the programs returned. The tensors given are left as they are.

        Means are new tensors of the grain's dtype, as a port would write them.
        """
        self.run([[tensor] for tensor in tensors])
        results = [engine.result(0) for engine in self.engines]
        return [result._replace(value=result.value.to(self.grain.dtype, copy=True)) for result in results]
