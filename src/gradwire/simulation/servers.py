"""Ranks that push to servers and do not meet: one event for each push."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from gradwire.core.link import Link
from gradwire.peers.clock import EventClock
from gradwire.simulation.draws import CHUNK


@dataclass(frozen=True)
class Servers:
    """What carries and takes up pushes.

    Attributes:
        push_bytes, pull_bytes: of one push, and of the parameters that answer it, over all servers.
        link: of each rank.
        server_link: of each server.
        servers: how many, of which each has an equal part.
        apply_s: what a server computes for a push, one after the other.
        coding_s: of a push, on the rank.
        bound: pushes that a rank may be ahead of the slowest one when it starts; None for no bound.
    """

    push_bytes: int
    pull_bytes: int
    link: Link
    server_link: Link
    servers: int = 1
    apply_s: float = 0.0
    coding_s: float = 0.0
    bound: int | None = None


@dataclass
class ServedTimeline:
    """What came of pushes; times are sums over all pushes, in seconds.

    Attributes:
        ended_s: when the last one was applied.
        cycle_s: of each push, from the moment its rank began to compute until the rank had the next parameters.
        computed_s, coded_s, held_s: computing, coding, and being held back by the bound.
        staleness: of each push: what others pushed between its pull and itself.
    """

    ended_s: float = 0.0
    cycle_s: list[float] = field(default_factory=list[float])
    computed_s: float = 0.0
    coded_s: float = 0.0
    held_s: float = 0.0
    staleness: list[int] = field(default_factory=list[int])


def computing_times(chunk: Callable[[int], Tensor], every: int) -> Callable[[int, int], float]:
    """Return a function of a rank and the number of its push that tells seconds of the `every` steps before it.

    Args:
        chunk: the times of `CHUNK` steps, by number: shape (ranks, CHUNK).
        every: steps between pushes.
    """
    known: dict[int, list[list[float]]] = {}

    def of_step(rank: int, step: int) -> float:
        number, place = divmod(step, CHUNK)
        if number not in known:
            known[number] = chunk(number).tolist()
        return known[number][rank][place]

    def of_push(rank: int, push: int) -> float:
        return sum(of_step(rank, step) for step in range(push * every, (push + 1) * every))

    return of_push


def train_with_servers(times: Callable[[int, int], float], ranks: int, served: Servers, pushes: int) -> ServedTimeline:
    """Let ranks compute, push, and go on with what they pull, until servers have applied so many pushes.

    Messages leave an end one after the other and enter one one after the other, as they come, as in
    `gradwire.drivers.timing`; a long one enters while it leaves. Servers take up pushes in the
    order in which these come.

    Args:
        times: seconds that a rank computes before a push, by rank and number.
        ranks: how many.
        served: by what.
        pushes: of all ranks together.

    >>> fast = Servers(0, 0, Link(0.5, 0.0), Link(0.5, 0.0))
    >>> found = train_with_servers(lambda rank, push: 1.0 + 8.0 * rank, 2, fast, pushes=5)
    >>> found.ended_s, found.staleness
    (9.5, [0, 0, 0, 0, 4])
    """
    clock, kept = EventClock[int](), ServedTimeline()
    states = [_RankState() for _ in range(ranks)]
    bound = _Bound(ranks, served.bound)
    push_s, pull_s = (
        served.server_link.beta_s_per_byte * b / served.servers for b in (served.push_bytes, served.pull_bytes)
    )
    entered_s = applied_s = out_free_s = 0.0

    def start(rank: int, at_s: float, version: int) -> None:
        state = states[rank]
        state.began_s, state.version = at_s, version
        state.computing_s = times(rank, state.pushed)
        leaves_s = at_s + state.computing_s + served.coding_s + served.link.beta_s_per_byte * served.push_bytes
        clock.plan(leaves_s + served.link.alpha_s, rank)

    for rank in range(ranks):
        start(rank, 0.0, 0)
    for version in range(pushes):
        rank = clock.next_event()
        entered_s = max(entered_s + push_s, clock.now_s)
        applied_s = max(entered_s, applied_s) + served.apply_s
        state = states[rank]
        state.pushed, state.applied_s = state.pushed + 1, applied_s
        kept.staleness.append(version - state.version)
        for freed in bound.completed(rank, state.pushed):
            left_s = max(applied_s, out_free_s)
            out_free_s = left_s + pull_s
            arrives_s = left_s + served.server_link.alpha_s
            received_s = max(arrives_s + pull_s, arrives_s + served.link.beta_s_per_byte * served.pull_bytes)
            other = states[freed]
            kept.held_s += applied_s - other.applied_s
            kept.computed_s += other.computing_s
            kept.coded_s += served.coding_s
            kept.cycle_s.append(received_s - other.began_s)
            start(freed, received_s, version + 1)
    kept.ended_s = applied_s
    return kept


@dataclass
class _RankState:
    """A rank: what it has pushed, and what it does now."""

    pushed: int = 0
    version: int = 0
    began_s: float = 0.0
    computing_s: float = 0.0
    applied_s: float = 0.0


class _Bound:
    """Who may start: `gradwire.asynchronous.clocks.Clocks`, in a time that does not grow with the ranks."""

    def __init__(self, ranks: int, bound: int | None) -> None:
        self._bound = bound
        self._at = Counter({0: ranks})
        self._slowest = 0
        self._held = defaultdict[int, list[int]](list)

    def completed(self, rank: int, pushed: int) -> Iterator[int]:
        """Yield the ranks that may start now that one has pushed."""
        if self._bound is None:
            yield rank
            return
        self._at[pushed] += 1
        self._at[pushed - 1] -= 1
        self._held[pushed].append(rank)
        before = self._slowest
        while not self._at[self._slowest]:
            del self._at[self._slowest]
            self._slowest += 1
        for clock in {*range(before, self._slowest + self._bound + 1), pushed}:
            if clock - self._slowest <= self._bound:
                yield from self._held.pop(clock, ())
