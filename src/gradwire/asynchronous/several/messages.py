"""What workers ask a server, and what it replies: each request has one reply, at once or later."""

from __future__ import annotations

from typing import Self

from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.several.journal import JournalRow
from gradwire.core.record import Bytes, Count, Floats, Record


class Request(Record, frozen=True, tag=True):
    """A worker's request.

    Attributes:
        server: to which part's server.
        worker: who asks.
        process: a number that tells the processes apart that were this worker, one after the other.
        serial: of the requests of this process to this server. Of what comes late, older requests and replies to older
            requests, nothing is taken up.
    """

    server: Count
    worker: Count
    process: Count
    serial: Count


class Hello(Request, frozen=True):
    """I am on my way: which clock do you have for me? `Here` is the reply, at once."""


class Join(Request, frozen=True):
    """I am here, and have completed so many steps. The reply is `Granted` once I may compute, or `Gone`."""

    clock: Count


class PushRequest(Request, frozen=True):
    """Here is what I computed. The reply is `Granted` once I may compute again, or `Refused`.

    Attributes:
        number, version, life, steps: of the grant that it was computed for.
        wire, fingerprint, loss, seconds: as `Push` has them.
    """

    number: Count
    version: Count
    life: Count
    steps: Count
    wire: Bytes
    fingerprint: Count
    loss: float
    seconds: float

    @classmethod
    def of(cls, request: Request, push: Push) -> Self:
        """Return the request that sends a push, with the head of another request."""
        _, number, version, life, steps = push.grant
        head = (request.server, request.worker, request.process, request.serial)
        return cls(*head, number, version, life, steps, push.wire, push.fingerprint, push.loss, push.seconds)

    @property
    def push(self) -> Push:
        """What was computed, as a server's core takes it."""
        grant = Grant(self.worker, self.number, self.version, self.life, self.steps)
        return Push(grant, self.wire, self.fingerprint, self.loss, self.seconds)


class Look(Request, frozen=True):
    """Are you still the same, and do you still keep my request? `Here` is the reply, at once."""


class ReadValues(Request, frozen=True):
    """What are the parameters now? It is no request to compute. `Values` is the reply, at once."""


class Leave(Request, frozen=True):
    """I compute no more, so nobody need wait for me; I may still read. `Here` is the reply, at once."""


class Pause(Request, frozen=True):
    """I do not use my grant, so nobody need wait for me until I join again. `Here` is the reply, at once."""


class Watch(Record, frozen=True, tag=True):
    """How far are you? These workers are dead. `Progress` is the reply, at once."""

    dead: list[Count]


class Finish(Record, frozen=True, tag=True):
    """Tell all workers that all is done. `Finished` is the reply, at once."""


class Here(Record, frozen=True, tag=True):
    """This is my life, and your clock here.

    Attributes:
        clock: the worker's completed steps, as this server knows them.
        life: how often the server was restarted.
        keeps: the serial of the worker's request that has no reply yet; 0 where there is none.
    """

    clock: Count = 0
    life: Count = 0
    keeps: Count = 0


class Granted(Record, frozen=True, tag=True):
    """Compute, from these parameters.

    Attributes:
        worker, number, version, life, steps: as `Grant` has them.
        values: (d_p,) the part's parameters at the moment of the grant.
    """

    worker: Count
    number: Count
    version: Count
    life: Count
    steps: Count
    values: Floats

    @property
    def grant(self) -> Grant:
        """What may be computed, without the parameters."""
        return Grant(self.worker, self.number, self.version, self.life, self.steps)


class Refused(Record, frozen=True, tag=True):
    """That request is left out, for the reason given."""

    text: str


class Gone(Record, frozen=True, tag=True):
    """You were taken for dead, or another process is this worker now: begin with `Hello` to all."""


class Stop(Record, frozen=True, tag=True):
    """All is done, and nobody need compute any more."""


class Values(Record, frozen=True, tag=True):
    """The part's parameters (d_p,), as they are now."""

    values: Floats


class Progress(Record, frozen=True, tag=True):
    """How far a server is.

    Attributes:
        version: updates made.
        life: how often it was restarted.
    """

    version: Count
    life: Count


class Finished(Record, frozen=True, tag=True):
    """What a server had in the end.

    Attributes:
        values: (d_p,) its part of the parameters.
        rows: its journal.
        version, life: as `Progress` has them.
    """

    values: Floats
    rows: list[JournalRow]
    version: Count
    life: Count


class Failed(Record, frozen=True, tag=True):
    """This server can go on no more, for the reason given."""

    text: str


WorkerRequest = Hello | Join | PushRequest | Look | ReadValues | Leave | Pause
AnyRequest = WorkerRequest | Watch | Finish
ServerReply = Here | Granted | Refused | Gone | Stop | Values | Progress | Finished | Failed
