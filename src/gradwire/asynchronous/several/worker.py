"""A worker of several servers, without any I/O: what it asks them, and what it makes of their answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.names import Names
from gradwire.asynchronous.parts import seed_of
from gradwire.asynchronous.several.cut import named_parts
from gradwire.asynchronous.several.messages import Ask, Asked, Said, ServerAnswer
from gradwire.asynchronous.work import Work
from gradwire.asynchronous.worker import Pusher, require_finite
from gradwire.core.errors import PushError
from gradwire.sending import Sending


@dataclass
class _Seat:
    """What a worker knows of one server.

    Attributes:
        pusher: what it owes there.
        serial: of the question whose answer counts.
        clock: what the server said after HELLO; None before.
        held: a grant that is not used yet, and the part's parameters.
    """

    pusher: Pusher
    serial: int = 0
    clock: int | None = None
    held: tuple[Grant, Tensor] | None = None


class PartedWorker:
    """Holds a grant of each server, computes once, and pushes a part to each.

        asks = worker.begin()                   # each to its server
        asks = worker.receive(ask, answer)      # likewise, until worker.is_done
        asks = worker.miss(ask)                 # that server did not answer: it may have died
        asks = worker.poll()                    # nothing came for a while

    Each server applies its bound by itself, so grants of several must be held together, and workers could wait for each
    other in a circle: a server that was restored from an older snapshot may have another worker for the slowest than
    the others have. They do not, since a worker has one clock, the pushes it has computed, and tells it whenever it
    joins. So when nothing is under way, all servers have the same clock for each worker that lives. The slowest worker
    is the slowest everywhere, each server lets it compute, and so it does. A worker that is new, or was taken for dead,
    first says hello to all: they wait for it from then on, so no one runs away, and its clock is the largest that they
    name. A worker that holds a grant looks now and then whether its server is still the same, since one that
    was restarted has others wait for it.

    What it computes, it computes for (worker, number, version, life, steps) of which number, version and life are the
    largest of its grants, and steps, which may differ where they are matched to speeds, the fewest. A push may be
    applied at one server and refused at another. Then that part has one update less, and the error memory of that part
    is as it was before.

    Args:
        number: of this worker.
        work: what is computed, from all parameters.
        like: all parameters, or tensors like them.
        servers: S.
        sending, seed: as the servers' job has them.
        process: differs from that of other processes that are or were this worker; drawn by default.

    Attributes:
        clock: pushes that were computed, by all servers' agreement; None until they have said hello.
        is_done: whether a server has said that all is done.

    Raises:
        CompositionError: more servers than parameters.
    """

    def __init__(
        self,
        number: int,
        work: Work,
        like: Mapping[str, Tensor],
        *,
        servers: int,
        sending: Sending | None = None,
        seed: int = 0,
        process: int | None = None,
    ) -> None:
        self.number, self.work, self.names = number, work, Names(like)
        self.process = secrets.randbits(62) if process is None else process
        self._seats = [
            _Seat(Pusher(part, sending=sending, seed=seed_of(seed, number)))
            for number, part in enumerate(named_parts(like, servers))
        ]
        self.clock: int | None = None
        self.is_done = False

    def begin(self) -> list[Ask]:
        """Say hello to all servers."""
        self.clock = None
        for seat in self._seats:
            seat.held = seat.clock = None
        return [self._ask(server, Asked.HELLO) for server in range(len(self._seats))]

    def receive(self, ask: Ask, answer: ServerAnswer) -> list[Ask]:
        """Take up an answer; one to an older question says nothing any more.

        Raises:
            PushError: ten refusals of one server in a row, or a server that does not know this worker.
            StateError: a server that was restored from an older snapshot than this worker has seen.
            StepError: as `Worker.compute`.
        """
        if self.is_done or not self._counts(ask):
            return []
        if answer.kind is Said.GRANTED:
            return self._granted(ask.server, answer)
        if answer.kind is Said.HERE:
            return self._here(ask, answer)
        if answer.kind is Said.REFUSED:
            return self._refused(ask, answer.text)
        self.is_done = answer.kind is Said.STOP
        return [] if self.is_done else self.begin()

    def miss(self, ask: Ask) -> list[Ask]:
        """Hear that a question got no answer; ask again to be let in, since what was under way there may be lost."""
        if self.is_done or not self._counts(ask):
            return []
        return [self._again(ask.server)]

    def poll(self) -> list[Ask]:
        """Ask those servers whose grants are held for their lives."""
        return [self._ask(server, Asked.LIFE) for server, seat in enumerate(self._seats) if seat.held is not None]

    # Answers -----------------------------------------------------------------------------------------------------

    def _counts(self, ask: Ask) -> bool:
        return ask.serial == self._seats[ask.server].serial

    def _ask(self, server: int, kind: Asked, push: Push | None = None) -> Ask:
        seat = self._seats[server]
        seat.serial += 1
        return Ask(kind, server, self.number, self.process, seat.serial, self.clock or 0, push)

    def _again(self, server: int) -> Ask:
        seat = self._seats[server]
        seat.held = seat.clock = None
        return self._ask(server, Asked.HELLO if self.clock is None else Asked.JOIN)

    def _here(self, ask: Ask, answer: ServerAnswer) -> list[Ask]:
        seat = self._seats[ask.server]
        if ask.kind is Asked.LIFE:
            return [] if seat.held is None or seat.held[0].life == answer.life else [self._again(ask.server)]
        seat.clock = answer.clock
        clocks = [seat.clock for seat in self._seats if seat.clock is not None]
        if len(clocks) < len(self._seats):
            return []
        self.clock = max(clocks)
        return [self._ask(server, Asked.JOIN) for server in range(len(self._seats))]

    def _refused(self, ask: Ask, reason: str) -> list[Ask]:
        if ask.push is None:
            raise PushError(reason)
        self._seats[ask.server].pusher.refused(ask.push.grant, reason)
        return [self._again(ask.server)]

    def _granted(self, server: int, answer: ServerAnswer) -> list[Ask]:
        if answer.grant is None or answer.values is None:
            raise PushError(f"server {server} granted nothing: it and its workers must have the same version")
        self._seats[server].held = (answer.grant, answer.values)
        held = [seat.held for seat in self._seats if seat.held is not None]
        return self._computed(held) if len(held) == len(self._seats) else []

    def _computed(self, held: list[tuple[Grant, Tensor]]) -> list[Ask]:
        for seat, (grant, _) in zip(self._seats, held, strict=True):
            seat.pusher.settle(grant)
            seat.held = None
        grant = joint([grant for grant, _ in held])
        begun = time.perf_counter()
        result = self.work(self.names.named(torch.cat([values for _, values in held])), grant)
        seconds = (time.perf_counter() - begun) / grant.steps
        g = self.names.flat(result.gradient)
        require_finite(g, grant)
        self.clock = (self.clock or 0) + 1
        parts = g.split([values.numel() for _, values in held])
        return [
            # as long as a server's own steps would have taken, so that the speed it finds is the worker's
            self._ask(server, Asked.PUSH, seat.pusher.push_of(own, part, result.loss, seconds * own.steps))
            for server, (seat, (own, _), part) in enumerate(zip(self._seats, held, parts, strict=True))
        ]


def joint(grants: list[Grant]) -> Grant:
    """What a worker computes for that holds these: the largest number, version and life, and the fewest steps.

    >>> joint([Grant(1, number=7, version=20, life=0, steps=4), Grant(1, number=5, version=30, life=1, steps=3)])
    Grant(worker=1, number=7, version=30, life=1, steps=3)
    """
    number, version, life = (max(grant[field] for grant in grants) for field in (1, 2, 3))
    return Grant(grants[0].worker, number, version, life, min(grant.steps for grant in grants))
