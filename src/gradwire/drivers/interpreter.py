"""The one place that advances programs. It knows no transport: process groups, virtual ranks and tensors without data
are served alike.

An `Interpreter` runs one rank's waves of programs as a *script*: a generator that yields what it waits for and is sent
the result. So whoever drives it may wait (`run`), let other ranks go on meanwhile (`lockstep.together`), or come back
when more gradients are here. Collectives start in one static order, which comes from the programs alone, never from
timing, so ranks cannot disagree on it. Of `window` waves in flight one is encoded while the others' bytes move:

    start 0, start 1, start 2, advance 0, advance 1, ... where a wave ends, the next starts

All of a step's `Total`s travel as one collective once every program has come to its own, and so do its `Agree`s. What
programs ask `Once` is sent where the first of them asks for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from gradwire.core.agreement import Agree, Once, Total
from gradwire.core.collective import Collective
from gradwire.core.errors import CommunicationError
from gradwire.core.program import Ended, Program, advance, once

T = TypeVar("T")

WINDOW = 3


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Return the result: wait for it on a CPU, order the stream behind it on a GPU."""
        ...


def is_here(pending: Pending | None) -> bool:
    """Whether a result can be had without waiting for ranks that share this thread: only virtual ones do."""
    asked: Callable[[], bool] | None = getattr(pending, "is_here", None)
    return asked is None or asked()


class Answer(NamedTuple):
    """A result that is here already, as one that is under way."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result, which is there already."""
        return self.result


class _Kept:
    """A collective under way whose result several programs are sent."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self._result: Tensor | None = None

    def is_here(self) -> bool:
        return self._result is not None or is_here(self.pending)

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self.pending.wait()
        return self._result


class Transport(Protocol):
    """What moves tensors between ranks."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def issue(self, request: Collective) -> Pending:
        """Start a collective, which may overwrite what it carries. `served` finds the method for a kind."""
        ...


class WrappedTransport:
    """What transports have in common that wrap another one: its rank and its number of ranks.

    Args:
        inner: what moves tensors.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        """What the inner transport says."""
        return self.inner.rank

    @property
    def world_size(self) -> int:
        """What the inner transport says."""
        return self.inner.world_size


def served(transport: object, request: Collective) -> Callable[..., object]:
    """Return the transport's method for a kind of collective.

    Raises:
        CommunicationError: it has none.
    """
    method = getattr(transport, request.verb, None)
    if method is None:
        kind, name = type(request).__name__, type(transport).__name__
        raise CommunicationError(f"{name} does not serve {kind}: it needs a method {request.verb}(request)", ())
    return method


def sent_bytes(request: Collective, rank: int, world_size: int) -> int:
    """Bytes a rank sends for a collective."""
    return request.wire_bytes(request.axis.size_of(rank) if request.axis else world_size)


@dataclass
class Traffic:
    """What an interpreter has done; times in seconds, sizes in bytes on this rank.

    Attributes:
        payload_bytes: handed to collectives, counted once each.
        wire_bytes: sent, as payloads and the algorithm of each collective predict.
        encode_s: CPU time in programs (encoding, decoding, summing).
        wait_s: waiting for collectives.
    """

    payload_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0


Script = Generator[Pending | None, Tensor | None, T]
"""Yields what it waits for, and is sent the result; yields None where it cannot start its next wave yet."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Requests that travel as one: `members` are positions of programs in their wave."""

    members: tuple[int, ...]
    requests: tuple[Collective, ...]
    joined: Collective

    def split(self, result: Tensor) -> list[Tensor]:
        """Cut the result into what each program is sent."""
        if len(self.requests) == 1:
            return [self.requests[0].received(result)]
        parts = type(self.requests[0]).parts(self.requests, result)
        return [request.received(part) for request, part in zip(self.requests, parts, strict=True)]


def coalesced(requests: Sequence[tuple[int, Collective]]) -> list[_Batch]:
    """Group the requests of one round, each given with its position, by kind, in the order of first appearance.

    All ranks run the same programs, which yield the same kinds in the same order with the same sizes; so the groups are
    the same on every rank.
    """
    groups: dict[object, list[tuple[int, Collective]]] = {}
    for position, request in requests:
        groups.setdefault(request.kind, []).append((position, request))
    return [_batch(group) for group in groups.values()]


def _batch(group: Sequence[tuple[int, Collective]]) -> _Batch:
    members, requests = zip(*group, strict=True)
    return _Batch(members, requests, type(requests[0]).joined(requests))


@dataclass(eq=False)
class _Run(Generic[T]):
    """The programs of one wave. `parked` are those that wait for the rest of the step."""

    first: int
    programs: Sequence[Program[T]]
    parked: dict[int, Agree | Total] = field(default_factory=dict[int, "Agree | Total"])
    pending: list[tuple[_Batch, Pending]] = field(default_factory=list[tuple[_Batch, Pending]])


_Parked = TypeVar("_Parked", Agree, Total)
_Inbox = dict[int, Tensor | None]


class Interpreter(Generic[T]):
    """Runs the programs of one rank.

    Args:
        transport: issues collectives.
        traffic: is told what was sent and how long coding took.
        window: how many waves may be in flight.

    Attributes:
        coded: is told the CPU seconds of each piece of coding, before what it made is sent; returns what counts.
        asked: is told each request of a program, with the program's place in the script; not what is of a whole step.
    """

    def __init__(self, transport: Transport, traffic: Traffic | None = None, window: int = WINDOW) -> None:
        self.coded: Callable[[float], float] = float
        self.asked: Callable[[int, Collective], None] | None = None
        self.transport = transport
        self.traffic = traffic or Traffic()
        self._window = window
        self._runs: list[_Run[T]] = []
        self._in_flight: deque[_Run[T]] = deque()
        self._results: dict[int, T] = {}
        self._ended: Callable[[int, T], T] = _as_it_is
        self._asked_once: dict[Hashable, _Kept] = {}

    def begin_step(self) -> None:
        """Ask anew what programs ask `Once` a step, which may have several scripts."""
        self._asked_once = {}

    def script(
        self,
        waves: int,
        start: Callable[[int], Sequence[Program[T]] | None],
        ended: Callable[[int, T], T] | None = None,
    ) -> Script[list[T]]:
        """Return the script of a step, which returns what its programs returned, in their order.

        Args:
            waves: how many.
            start: makes the programs of a wave; None says that it cannot yet, and is asked again later.
            ended: is given each program's place and result as soon as it ends; what it returns is kept as the result.
        """
        self._runs, self._results, self._ended = [], {}, ended or _as_it_is
        self._in_flight.clear()
        started = programs = 0
        while started < waves or self._in_flight:
            if started < waves and len(self._in_flight) < self._window:
                while (wave := start(started)) is None:
                    yield None
                self._begin(_Run(programs, wave))
                started, programs = started + 1, programs + len(wave)
            else:
                yield from self._go_on()
        while any(run.parked for run in self._runs):
            if totals := self._waiting_for(Total):
                yield from self._add_up(totals)
            else:
                yield from self._agree(self._waiting_for(Agree))
            while self._in_flight:
                yield from self._go_on()
        results, self._runs, self._results = self._results, [], {}
        self._ended = _as_it_is  # a closure of an engine, which would live on in a circle with this interpreter
        return [results[i] for i in range(programs)]

    def _begin(self, run: _Run[T]) -> None:
        self._runs.append(run)
        self._advance(run, dict.fromkeys(range(len(run.programs))))

    def _go_on(self) -> Script[None]:
        """Wait for what the oldest wave in flight asked for, and advance it."""
        run = self._in_flight.popleft()
        inbox: _Inbox = {}
        for batch, pending in run.pending:
            inbox.update(zip(batch.members, batch.split((yield from _result(pending))), strict=True))
        self._advance(run, dict(sorted(inbox.items())))

    def _advance(self, run: _Run[T], inbox: _Inbox) -> None:
        """Send each program its result, and start what they ask for next."""
        began = time.thread_time()
        requests: list[tuple[int, Collective]] = []
        for i, value in inbox.items():
            turn = advance(run.programs[i], value)
            if self.asked is not None and not isinstance(turn, Ended | Total | Once):
                self.asked(run.first + i, turn)
            if isinstance(turn, Ended):
                self._results[run.first + i] = self._ended(run.first + i, turn.value)
            elif isinstance(turn, Agree | Total):
                run.parked[i] = turn
            else:
                requests.append((i, turn))
        batches = coalesced(requests)
        self.traffic.encode_s += self.coded(time.thread_time() - began)
        run.pending = [(batch, self._issued(batch)) for batch in batches]
        if run.pending:
            self._in_flight.append(run)

    def _issued(self, batch: _Batch) -> Pending:
        """Start what a batch asks for; what a step asks once is under way, or here, after the first time."""
        first = batch.requests[0]
        if not isinstance(first, Once):
            return self._started(batch)
        if first.of not in self._asked_once:
            self._asked_once[first.of] = _Kept(self._started(batch))
        return self._asked_once[first.of]

    def _started(self, batch: _Batch) -> Pending:
        self.traffic.payload_bytes += batch.joined.nbytes
        self.traffic.wire_bytes += sent_bytes(batch.joined, self.transport.rank, self.transport.world_size)
        return self.transport.issue(batch.joined)

    def _waiting_for(self, kind: type[_Parked]) -> list[tuple[_Run[T], int, _Parked]]:
        """Parked programs that ask for `kind`, in planned order."""
        return [(run, i, ask) for run in self._runs for i, ask in run.parked.items() if isinstance(ask, kind)]

    def _add_up(self, waiting: list[tuple[_Run[T], int, Total]]) -> Script[None]:
        """One collective for the totals of every program that waits for one."""
        by_kind: dict[object, list[Total]] = {}
        for _, _, total in waiting:
            by_kind.setdefault(total.kind, []).append(total)
        mine = [Total.added(totals) for totals in by_kind.values()]
        sums = {total.kind: total.tensor for total in mine}
        over_ranks = [(i, total.gathered()) for i, total in enumerate(mine) if total.over == "ranks"]
        for i, rows in (yield from self._together(over_ranks)):
            sums[mine[i].kind] = mine[i].received(rows)
        self._answer([(run, i, sums[total.kind]) for run, i, total in waiting])

    def _agree(self, waiting: list[tuple[_Run[T], int, Agree]]) -> Script[None]:
        """One collective for the flags of every parked program."""
        flags = yield from self._together([(position, flag) for position, (_, _, flag) in enumerate(waiting)])
        self._answer([(*waiting[position][:2], flag) for position, flag in flags])

    def _together(self, requests: Sequence[tuple[int, Collective]]) -> Script[list[tuple[int, Tensor]]]:
        """Do a round of collectives and wait for it; return each result with the request's position."""
        found: list[tuple[int, Tensor]] = []
        for batch in coalesced(requests):
            found += zip(batch.members, batch.split((yield from _result(self._issued(batch)))), strict=True)
        return found

    def _answer(self, answers: Sequence[tuple[_Run[T], int, Tensor]]) -> None:
        """Send parked programs what they wait for, those of a run together."""
        inboxes: dict[int, tuple[_Run[T], _Inbox]] = {}
        for run, i, value in answers:
            del run.parked[i]
            inboxes.setdefault(run.first, (run, {}))[1][i] = value
        for run, inbox in inboxes.values():
            self._advance(run, inbox)


def _as_it_is(position: int, result: T) -> T:
    return result


def _result(pending: Pending) -> Script[Tensor]:
    """Have `pending` waited for."""
    result = yield pending
    assert result is not None, "a script was not sent the result that it waits for"
    return result


class Begun(Generic[T]):
    """A script that has been driven to its first wait, so that what it asked for is under way meanwhile.

    Args:
        script: to be driven.
        waited: told the seconds of each wait.
    """

    def __init__(self, script: Script[T], waited: Callable[[float], None] = lambda _: None) -> None:
        self._script, self._waited = script, waited
        self._pending: Pending | None = None
        self._ended: Ended[T] | None = None
        self._go_on(None)

    def end(self) -> T:
        """Drive the script to its end, waiting where it waits, and return its result."""
        while self._ended is None:
            assert self._pending is not None, "a wave is not ready, and nobody is there to make it so"
            began = time.perf_counter()
            answer = self._pending.wait()
            self._waited(time.perf_counter() - began)
            self._go_on(answer)
        return self._ended.value

    def _go_on(self, answer: Tensor | None) -> None:
        try:
            self._pending = self._script.send(answer)
        except StopIteration as end:
            self._pending, self._ended = None, Ended(end.value)


def run(script: Script[T], waited: Callable[[float], None] = lambda _: None) -> T:
    """Drive a script to its end, waiting where it waits: what a rank alone in its process does.

    Args:
        script: to be driven.
        waited: told the seconds of each wait.
    """
    return Begun(script, waited).end()


def script_of(program: Program[T], transport: Transport) -> Script[T]:
    """The script of one program by itself."""
    (result,) = yield from Interpreter[T](transport).script(1, lambda _: [program])
    return result


def run_program(program: Program[T], transport: Transport) -> T:
    """Run one program by itself to its end: what tests, benchmarks and one-off reductions want.

    The step is of this program alone, so what it asks of the whole step (`Total`, `Agree`) is about its own grain.
    """
    return run(script_of(program, transport))


def ask(request: Collective, transport: Transport) -> Tensor:
    """Return the result of one collective, waited for."""
    return run_program(once(request), transport)
