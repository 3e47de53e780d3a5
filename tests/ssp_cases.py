"""Random schedules of workers that differ in speed, die, come back, and repeat themselves, and a server that crashes.

A watch beside the server keeps books of its own and looks at every message: nobody starts beyond the bound, nobody
waits who may start, no push counts twice, and none that counted is missing from the parameters.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gradwire.asynchronous import (
    ASGD,
    AsynchronousSimulation,
    Barriers,
    Bounded,
    Faults,
    Grant,
    Machine,
    ParameterServer,
    Push,
    Receipt,
    Result,
    Worker,
)

WINDOW_S = 12.0
"""Whatever goes wrong does so within these seconds."""


class Broken(AssertionError):  # noqa: N818 - what is broken is a promise
    """A promise of the server that a schedule broke."""


@dataclass
class Books:
    """What the watch knows."""

    clocks: dict[int, int]
    alive: set[int]
    here: set[int] = field(default_factory=set[int])
    computing: set[int] = field(default_factory=set[int])
    applied: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    counts: Counter[int] = field(default_factory=Counter[int])

    @property
    def slowest(self) -> int:
        return min((self.clocks[worker] for worker in self.alive), default=0)

    def copy(self) -> Books:
        return Books(*(copy.copy(getattr(self, part.name)) for part in fields(self)))


class Watched(ParameterServer):
    """A server whose every answer is looked at."""

    def __init__(self, parameters: Mapping[str, Tensor], staleness: int, every: int | None, workers: int) -> None:
        bound = Bounded(staleness)
        pace = bound if every is None else Barriers(every, bound)
        super().__init__(parameters, ASGD(1.0), workers=workers, pace=pace)
        self.staleness, self.every = staleness, every or 10**9
        self.books = Books(dict.fromkeys(range(workers), 0), set(range(workers)))
        self.refusals = 0

    def may_start(self, worker: int) -> bool:
        own, slowest = self.books.clocks[worker], self.books.slowest
        return own - slowest <= self.staleness and own // self.every <= slowest // self.every

    def join(self, worker: int, clock: int | None = None) -> list[Grant]:
        books = self.books
        if worker not in books.alive and books.alive:
            books.clocks[worker] = books.slowest
        books.alive.add(worker)
        books.here.add(worker)
        books.computing.discard(worker)
        return self.looked_at(super().join(worker, clock))

    def leave(self, worker: int) -> list[Grant]:
        for known in (self.books.alive, self.books.here, self.books.computing):
            known.discard(worker)
        return self.looked_at(super().leave(worker))

    def receive(self, push: Push) -> Receipt:
        self.refusals += 1
        receipt = super().receive(push)
        self.refusals -= 1
        worker, number = push.grant.worker, push.grant.number
        self.require(worker in self.books.computing, f"push {number} of {worker} counted, which was not computing")
        self.require((worker, number) not in self.books.applied, f"push {number} of {worker} counted twice")
        self.books.applied.add((worker, number))
        self.books.counts[worker] += 1
        self.books.clocks[worker] += 1
        self.books.computing.discard(worker)
        self.looked_at(receipt.grants)
        self.require_parameters()
        return receipt

    def begin_life(self) -> None:
        super().begin_life()
        self.books.computing.clear()
        self.books.here.clear()
        self.require_parameters()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "books": self.books.copy()}

    def load_state_dict(self, saved: Any) -> None:
        super().load_state_dict(saved)
        self.books = saved["books"].copy()

    def looked_at(self, grants: list[Grant]) -> list[Grant]:
        books = self.books
        for grant in grants:
            worker = grant.worker
            self.require(worker in books.here, f"{worker} was told to start, and is not there")
            self.require(worker not in books.computing, f"{worker} was told to start twice")
            self.require(self.may_start(worker), f"{worker} starts beyond the bound")
            self.require(grant.number == books.counts[worker], f"{worker} is to make push {grant.number}")
            books.computing.add(worker)
        clocks = [books.clocks[worker] for worker in books.alive]
        self.require(not clocks or max(clocks) - min(clocks) <= self.staleness + 1, f"clocks are {clocks}")
        held = [worker for worker in books.here - books.computing if self.may_start(worker)]
        self.require(not held, f"{held} wait though they may start")
        return grants

    def require_parameters(self) -> None:
        """Push n of worker w adds -(n + 1) to element w, so whatever is lost or repeated shows."""
        for worker, value in enumerate(self.values.tolist()):
            count = self.books.counts[worker]
            self.require(value == -count * (count + 1) / 2, f"the parameters lack pushes of {worker}, or have more")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(what)


def pushed(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    gradient = torch.zeros_like(parameters["x"])
    gradient[grant.worker] = grant.number + 1
    return Result({"x": gradient}, 0.0)


def machine(draw: random.Random) -> Machine:
    dies = draw.uniform(0, WINDOW_S) if draw.random() < 0.35 else math.inf
    returns = dies + draw.uniform(0, 5) if dies < math.inf and draw.random() < 0.6 else math.inf
    return Machine(
        step_s=10 ** draw.uniform(-0.3, 0.6),
        delay_s=draw.choice((0.0, 0.1, 1.0)),
        jitter=draw.choice((0.0, 0.5)),
        dies_at_s=dies,
        returns_at_s=returns,
    )


def faults(draw: random.Random) -> Faults:
    return Faults(
        repeats=draw.choice((0.0, 0.3)),
        detection_s=draw.choice((0.0, 0.5, 3.0)),
        crashes_at_s=tuple(draw.uniform(0, WINDOW_S) for _ in range(draw.choice((0, 0, 1, 2)))),
        restart_s=draw.choice((0.0, 1.0)),
        snapshot_every=draw.choice((1, 3, 10)),
    )


def check(seed: int, kind: type[Watched] = Watched) -> AsynchronousSimulation:
    """Run a schedule; raise `Broken` where it breaks a promise."""
    draw = random.Random(seed)
    workers, start = draw.randint(2, 6), {"x": torch.zeros(6, dtype=torch.float64)}
    server = kind(start, draw.randint(0, 4), draw.choice((None, None, 3)), workers)
    machines = [machine(draw) for _ in range(workers)]
    simulation = AsynchronousSimulation(server, [Worker(pushed, start) for _ in machines], machines, faults(draw), seed)
    simulation.run(seconds=WINDOW_S + 7)
    before, stays = server.version, any(one.dies_at_s == math.inf or one.returns_at_s < math.inf for one in machines)
    simulation.run(pushes=2 * workers, seconds=200)
    if stays and server.version < before + 2 * workers:
        raise Broken("workers that live wait for ever")
    return simulation
