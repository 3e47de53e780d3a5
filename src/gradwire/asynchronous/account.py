"""What a worker knows of one server it pushes to: what it owes there, and which push it waits to hear of."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push, push_key
from gradwire.asynchronous.names import Names
from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import PushError, StateError
from gradwire.sending import Sending

MOST_REFUSALS = 10
"""Pushes in a row that may be refused before a worker gives up."""


class _Pushed(NamedTuple):
    """A push whose fate is not known yet."""

    grant: Grant
    memory: ErrorMemory | None


class Account:
    """Keeps what a codec lost until the server has applied the push.

    A push that was refused, or was lost with a server, is taken back: the memory is that of before.

    Args:
        names: of what the server keeps.
        sending, seed: as the server has them.

    Attributes:
        memory: of what pushes that were applied did not say; None before the first, and without memory.
    """

    def __init__(self, names: Names, sending: Sending, seed: int) -> None:
        self.names, self.sending, self.seed = names, sending, seed
        self.memory: ErrorMemory | None = None
        self._pushed: _Pushed | None = None
        self._life, self._refusals = 0, 0

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

    def push(self, g: Tensor, grant: Grant, loss: float, seconds: float) -> Push:
        """Return what to send for a grant that was settled.

        Args:
            g: (d,) what was computed.
            grant: that it was computed for.
            loss, seconds: as `Push` has them.
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
