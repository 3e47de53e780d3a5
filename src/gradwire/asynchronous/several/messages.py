"""What workers ask servers, and what servers answer: each question is answered once, at once or later."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push


class Asked(IntEnum):
    """What a worker says to a server."""

    HELLO = 1
    """I am on my way: which clock do you have for me? Answered at once by HERE."""
    JOIN = 2
    """I am here, with this clock. Answered by GRANTED once I may compute, or by GONE."""
    PUSH = 3
    """Here is what I computed. Answered by GRANTED once I may compute again, or by REFUSED."""
    LIFE = 4
    """Are you still the same? Answered at once by HERE."""


class Ask(NamedTuple):
    """A worker's question.

    Attributes:
        kind: what is said.
        server: to which part's server.
        worker: who asks.
        process: a number that tells the processes apart that were this worker, one after the other.
        serial: of the questions of this process to this server. Of what comes late, older questions and answers to
            older questions, nothing is taken up.
        clock: of a JOIN, the steps that the worker has completed.
        push: of a PUSH.
    """

    kind: Asked
    server: int
    worker: int
    process: int
    serial: int
    clock: int = 0
    push: Push | None = None


class Said(IntEnum):
    """What a server says to a worker."""

    HERE = 1
    """This is my life, and your clock here."""
    GRANTED = 2
    """Compute; the grant and the parameters come with it."""
    REFUSED = 3
    """That push is left out, for the reason given."""
    GONE = 4
    """You were taken for dead, or another process is this worker now: begin with HELLO to all."""
    STOP = 5
    """All is done."""


class ServerAnswer(NamedTuple):
    """A server's answer; fields that its kind does not need are empty.

    Attributes:
        kind: what is said.
        grant: of GRANTED.
        values: (d_p,) of GRANTED, the part's parameters at the moment of the grant.
        text: of REFUSED, the reason.
        clock: of HERE, the worker's completed steps as this server knows them.
        life: of HERE, how often the server was restarted.
    """

    kind: Said
    grant: Grant | None = None
    values: Tensor | None = None
    text: str = ""
    clock: int = 0
    life: int = 0
