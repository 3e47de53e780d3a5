"""All-reduces of Gloo over TCP in simulated time: slow start, frames that are lost, unequal links and slow hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradwire.core.agreement import Agree
from gradwire.core.collective import AllReduce, Collective
from gradwire.drivers.interpreter import Answer
from gradwire.drivers.window import DDP_CAPS, Ready, Sample

FRAME_BYTES, FIRST_WINDOW_BYTES = 1448, 14480
TIMEOUT_S = 0.2


@dataclass
class Link:
    """What joins some hosts, as the slowest of them sees it.

    Attributes:
        rate: bytes a second, of the slowest host, since a ring waits for it.
        delay_s: of a round trip.
        loss: share of frames.
        ranks: in the ring.
    """

    rate: float
    delay_s: float = 0.0
    loss: float = 0.0
    ranks: int = 4
    now_s: float = 0.0
    window: float = FIRST_WINDOW_BYTES
    used_s: float = 0.0
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    # What code under test sees of the clock.
    def perf_counter(self) -> float:
        """Now."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def all_reduce(self, nbytes: int) -> None:
        """Let the time pass that a ring takes: twice n - 1 rounds, in each of which every link carries a chunk."""
        while self.now_s - self.used_s > TIMEOUT_S + self.delay_s and self.window > FIRST_WINDOW_BYTES:
            self.window, self.used_s = max(self.window / 2, FIRST_WINDOW_BYTES), self.used_s + TIMEOUT_S + self.delay_s
        for _ in range(2 * (self.ranks - 1)):
            self.now_s += self.delay_s / 2 + self._chunk_s(nbytes / self.ranks)
        self.used_s = self.now_s

    def _chunk_s(self, nbytes: float) -> float:
        took_s = self._losses_s(nbytes)
        while nbytes > self.window and self.window < self.rate * self.delay_s:  # a round trip for each window
            took_s, nbytes = took_s + self.delay_s, nbytes - self.window
            self.window *= 2
        return took_s + nbytes / self.rate

    def _losses_s(self, nbytes: float) -> float:
        """A lost frame costs a round trip, or a timeout where no frames after it tell of the loss."""
        frames = self.ranks * max(1, round(nbytes / FRAME_BYTES))
        lost = self.draw.binomial(frames, self.loss) if self.loss else 0
        late = self.draw.binomial(lost, 0.2)
        return late * TIMEOUT_S + (lost - late) * (self.delay_s + 0.002)


@dataclass
class SimulatedTransport:
    """One rank of a ring, whose other ranks do as it does."""

    link: Link
    rank: int = 0

    @property
    def world_size(self) -> int:
        """How many."""
        return self.link.ranks

    def issue(self, request: Collective) -> Answer:
        """Let the time pass; ranks send equal tensors, so a sum is n times one of them."""
        assert isinstance(request, AllReduce | Agree)
        tensor = request.tensor if isinstance(request, AllReduce) else request.flag
        self.link.all_reduce(tensor.nbytes)
        return Answer(tensor * self.link.ranks if isinstance(request, AllReduce) else tensor)


@dataclass
class Training:
    """Steps of several ranks.

    Attributes:
        link: between them.
        compute_s: of a step, by rank, until the last gradient.
        nbytes: of all gradients.
        early_s: how long before the last bucket DDP's first one is complete on the slowest rank.
    """

    link: Link
    compute_s: Sequence[float]
    nbytes: int
    early_s: float = 0.01

    def dense_step(self) -> float:
        """A step of DDP alone: its first bucket leaves early, and the others follow."""
        began, link = self.link.now_s, self.link
        complete = began + max(self.compute_s)
        link.now_s = complete - self.early_s
        first, *others = DDP_CAPS.split(self.nbytes)
        if not others:
            link.now_s = complete
        link.all_reduce(first)
        link.now_s = max(link.now_s, complete)
        for bucket in others:
            link.all_reduce(bucket)
        return link.now_s - began

    def step(self, share: float) -> list[Sample]:
        """A step that sends a share of the bytes, as each rank sees it."""
        began, slowest = self.link.now_s, max(self.compute_s)
        self.link.now_s += slowest
        self.link.all_reduce(int(share * self.nbytes))
        step_s = self.link.now_s - began
        first, *others = DDP_CAPS.split(self.nbytes)
        buckets = [Ready(-self.early_s if others else 0.0, first)]
        if others:
            buckets += [Ready(0.0, bucket) for bucket in others]
        return [Sample(step_s, step_s - own, 0.0, step_s - own, 1, 8, tuple(buckets)) for own in self.compute_s]
