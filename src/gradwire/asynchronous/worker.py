"""A worker's side without any I/O: from a grant to a push, and what it owes the server."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push, push_key
from gradwire.asynchronous.work import Work
from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import PushError, StateError, StepError
from gradwire.core.flat_layout import FlatLayout
from gradwire.sending import Sending

MOST_REFUSALS = 10
"""Pushes in a row that may be refused before a worker gives up."""


class _Pushed(NamedTuple):
    """A push whose fate is not known yet."""

    grant: Grant
    memory: ErrorMemory | None


class Pusher:
    """Makes pushes of what was computed, and keeps what its codec lost until the server has applied it.

    A push that was refused, or was lost with a server, is taken back: the memory is that of before.

    Args:
        like: the server's parameters, or tensors like them.
        sending, seed: as the server has them.

    Attributes:
        memory: of what pushes that were applied did not say; None before the first, and without memory.
    """

    def __init__(self, like: Mapping[str, Tensor], *, sending: Sending | None = None, seed: int = 0) -> None:
        self.names, self.sending, self.seed = FlatLayout(like), sending or Sending(), seed
        self.memory: ErrorMemory | None = None
        self._pushed: _Pushed | None = None
        self._life, self._refusals = 0, 0

    def push_of(self, grant: Grant, g: Tensor, loss: float, seconds: float) -> Push:
        """Return the push of what was computed for a grant that this worker has settled.

        Args:
            grant: from the server.
            g: (d,) what was computed; finite, see `require_finite`.
            loss: for the record.
            seconds: that it took.
        """
        wire, memory = self.sending.send(g, self.memory, push_key(self.seed, grant))
        self._pushed = _Pushed(grant, memory)
        return Push(grant, wire, self.names.fingerprint, loss, seconds)

    def refused(self, grant: Grant, reason: str) -> bool:
        """Hear that a push was refused; return whether to join again, which is not so where it was an older one.

        Args:
            grant: of the push.
            reason: the server's.

        Raises:
            PushError: `MOST_REFUSALS` in a row, with the last reason.
        """
        if self._pushed is None or grant != self._pushed.grant:
            return False
        self._refusals += 1
        if self._refusals >= MOST_REFUSALS:
            raise PushError(f"{self._refusals} pushes in a row were refused; the last: {reason}")
        return True

    def settle(self, grant: Grant) -> None:
        """Find out from the next grant's number whether the last push was applied.

        Raises:
            StateError: a server that was restored from an older snapshot than one that this worker has seen.
        """
        if grant.life < self._life:
            raise StateError(
                f"the server came back as it was before its restart {self._life}, at version {grant.version}: restore "
                "it from its newest snapshot"
            )
        self._life = grant.life
        if self._pushed is not None and grant.number > self._pushed.grant.number:
            self.memory, self._refusals = self._pushed.memory, 0
        self._pushed = None


class Worker(Pusher):
    """A pusher with what it computes.

    Args:
        work: what is computed.
        like, sending, seed: as `Pusher` takes them.
    """

    def __init__(
        self,
        work: Work,
        like: Mapping[str, Tensor],
        *,
        sending: Sending | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(like, sending=sending, seed=seed)
        self.work = work

    def compute(self, grant: Grant, values: Tensor) -> Push:
        """Return the push that was granted.

        Args:
            grant: from the server.
            values: (d,) its parameters as they came with it.

        Raises:
            StateError: a server that was restored from an older snapshot than one that this worker has seen.
            StepError: a gradient that is not finite, or other tensors than the server's. Nothing is remembered of it.
        """
        self.settle(grant)
        begun = time.perf_counter()
        result = self.work(self.names.named(values), grant)
        seconds = time.perf_counter() - begun
        g = self.names.flat(result.gradient)
        require_finite(g, grant)
        return self.push_of(grant, g, result.loss, seconds)


def require_finite(g: Tensor, grant: Grant) -> None:
    """Refuse to push what was computed for a grant, if any number in it is none.

    Raises:
        StepError: g is not finite.
    """
    if not is_finite(g):
        raise StepError(
            f"what worker {grant.worker} computed for push {grant.number} is not finite, and nothing was pushed: "
            "lower the learning rates"
        )


def is_finite(g: Tensor) -> bool:
    """Whether all of g is finite.

    A finite sum says so in one pass; only where it is not, which large numbers may be the reason of, each is looked at.
    """
    return math.isfinite(float(g.sum())) or bool(g.isfinite().all())
