"""A worker's side without any I/O: from a grant to a push, and what it owes the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous.account import Account
from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.names import Names
from gradwire.asynchronous.work import Work
from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import StepError
from gradwire.sending import Sending


class Computed(NamedTuple):
    """What a worker computed.

    Attributes:
        g: (d,) finite.
        loss: as the work said.
        seconds: that it took.
    """

    g: Tensor
    loss: float
    seconds: float


class Worker:
    """Computes pushes, and keeps what its codec lost until the server has applied it.

    A push that was refused, or was lost with a server, is taken back: the memory is that of before.

    Args:
        work: what is computed.
        like: the server's parameters, or tensors like them.
        sending, seed: as the server has them.
    """

    def __init__(
        self,
        work: Work,
        like: Mapping[str, Tensor],
        *,
        sending: Sending | None = None,
        seed: int = 0,
    ) -> None:
        self.work, self.names = work, Names(like)
        self._account = Account(self.names, sending or Sending(), seed)

    @property
    def memory(self) -> ErrorMemory | None:
        """Of what pushes that were applied did not say; None before the first, and without memory."""
        return self._account.memory

    def compute(self, grant: Grant, values: Tensor) -> Push:
        """Return the push that was granted.

        Args:
            grant: from the server.
            values: (d,) its parameters as they came with it.

        Raises:
            StateError: a server that was restored from an older snapshot than one that this worker has seen.
            StepError: a gradient that is not finite, or other tensors than the server's. Nothing is remembered of it.
        """
        self._account.settle(grant)
        g, loss, seconds = computed(self.work, self.names, grant, values)
        return self._account.push(g, grant, loss, seconds)

    def refused(self, grant: Grant, reason: str) -> bool:
        """Hear that a push was refused; return whether to join again, which is not so where it was an older one.

        Args:
            grant: of the push.
            reason: the server's.

        Raises:
            PushError: ten in a row, with the last reason.
        """
        return self._account.refused(grant, reason)


def computed(work: Work, names: Names, grant: Grant, values: Tensor) -> Computed:
    """Have the work done for a grant.

    Raises:
        StepError: a gradient that is not finite, or of other tensors than `names`.
    """
    begun = time.perf_counter()
    result = work(names.named(values), grant)
    seconds = time.perf_counter() - begun
    g = names.flat(result.gradient)
    if not bool(g.isfinite().all()):
        raise StepError(
            f"what worker {grant.worker} computed for push {grant.number} is not finite, and nothing was pushed: "
            "lower the learning rates"
        )
    return Computed(g, result.loss, seconds)
