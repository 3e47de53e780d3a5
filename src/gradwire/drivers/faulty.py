"""A transport that fails, by a plan drawn from a seed: what tests of failures run on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import GradwireError
from gradwire.drivers.interpreter import Pending, Transport, WrappedTransport

FaultKind = Literal["delay", "raise", "stall", "die", "truncate", "flip"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class Fault(NamedTuple):
    """What goes wrong with one collective of one rank.

    Attributes:
        kind: "delay" starts it later, "raise" raises `InjectedFault` in the rank, "stall" makes it wait for ever,
            "die" ends it at once, "truncate" sends zeros in place of the last half, "flip" changes one bit.
        draw: in [0, 1): for how long, or which bit.
    """

    kind: FaultKind
    draw: float = 0.5


class InjectedFault(GradwireError, RuntimeError):  # noqa: N818 - it is called what it is
    """The fault of a plan, raised in the rank that it befalls."""


class Died(InjectedFault):
    """A virtual rank has ended; a real one ends without a word."""


def plan_of(seed: int, world_size: int, requests: int, faults: int = 1) -> list[dict[int, Fault]]:
    """Draw which rank fails how at which of its first `requests` collectives; the same for the same seed.

    >>> plan_of(1, 2, 10) == plan_of(1, 2, 10)
    True
    """
    generator = random.Random(seed)
    plan: list[dict[int, Fault]] = [{} for _ in range(world_size)]
    for _ in range(faults):
        fault = Fault(generator.choice(KINDS), generator.random())
        plan[generator.randrange(world_size)][generator.randrange(requests)] = fault
    return plan


class Faulty(WrappedTransport):
    """Wraps any transport and lets faults befall collectives, by their number on this rank.

    Args:
        inner: what moves tensors.
        faults: of this rank.
        real: whether the rank is a process of its own, which stalls and dies as such; a virtual one shares its process
            with others, so its result never comes, or it raises `Died`.
        longest_s: the longest delay.
    """

    def __init__(
        self, inner: Transport, faults: Mapping[int, Fault], real: bool = False, longest_s: float = 0.001
    ) -> None:
        super().__init__(inner)
        self.faults, self.real, self.longest_s = faults, real, longest_s
        self.number = 0
        self._stalled = False

    def issue(self, request: Collective) -> Pending:
        """Start a collective, or what the plan has in its place.

        Raises:
            InjectedFault: the plan says so.
        """
        if self._stalled:
            return Never(self.real)
        fault, number = self.faults.get(self.number), self.number
        self.number += 1
        if fault is None:
            return self.inner.issue(request)
        if fault.kind == "delay":
            time.sleep(fault.draw * self.longest_s)
            return self.inner.issue(request)
        if fault.kind == "raise":
            raise InjectedFault(f"rank {self.rank} fails at its collective {number}, as planned")
        if fault.kind == "die":
            self._die(number)
        if fault.kind == "stall":
            self._stalled = True
            return Never(self.real)
        return self.inner.issue(_damaged(request, fault))

    def _die(self, number: int) -> None:
        if self.real:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Died(f"rank {self.rank} ends at its collective {number}, as planned")


@dataclass(frozen=True)
class Never:
    """A collective whose result never comes."""

    real: bool

    def is_here(self) -> bool:
        """It is never here."""
        return False

    def wait(self) -> Tensor:
        """Wait for ever, as for a rank that is silent."""
        assert self.real, "a virtual rank cannot wait for ever"
        while True:
            time.sleep(3600)


def _damaged(request: Collective, fault: Fault) -> Collective:
    """What is sent in place of `request`; messages between pairs are left alone."""
    if not isinstance(request, AllReduce | AllGather | AllToAll | AllToAllV) or not request.tensor.numel():
        return request
    tensor = request.tensor.clone()
    data = tensor.view(-1).view(torch.uint8)
    at = int(fault.draw * data.numel())
    if fault.kind == "flip":
        data[at] ^= 1 << (at % 8)
    else:
        data[data.numel() // 2 :] = 0
    return replace(request, tensor=tensor)
