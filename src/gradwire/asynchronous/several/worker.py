"""A worker of several servers, without any I/O: what it asks them, and what it makes of their replies."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.several.cut import named_parts, seed_of
from gradwire.asynchronous.several.messages import (
    Gone,
    Granted,
    Hello,
    Here,
    Join,
    Leave,
    Look,
    Pause,
    PushRequest,
    ReadValues,
    Refused,
    Request,
    ServerReply,
    Stop,
    Values,
    WorkerRequest,
)
from gradwire.asynchronous.work import Work
from gradwire.asynchronous.worker import Pusher, require_finite
from gradwire.core.errors import PushError
from gradwire.core.flat_layout import FlatLayout
from gradwire.sending import Sending


@dataclass
class _Seat:
    """What a worker knows of one server.

    Attributes:
        pusher: what it owes there.
        count: of the requests that were made to it.
        serial: of the request whose reply counts; 0 where none is open.
        last: of the latest request whose reply counts, or counted.
        clock: what the server said after a hello; None before.
        held: a grant that is not used yet, and the part's parameters.
    """

    pusher: Pusher
    count: int = 0
    serial: int = 0
    last: int = 0
    clock: int | None = None
    held: Granted | None = None


class PartedWorker:
    """Holds a grant of each server, computes once, and pushes a part to each.

        requests = worker.begin()                       # each to its server
        requests = worker.receive(request, reply)       # likewise, until worker.is_done
        requests = worker.miss(request)                 # that server did not reply: it may have died
        requests = worker.poll()                        # nothing came for a while

    Each server applies its bound by itself, so grants of several must be held together, and workers could wait for each
    other in a circle: a server that was restored from an older snapshot may have another worker for the slowest than
    the others have. They do not, since each worker reports the same clock to every server: the pushes that it has
    computed, whenever it joins. So when nothing is under way, all servers agree which worker is slowest. Each server
    lets that one compute, and so it does. A worker that is new, or was taken for dead, first says hello to all: they
    wait for it from then on, so no one runs away, and its clock is the largest that they name. A worker that has heard
    nothing for a while looks whether its servers are still the same and still keep its requests. One that was restarted
    has others wait for this worker, and a request that was lost on its way gets no reply: it joins again.

    What it computes, it computes for (worker, number, version, life, steps) of which number, version and life are the
    largest of its grants, and steps, which may differ where they are matched to speeds, the fewest. A push may be
    applied at one server and refused at another. Then that part has one update less, and the error memory of that part
    is as it was before.

    Args:
        number: of this worker.
        work: what is computed, from all parameters; None where the caller computes, as soon as `granted` is there, and
            calls `push`.
        like: all parameters, or tensors like them.
        servers: S.
        sending, seed: as the servers' job has them.
        process: differs from that of other processes that are or were this worker; drawn by default.

    Attributes:
        clock: pushes that were computed, by all servers' agreement; None until they have replied to hello.
        granted: what may be computed now, from `values`; None while a server has not granted it.
        is_done: whether a server has said that all is done.
        pushers: what it owes to each server.

    Raises:
        CompositionError: more servers than parameters.
    """

    def __init__(
        self,
        number: int,
        work: Work | None,
        like: Mapping[str, Tensor],
        *,
        servers: int,
        sending: Sending | None = None,
        seed: int = 0,
        process: int | None = None,
    ) -> None:
        self.number, self.work, self.names = number, work, FlatLayout(like)
        self.process = secrets.randbits(62) if process is None else process
        self._seats = [
            _Seat(Pusher(part, sending=sending, seed=seed_of(seed, number)))
            for number, part in enumerate(named_parts(like, servers))
        ]
        self.clock: int | None = None
        self.granted: Grant | None = None
        self.is_done = False

    @property
    def pushers(self) -> list[Pusher]:
        """What this worker owes to each server, and how it is sent."""
        return [seat.pusher for seat in self._seats]

    def begin(self) -> list[WorkerRequest]:
        """Say hello to all servers."""
        self.clock = self.granted = None
        for seat in self._seats:
            seat.held = seat.clock = None
        return [self._request(server, Hello) for server in range(len(self._seats))]

    def receive(self, request: WorkerRequest, reply: ServerReply) -> list[WorkerRequest]:
        """Take up a reply; one to an older request says nothing any more.

        Raises:
            PushError: ten refusals of one server in a row, or a server that does not know this worker.
            StateError: a server that was restored from an older snapshot than this worker has seen.
            StepError: as `Worker.compute`.
        """
        if self.is_done or not (self._counts(request) or isinstance(request, Look)):
            return []
        seat = self._seats[request.server]
        match reply:
            case Here() if isinstance(request, Look):
                return self._looked(request, reply)
            case Here():
                return self._here(seat, reply)
            case Granted():
                return self._granted(seat, reply)
            case Refused():
                return self._refused(request, reply.text)
            case Gone() if isinstance(request, Look):
                return self._forgotten(request)
            case Gone():
                return self.begin()
            case Stop():
                self.is_done = True
            case _:
                pass
        return []

    def miss(self, request: WorkerRequest) -> list[WorkerRequest]:
        """Hear that a request got no reply; ask again to be let in, since what was under way there may be lost."""
        if isinstance(request, ReadValues | Leave | Pause):
            return [self._made(request.server, type(request))]
        if self.is_done or not self._counts(request):
            return []
        return [self._again(request.server)]

    def poll(self) -> list[WorkerRequest]:
        """Ask the servers for their lives, and whether they keep what this worker has asked."""
        return [self._made(server, Look) for server, seat in enumerate(self._seats) if seat.held or seat.serial]

    def read(self) -> list[WorkerRequest]:
        """Ask all servers for their parameters, which `values_of` puts together."""
        return [self._made(server, ReadValues) for server in range(len(self._seats))]

    def leave(self) -> list[WorkerRequest]:
        """Compute no more: nobody need wait for this worker, which may still `read`."""
        return [self._made(server, Leave) for server in range(len(self._seats))]

    def pause(self) -> list[WorkerRequest]:
        """Leave the grants unused for now: nobody need wait for this worker, which comes back by `resume`.

        What it owes to each server is settled then.
        """
        for seat in self._seats:
            if seat.held is not None:
                seat.pusher.settle(seat.held.grant)
        return [self._made(server, Pause) for server in range(len(self._seats))]

    def resume(self) -> list[WorkerRequest]:
        """Join again after `pause`, at this worker's clock, which may be set before."""
        if self.clock is None:  # it was taken for dead meanwhile
            return self.begin()
        self.granted = None
        for seat in self._seats:
            seat.held = seat.clock = None
        return [self._request(server, Join, self.clock) for server in range(len(self._seats))]

    # Requests ----------------------------------------------------------------------------------------------------

    def _counts(self, request: WorkerRequest) -> bool:
        return request.process == self.process and request.serial == self._seats[request.server].serial

    def _made(self, server: int, kind: type[Any], *more: Any) -> Any:
        self._seats[server].count += 1
        return kind(server, self.number, self.process, self._seats[server].count, *more)

    def _request(self, server: int, kind: type[Any], *more: Any) -> Any:
        """Make a request whose reply counts, in place of the one before."""
        made = self._made(server, kind, *more)
        seat = self._seats[server]
        seat.serial = seat.last = made.serial
        return made

    def _again(self, server: int) -> WorkerRequest:
        seat = self._seats[server]
        seat.held = seat.clock = self.granted = None
        return self._request(server, Hello) if self.clock is None else self._request(server, Join, self.clock)

    # Replies -----------------------------------------------------------------------------------------------------

    def _looked(self, request: Look, reply: Here) -> list[WorkerRequest]:
        """Join again where the server is not the same any more, or does not keep a request made before the look."""
        seat = self._seats[request.server]
        if seat.held is not None:
            return [] if seat.held.life == reply.life else [self._again(request.server)]
        is_lost = 0 < seat.serial < request.serial and reply.keeps != seat.serial
        return [self._again(request.server)] if is_lost else []

    def _forgotten(self, request: Look) -> list[WorkerRequest]:
        """Join again where a server has another process for this worker; a look that comes late says nothing."""
        seat = self._seats[request.server]
        is_open = seat.serial > 0 or seat.held is not None
        return [self._again(request.server)] if is_open and request.serial > seat.last else []

    def _here(self, seat: _Seat, reply: Here) -> list[WorkerRequest]:
        seat.clock, seat.serial = reply.clock, 0
        clocks = [seat.clock for seat in self._seats if seat.clock is not None]
        if len(clocks) < len(self._seats):
            return []
        self.clock = max(clocks)
        return [self._request(server, Join, self.clock) for server in range(len(self._seats))]

    def _refused(self, request: WorkerRequest, reason: str) -> list[WorkerRequest]:
        if not isinstance(request, PushRequest):
            raise PushError(reason)
        self._seats[request.server].pusher.refused(request.push.grant, reason)
        return [self._again(request.server)]

    def _granted(self, seat: _Seat, reply: Granted) -> list[WorkerRequest]:
        seat.held, seat.serial = reply, 0
        held = [seat.held for seat in self._seats if seat.held is not None]
        if len(held) == len(self._seats):
            self.granted = joint([one.grant for one in held])
        return self._computed() if self.work is not None and self.granted is not None else []

    # Computing ---------------------------------------------------------------------------------------------------

    def holds(self, server: int) -> bool:
        """Whether a grant of this server is there."""
        return self._seats[server].held is not None

    @property
    def values(self) -> Tensor:
        """The parameters (d,) that came with the grants."""
        return torch.cat([seat.held.values for seat in self._seats if seat.held is not None])

    def _computed(self) -> list[WorkerRequest]:
        grant = self.granted
        assert self.work is not None
        assert grant is not None
        begun = time.perf_counter()
        result = self.work(self.names.named(self.values), grant)
        return self.push(self.names.flat(result.gradient), result.loss, time.perf_counter() - begun)

    def push(self, g: Tensor, loss: float, seconds: float) -> list[WorkerRequest]:
        """Push what was computed for `granted`, each part to its server.

        Args:
            g: (d,) what was computed.
            loss: for the record.
            seconds: that it took.

        Raises:
            StateError: a server that was restored from an older snapshot than this worker has seen.
            StepError: g is not finite. Nothing was pushed then, and the grants are still there.
        """
        grant = self.granted
        assert grant is not None
        require_finite(g, grant)
        self.granted = None
        held = [seat.held for seat in self._seats if seat.held is not None]
        self.clock = (self.clock or 0) + 1
        parts = g.split_with_sizes([one.values.numel() for one in held])
        requests: list[WorkerRequest] = []
        for server, (seat, one, part) in enumerate(zip(self._seats, held, parts, strict=True)):
            # as long as a server's own steps would have taken, so that the speed it finds is the worker's
            seat.pusher.settle(one.grant)
            push = seat.pusher.push_of(one.grant, part, loss, seconds / grant.steps * one.steps)
            seat.held = None
            requests.append(self._pushed(server, push))
        return requests

    def _pushed(self, server: int, push: Push) -> PushRequest:
        head = self._request(server, Request)
        return PushRequest.of(head, push)


def values_of(replies: Sequence[Values]) -> Tensor:
    """Return the parameters (d,) that all servers said, in the order of their parts."""
    return torch.cat([reply.values for reply in replies])


def joint(grants: list[Grant]) -> Grant:
    """What a worker computes for that holds these: the largest number, version and life, and the fewest steps.

    >>> joint([Grant(1, number=7, version=20, life=0, steps=4), Grant(1, number=5, version=30, life=1, steps=3)])
    Grant(worker=1, number=7, version=30, life=1, steps=3)
    """
    if len(grants) == 1:
        return grants[0]
    number, version, life = (max(grant[field] for grant in grants) for field in (1, 2, 3))
    return Grant(grants[0].worker, number, version, life, min(grant.steps for grant in grants))
