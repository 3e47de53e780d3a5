"""What a report says of a session that combines models every few steps: what averaging costs in a step of training.

Such a session takes the place of DDP, which would combine gradients in every step. So all its figures are those of a
step of training: what a window sends and takes is spread over the window's steps, and beside it stands what DDP would
send and take in every one of them.

DDP begins to send while the backward pass goes on. How much of that it would hide is not known where no gradients are
sent, so its step lies between two cases: all that can be is hidden, and nothing is.

    max(busy, t(b)) <= dense step <= busy + t(b)

`b` are the bytes of all gradients, `t` is how long an all-reduce takes, `busy` how long a step without communication.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradwire.drivers.interpreter import Traffic
from gradwire.drivers.window import STEPS, Ready, Sample
from gradwire.session.estimate import Times, summarise
from gradwire.session.step_times import ToldSteps
from gradwire.topology.reduction_times import ReductionTimes


class Counted(Protocol):
    """What counts its bytes: another session."""

    def stats(self) -> Traffic:
        """All that it has sent so far."""
        ...


@dataclass
class WindowPace:
    """How the steps of a session that combines models lie among those of training.

    Attributes:
        period: what a step of the session ends: "window", or "round" of gossip.
        gradient_bytes: what DDP would all-reduce in every step of training.
        dtypes: of those gradients.
        others: sessions that carry what this one does not: other fragments, second moments, other levels.
        waits: whether training waits while models are combined; else there are no times to compare.
        lengths: steps of training in each of the last windows.
        steps: of training, in all windows that have ended.
    """

    period: str
    gradient_bytes: int
    dtypes: frozenset[torch.dtype]
    others: Sequence[Counted] = ()
    waits: bool = True
    lengths: deque[int] = field(default_factory=lambda: deque[int](maxlen=STEPS))
    steps: int = 0

    @classmethod
    def of(cls, period: str, parameters: Mapping[str, Tensor], *, waits: bool = True) -> WindowPace:
        """That of a model with these trained parameters, whose gradients have their dtypes."""
        nbytes = sum(p.numel() * p.element_size() for p in parameters.values())
        return cls(period, nbytes, frozenset(p.dtype for p in parameters.values()), waits=waits)

    def ended(self, length: int) -> None:
        """A window of so many steps has ended, and models are combined."""
        self.lengths.append(max(1, length))
        self.steps += length

    @property
    def steps_a_period(self) -> float:
        """Mean steps of a window."""
        return statistics.fmean(self.lengths) if self.lengths else 1.0

    def sent_bytes(self, samples: Sequence[Sample]) -> float:
        """What is sent in a step of training, by the session of these samples and by the others."""
        own = statistics.fmean(sample.sent_bytes for sample in samples) / self.steps_a_period if samples else 0.0
        return own + sum(other.stats().wire_bytes for other in self.others) / max(1, self.steps)

    def times(
        self, samples: Sequence[Sample], first: int, link: ReductionTimes, told: Sequence[ToldSteps] | None
    ) -> Times | None:
        """Times of a step of training; None where they cannot be told from those of windows."""
        if not self.waits or self.others:
            return None
        lengths = dict(zip(range(first + len(samples) - 1, -1, -1), reversed(self.lengths), strict=False))
        buckets = (Ready(0.0, self.gradient_bytes),)

        def length(window: int) -> float:
            return lengths.get(window, self.steps_a_period)

        spread = [_spread(sample, length(first + i), buckets) for i, sample in enumerate(samples)]
        others = told and [
            one._replace(
                exposed_s=tuple(seconds / length(one.first + i) for i, seconds in enumerate(one.exposed_s)),
                encode_s=one.encode_s / self.steps_a_period,
                buckets=buckets,
            )
            for one in told
        ]
        return _partly_hidden(
            summarise(spread, first, link, others), 1000 * link.curve.seconds(self.gradient_bytes),
            1000 * link.curve.seconds(self.gradient_bytes / 2),
        )  # fmt: skip


def _spread(sample: Sample, steps: float, buckets: tuple[Ready, ...]) -> Sample:
    """A window's sample as that of one of its steps, in which DDP would send all gradients."""
    return sample._replace(
        step_s=sample.step_s / steps,
        exposed_s=sample.exposed_s / steps,
        encode_s=sample.encode_s / steps,
        wait_s=sample.wait_s / steps,
        buckets=buckets,
    )


def _partly_hidden(times: Times, all_ms: float, half_ms: float) -> Times:
    """Times whose uncompressed steps lie in the middle between hiding all that can be hidden and hiding nothing.

    Args:
        times: with nothing hidden.
        all_ms, half_ms: how long all gradients, and half as many bytes, are on their way.
    """
    busy_ms = times.dense_step_ms - all_ms
    least_ms, least_half_ms = max(busy_ms, all_ms), max(busy_ms, half_ms)
    return dataclasses.replace(
        times,
        dense_step_ms=(least_ms + times.dense_step_ms) / 2,
        half_step_ms=(least_half_ms + times.half_step_ms) / 2,
        dense_low_ms=min(times.dense_low_ms, least_ms - (times.dense_step_ms - times.dense_low_ms)),
    )
