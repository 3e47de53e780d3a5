"""Random schedules of workers and several servers: all of them die and come back, and messages are late or get lost.

A watch looks at every push: each counts once at each server, none that counted is missing from the parameters, nobody
computes beyond the bound of any worker that lives, and once nothing fails any more, nobody waits for ever.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from gradwire.asynchronous import ASGD, Barriers, Bounded, Grant, Result
from gradwire.asynchronous.clocks import Phase
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import Journal, PartedWorker, PartServer
from gradwire.asynchronous.several.journal import history
from gradwire.asynchronous.several.messages import Join, PushRequest, ServerReply, WorkerRequest
from gradwire.peers.protocol import Reply

FAILURES_S = 15.0
"""Whatever goes wrong does so within these seconds."""
LOOK_S = 1.0


class Broken(AssertionError):  # noqa: N818 - what is broken is a promise
    """A promise that a schedule broke."""


def never(worker: int) -> Any:
    raise NotImplementedError


class MemoryDesk(PartServer):
    """Keeps snapshots in memory, which outlives its lives as a folder does."""

    def __init__(self, job: Job, part: int, servers: int, kept: dict[str, Any]) -> None:
        self.kept = kept
        super().__init__(job, part, servers, clock=lambda: 0.0)
        self.journal = kept.setdefault("journal", Journal())

    def _restore(self, was_restarted: bool) -> None:
        if "state" in self.kept:
            self.server.load_state_dict(self.kept["state"])
            self.server.begin_life()
        self._save()

    def _save(self) -> None:
        self.kept["state"] = self.server.state_dict()


class Own(MemoryDesk):
    """Has clocks of its own, whatever workers say."""

    def _join(self, request: Join, reply: Reply) -> None:
        super()._join(replace(request, clock=self.server.clocks.completed[request.worker]), reply)


class Trusting(MemoryDesk):
    """Takes what comes for new, and what was computed from other parameters for good."""

    def _is_newest(self, request: WorkerRequest) -> bool:
        if isinstance(request, PushRequest):
            granted = self.server._granted  # pyright: ignore[reportPrivateUsage]
            granted[request.worker] = request.push.grant
            self.server.pushes[request.worker] = request.number
        return True


class Blind(PartedWorker):
    """Never looks whether a server whose grant it holds is still the same."""

    def poll(self) -> list[WorkerRequest]:
        return []


@dataclass
class Process:
    """A process of a worker."""

    worker: PartedWorker
    heard_s: float = 0.0
    is_up: bool = True


class Open(NamedTuple):
    """A request that a server has not replied to."""

    place: Process
    request: WorkerRequest


@dataclass
class Host:
    """A server, what it keeps, and the requests that it has not replied to."""

    part_server: MemoryDesk
    kept: dict[str, Any]
    is_up: bool = True
    open: dict[tuple[int, int], Open] = field(default_factory=dict[tuple[int, int], Open])


class Schedule:
    """Runs one schedule in simulated time, drawn from a seed."""

    def __init__(
        self, seed: int, part_server: type[MemoryDesk] = MemoryDesk, worker: type[PartedWorker] = PartedWorker
    ) -> None:
        draw = self.draw = random.Random(seed)
        self.seed, self.made, self.kind, self.now_s = seed, worker, part_server, 0.0
        self.workers, self.servers = draw.randint(2, 5), draw.randint(1, 3)
        self.bound, self.every = draw.randint(0, 3), draw.choice((None, None, 3))
        between = Bounded(self.bound)
        self.numel = self.servers * self.workers  # part p counts the pushes of worker w to it in its element w
        self.job = Job(
            {"x": torch.zeros(self.numel, dtype=torch.float64)},
            ASGD(1.0),
            never,
            workers=self.workers,
            pushes=10**9,
            pace=between if self.every is None else Barriers(self.every, between),
            snapshot_every=draw.choice((1, 3, 10)),
        )
        self.speed = [10 ** draw.uniform(-1.0, 0.3) for _ in range(self.workers)]
        self.late, self.lost = draw.choice((0.0, 0.1)), draw.choice((0.0, 0.1))
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = self._processes = 0
        self.dead: set[int] = set()
        self.hosts = [self._host(part, {}) for part in range(self.servers)]
        self.places = [self._process(number) for number in range(self.workers)]
        self._plan()

    def _plan(self) -> None:
        draw = self.draw
        for part in range(self.servers):
            for _ in range(draw.choice((0, 0, 1, 2))):
                self.at(draw.uniform(0, FAILURES_S), self.crash, part)
        for number in range(1, self.workers):  # the first lives, so that there is something to go on
            if draw.random() < 0.4:
                self.at(draw.uniform(0, FAILURES_S), self.kill, number)
        for number in range(self.workers):
            self.begin(number)
        for part in range(self.servers):
            self.soon(LOOK_S, self.poll, part)

    def _host(self, part: int, kept: dict[str, Any]) -> Host:
        return Host(self.kind(self.job, part, self.servers, kept), kept)

    def _process(self, number: int) -> Process:
        self._processes += 1
        work = functools.partial(self.work, number)
        like = self.job.parameters
        return Process(self.made(number, work, like, servers=self.servers, process=self._processes))

    # Time --------------------------------------------------------------------------------------------------------

    def at(self, at_s: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, handle, arguments))

    def soon(self, longest_s: float, handle: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + self.draw.uniform(0, longest_s), handle, *arguments)

    def run(self, until: Callable[[], bool], end_s: float) -> None:
        while self._events and self._events[0][0] < end_s and not until():
            self.now_s, _, handle, arguments = heapq.heappop(self._events)
            handle(*arguments)

    # Workers -----------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        place = self.places[number]
        self.send(place, place.worker.begin())
        self.soon(LOOK_S, self.poll_worker, place)

    def poll_worker(self, place: Process) -> None:
        if place.is_up:
            if self.now_s - place.heard_s > LOOK_S:
                self.send(place, place.worker.poll())
            self.at(self.now_s + LOOK_S, self.poll_worker, place)

    def send(self, place: Process, requests: Sequence[WorkerRequest]) -> None:
        for request in requests:
            takes_s = 2 * self.speed[request.worker] if isinstance(request, PushRequest) else 0.1
            if self.now_s < FAILURES_S and self.draw.random() < self.lost:
                self.soon(takes_s, self.miss, place, request)  # and it may arrive nonetheless, sooner or later
                if self.draw.random() < 0.7:
                    self.soon(10 * takes_s, self.deliver, place, request)
                continue
            self.soon(takes_s, self.deliver, place, request)
            if self.now_s < FAILURES_S and self.draw.random() < self.late:
                self.soon(10 * takes_s, self.deliver, place, request)

    def receive(self, place: Process, request: WorkerRequest, reply: ServerReply) -> None:
        if place.is_up:
            place.heard_s = self.now_s
            self.send(place, place.worker.receive(request, reply))

    def miss(self, place: Process, request: WorkerRequest) -> None:
        if place.is_up:
            self.send(place, place.worker.miss(request))

    def kill(self, number: int) -> None:
        self.places[number].is_up = False
        self.soon(2.0, self.detect, number)
        if self.draw.random() < 0.7:
            self.soon(6.0, self.revive, number)

    def detect(self, number: int) -> None:
        if not self.places[number].is_up:
            self.dead.add(number)

    def revive(self, number: int) -> None:
        self.dead.discard(number)
        self.places[number] = self._process(number)
        self.begin(number)

    # Servers -----------------------------------------------------------------------------------------------------

    def deliver(self, place: Process, request: WorkerRequest) -> None:
        host = self.hosts[request.server]
        if not host.is_up:
            return self.soon(0.2, self.miss, place, request)
        host.open[request.process, request.serial] = Open(place, request)
        host.part_server.ask(request, functools.partial(self.reply, host, place, request))
        self.watch(host)
        return None

    def reply(self, host: Host, place: Process, request: WorkerRequest, reply: Any) -> None:
        host.open.pop((request.process, request.serial), None)
        self.soon(0.1, self.receive, place, request, reply)

    def poll(self, part: int) -> None:
        """Each server hears at another time who is dead."""
        if self.hosts[part].is_up:
            self.hosts[part].part_server.watched(sorted(self.dead))
        self.soon(4 * LOOK_S, self.poll, part)

    def crash(self, part: int) -> None:
        host = self.hosts[part]
        host.is_up = False
        for place, request in host.open.values():
            self.soon(0.3, self.miss, place, request)
        self.soon(3.0, self.restart, part)

    def restart(self, part: int) -> None:
        if not self.hosts[part].is_up:
            self.hosts[part] = self._host(part, self.hosts[part].kept)

    # What is looked at -------------------------------------------------------------------------------------------

    def work(self, number: int, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        """Every push takes 1 from the element of its worker in each part."""
        place = self.places[number]
        self.require(place.is_up, "the dead compute")
        own = place.worker.clock or 0
        for other, one in enumerate(self.places):
            phases = {host.part_server.server.clocks.phases[other] for host in self.hosts if host.is_up}
            if other != number and one.is_up and one.worker.clock is not None and Phase.DEAD not in phases:
                self.require(own - one.worker.clock <= self.bound, f"{number} at {own}, {other} at {one.worker.clock}")
        g = torch.zeros(self.numel, dtype=torch.float64)
        for part in range(self.servers):
            g[part * self.workers + number] = -1.0
        return Result({"x": g}, 0.0)

    def watch(self, host: Host) -> None:
        rows = host.part_server.journal.rows()
        named = Counter((row.life, row.worker, row.number) for row in rows)
        self.require(max(named.values(), default=1) == 1, "a push counted twice in a life")
        kept = history(rows, host.part_server.server.version)
        counts: Counter[int] = Counter()
        for version, row in enumerate(kept):
            self.require((row.version, row.number) == (version, counts[row.worker]), f"{row} is not push {counts}")
            counts[row.worker] += 1
        wanted = [float(counts[worker]) for worker in range(self.workers)]
        self.require(host.part_server.server.values.tolist() == wanted, "the parameters lack pushes, or have more")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(f"schedule {self.seed}: {what}")

    def versions(self) -> list[int]:
        return [host.part_server.server.version for host in self.hosts]


def check(seed: int, part_server: type[MemoryDesk] = MemoryDesk, worker: type[PartedWorker] = PartedWorker) -> Schedule:
    """Run a schedule; raise `Broken` where it breaks a promise."""
    schedule = Schedule(seed, part_server, worker)
    schedule.run(lambda: False, FAILURES_S + 10)
    wanted = [version + 3 * schedule.workers for version in schedule.versions()]
    schedule.run(lambda: all(a >= b for a, b in zip(schedule.versions(), wanted, strict=True)), FAILURES_S + 500)
    if any(a < b for a, b in zip(schedule.versions(), wanted, strict=True)):
        raise Broken(f"schedule {seed}: workers that live wait for ever")
    return schedule
