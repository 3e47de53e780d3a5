"""N virtual ranks in one process: no ports, no processes. For laws, tests and trying things out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.core import saved
from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import CommunicationError
from gradwire.core.grain import Grain
from gradwire.core.messages import SendRecv
from gradwire.core.program import Program
from gradwire.core.state import State
from gradwire.drivers.interpreter import Interpreter, Pending, Script, is_here, served
from gradwire.reducers.as_saved import as_saved
from gradwire.reducers.base import Reduced, Reducer, Step

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
        assert len(requests) % (axis.size * axis.stride) == 0, f"{axis} is no axis of a mesh of {len(requests)} ranks"
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


class VirtualStates(ABC):
    """What virtual ranks remember between steps: saved and loaded for all ranks at once.

    Attributes:
        reducer: what they run.
        world_size: how many there are.
        seed: of all keys.
        index: the next step.
    """

    reducer: Reducer
    world_size: int
    seed: int
    index: int

    @abstractmethod
    def _grains(self) -> list[saved.Grains]:
        """Every rank's grains with their states."""

    def _serve_by(self, made_of: Callable[[Reducer], Reducer]) -> None:
        """Go on with what `made_of` makes of reducers, whose states have the same form."""
        self.reducer = made_of(self.reducer)

    @abstractmethod
    def _take_up(self, states: Sequence[Sequence[State]]) -> None:
        """Go on with other states: of each rank those of its grains."""

    def _step(self, rank: int) -> Step:
        return Step(self.index, rank, self.world_size, self.seed)

    def state_dicts(self) -> list[saved.Saved]:
        """Return every rank's state as `Handle.state_dict` does: tensors, numbers and strings, by parameter name."""
        return saved.pack_all(self._grains(), self.reducer, step=self.index, seed=self.seed)

    def load_state_dicts(self, states: Sequence[saved.Saved]) -> None:
        """Take up the states of all ranks; resuming is exact.

        Raises:
            StateError: states that are damaged or do not belong here; nothing is changed then.
        """
        made_of = as_saved(self.reducer, saved.reducer_of(states))
        loaded = saved.unpack_all(states, self._grains(), made_of(self.reducer))
        self._serve_by(made_of)
        self.index, self.seed = loaded[0].step, loaded[0].seed
        self._take_up([rank.states for rank in loaded])


def is_bad(results: Iterable[Reduced]) -> bool:
    """Whether a step must not be kept."""
    return any(bool(result.bad) for result in results if result.bad is not None)


class Lockstep(VirtualStates):
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

    def step(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reduce one tensor per rank; return every rank's mean and keep the new states, unless the step is bad."""
        return [reduced.value for reduced in self.reduce(tensors)]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Reduced]:
        """Do a step and return all that the programs returned. The tensors given are left as they are."""
        programs = [
            self.reducer.reduce(self.grain, _copy(tensor), state, self._step(rank))
            for rank, (tensor, state) in enumerate(zip(tensors, self.states, strict=True))
        ]
        results = run_lockstep(programs)
        self.index += 1
        if not is_bad(results):
            self.states = [r.state for r in results]
        return results

    def _take_up(self, states: Sequence[Sequence[State]]) -> None:
        self.states = [state for rank in states for state in rank]

    def _grains(self) -> list[saved.Grains]:
        return [[(self.grain, state)] for state in self.states]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
