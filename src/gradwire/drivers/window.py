"""What the last steps of a run were like: a few numbers a step, kept for a report."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.drivers.engine import Stats

START_UP = 5
"""Steps that are left out: kernels are compiled in them, connections made, and DDP rebuilds its buckets."""
STEPS = 100
NORM_EVERY = 20
"""Steps between two norms of the gradient: each costs one pass over it, which is a hundredth of a step's coding."""


class Caps(NamedTuple):
    """Bytes that end a bucket of DDP: its first one, and the others.

    >>> Caps(10, 25).split(70)
    [10, 25, 25, 10]
    """

    first: int
    others: int

    def split(self, nbytes: int) -> list[int]:
        """Sizes of the buckets that so many bytes make, one at least."""
        sizes, left = list[int](), nbytes
        while left > 0 or not sizes:
            cap = max(self.others if sizes else self.first, 4)
            sizes.append(min(cap, left))
            left -= sizes[-1]
        return sizes


DDP_CAPS = Caps(1 << 20, 25 << 20)
"""What DDP takes by default."""


class Ready(NamedTuple):
    """A bucket of gradients that is `nbytes` large and complete at `at_s`; the last one of a step is so at 0."""

    at_s: float
    nbytes: int


class Sample(NamedTuple):
    """One step: seconds and bytes on this rank. `step_s` is the time since the end of the step before.

    `worked_s` are the seconds of a processor that the thread of the training loop had between the first bucket of the
    step before and that of this one: what it computed, whoever else wanted the processor.
    """

    step_s: float
    exposed_s: float
    encode_s: float
    wait_s: float
    sent_bytes: int
    dense_bytes: int
    buckets: tuple[Ready, ...]
    worked_s: float = 0.0


class Window:
    """The last `STEPS` steps, without the first `START_UP` ones after it was made.

    Args:
        caps: gradients count as complete when so many are, since DDP, which a report compares with, would send them as
            one. None: whatever comes is a bucket.

    Attributes:
        latest: the step before, one of the first ones too; None before the second step has ended.
        last_ready_s: when the last bucket was complete.
        under_way: whether a step has begun and not ended.

    Example:
        window = Window()
        window.ready(time.perf_counter(), bucket.nbytes)     # for every bucket of a step
        window.end(time.perf_counter(), stats)               # once its means are written
    """

    def __init__(self, caps: Caps | None = None) -> None:
        self.caps = caps
        self.samples: deque[Sample] = deque(maxlen=STEPS)
        self.latest: Sample | None = None
        self.last_ready_s = 0.0
        self.under_way = False
        self._buckets: list[Ready] = []
        self._bytes = 0
        self._before = Stats()
        self._before_s = 0.0
        self._thread_s: float | None = None
        self._worked_s = 0.0
        self._squares: list[Tensor] = []
        self._scale = 1.0
        self._norm: float | None = None

    def begin(self) -> None:
        """A step's first bucket is about to come; called in the thread of the training loop."""
        before_s, self._thread_s = self._thread_s, time.thread_time()
        # Never negative, as it would be where a thread that has worked less goes on with the training.
        self._worked_s = max(self._thread_s - before_s, 0.0) if before_s is not None else 0.0
        self._buckets, self._bytes, self.under_way = [], 0, True

    def ready(self, now_s: float, nbytes: int) -> None:
        """Gradients are complete: a bucket's, or some of it."""
        self.last_ready_s, self._bytes = now_s, self._bytes + nbytes
        if self.caps is None or self._bytes >= (self.caps.others if self._buckets else self.caps.first):
            self._fill_bucket()

    def _fill_bucket(self) -> None:
        """What has come since the last one is a bucket."""
        self._buckets.append(Ready(self.last_ready_s, self._bytes))
        self._bytes = 0

    def end(self, now_s: float, stats: Stats) -> None:
        """The step has ended; `stats` are the totals since the run began."""
        if self._bytes:
            self._fill_bucket()
        before, self._before = self._before, Stats(**vars(stats))
        if before.steps:
            self.latest = Sample(
                step_s=now_s - self._before_s,
                exposed_s=stats.exposed_s - before.exposed_s,
                encode_s=stats.encode_s - before.encode_s,
                wait_s=stats.wait_s - before.wait_s,
                sent_bytes=stats.wire_bytes - before.wire_bytes,
                dense_bytes=stats.dense_wire_bytes - before.dense_wire_bytes,
                buckets=tuple(Ready(at - self.last_ready_s, nbytes) for at, nbytes in self._buckets),
                worked_s=self._worked_s,
            )
        if self.latest is not None and before.steps >= START_UP:
            self.samples.append(self.latest)
        self._before_s, self.under_way = now_s, False

    @property
    def wants_norm(self) -> bool:
        """Whether this step's gradients should be shown to `gradient`."""
        return self._before.steps % NORM_EVERY == START_UP

    def gradient(self, bucket: Tensor, is_first: bool, scale: float) -> None:
        """Take the norm of a bucket, without waiting for the device it is on; the first one begins a new sum."""
        if is_first:
            self._squares, self._scale, self._norm = [], scale, None
        self._squares.append(torch.linalg.vector_norm(bucket, dtype=_norm_dtype(bucket)).double().square())

    def gradient_norm(self) -> float | None:
        """Norm of the gradient of the last step that it was taken in, without the loss scale; None before that."""
        if self._norm is None and self._squares:
            self._norm = math.sqrt(float(torch.stack(self._squares).sum())) / self._scale
        return self._norm

    def found_bad(self) -> bool:
        """Whether the last norm that was taken is not finite."""
        return not math.isfinite(self.gradient_norm() or 0.0)


def _norm_dtype(bucket: Tensor) -> torch.dtype:
    return torch.float64 if bucket.dtype == torch.float64 else torch.float32


def exposed_s(
    buckets: Sequence[Ready], seconds: Callable[[float], float], share: float = 1.0, cold_s: float = 0.0
) -> float:
    """Seconds from the last bucket to the end of its all-reduce, where each bucket follows the one before it.

    Buckets that are complete before the one ahead of them has ended travel without a break. A run of them that begins
    at s ends at s + seconds(share * bytes so far).

    Args:
        buckets: of one step, in order; the last one is complete at 0.
        seconds: how long an all-reduce of so many bytes takes.
        share: what part of the bytes is sent.
        cold_s: how much longer the first run takes, since the link was idle before it.

    >>> def seconds(nbytes):
    ...     return 0.001 + 1e-6 * nbytes
    >>> round(exposed_s([Ready(-1.0, 500_000), Ready(0.0, 100_000)], seconds), 3)  # the first is hidden
    0.101
    >>> round(exposed_s([Ready(-0.1, 500_000), Ready(0.0, 100_000)], seconds), 3)  # both travel without a break
    0.501
    """
    begin, sent, end = -math.inf, 0.0, -math.inf
    for at_s, nbytes in buckets:
        if at_s > end:
            begin, sent = at_s + (cold_s if end == -math.inf else 0.0), 0.0
        sent += share * nbytes
        end = begin + seconds(sent)
    return max(end, 0.0)
