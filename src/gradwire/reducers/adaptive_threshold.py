"""A threshold that follows the gradient: a sampled quantile, averaged over steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import as_float32
from gradwire.codecs.threshold import Threshold
from gradwire.codecs.topk import check_density, kept
from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Reducer
from gradwire.reducers.sent import SentPayload
from gradwire.reducers.step import Program, Reduced, Step

SAMPLE = 1024
TAIL = 32
"""Sampled entries above the quantile, at the least: their number is off by 1/sqrt(32), a sixth."""


@dataclass(frozen=True)
class AdaptiveThreshold(Reducer):
    """Send |x| >= tau, where tau follows the (1 - density) quantile of |x|: every payload to every rank.

        q_t = the quantile of a sample of |x|;   tau_t = memory * tau_(t-1) + (1 - memory) * q_t,   tau_0 = q_0

    Finding what to send is one pass over x, and how much is sent follows what there is to send: more where the gradient
    is larger than it was, less where it is smaller. tau is never above the largest magnitude, so that at least one
    entry is sent and the exchange is a contraction with delta = 1/d. Every rank has a tau of its own. Payloads have
    room for twice the density (`Threshold`); what does not fit waits in error feedback. While residuals build up, in
    the first few 1/density steps, tau lags behind and up to twice the density is sent.

    Where it deviates: the paper finds tau anew from a sample in each step, and top-k of what exceeds it where that is
    too much. The moving average and the cap are of no paper.

    Args:
        density: the fraction of entries to send, on average, in (0, 1].
        memory: of the moving average, in [0, 1).

    Raises:
        CompositionError: density or memory out of range.

    References:
        Lin et al. 2018, "Deep gradient compression", Section 3.1 (thresholds from samples); Dutta et al. 2020, "On the
        discrepancy between the theoretical analysis and practical implementations of compressed communication".
    """

    density: float = 0.01
    memory: float = 0.9

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0.0 <= self.memory < 1.0:
            raise CompositionError(f"memory {self.memory} is outside [0, 1): 0 takes each step's own quantile")

    @property
    def codec(self) -> Threshold:
        """The codec that writes and reads payloads; its own tau is not used."""
        return Threshold(0.0, cap=min(1.0, 2 * self.density))

    def contraction(self, grain: Grain) -> float | None:
        """1 / d: the largest entry is always sent."""
        return 1.0 / max(1, grain.numel)

    def init(self, grain: Grain, step: Step) -> State:
        """A tau for each segment of the grain, all of them equal; 0 before the first step."""
        return State(
            tau=Leaf(torch.zeros(len(grain.segments), dtype=torch.float32, device=grain.device), "segment", scaled=True)
        )

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        flat, key, n, codec = x.reshape(-1), step.key(grain), step.world_size, self.codec
        x32 = as_float32(flat)
        tau, state = self._follow(grain, x32, state, step)
        layout = codec.layout(flat.numel(), flat.dtype)
        wire = layout.empty(flat.device)
        payload = layout.views(wire)
        codec.encode_above(x32, tau, payload)
        rows = yield collective.AllGather(wire)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean = step.empty(flat.numel(), flat, dtype).zero_()
        for row in collective.by_rank(rows):
            codec.accumulate(layout.views(row), mean, key, alpha=1.0 / n)
        sent = SentPayload(codec, payload, key)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, state)

    def _follow(self, grain: Grain, x32: Tensor, state: State, step: Step) -> tuple[Tensor, State]:
        """Return the threshold of this step, 0-d, and the state with the new average."""
        if not x32.numel():
            return x32.new_zeros(()), state
        known = state.tensor("tau")
        old, quantile = known.amax(), self._quantile(grain, x32, step)
        average = self.memory * old + (1 - self.memory) * quantile
        tau = torch.where(old > 0, average, quantile)
        new = State(tau=Leaf(tau.expand_as(known).clone(), "segment", scaled=True))
        return torch.minimum(tau, torch.linalg.vector_norm(x32, ord=float("inf"))), new

    def _quantile(self, grain: Grain, x32: Tensor, step: Step) -> Tensor:
        size = min(x32.numel(), max(SAMPLE, round(TAIL / self.density)))
        key = step.key(grain, "sample")
        sample = kernels.gather(x32, kernels.permuted_indices(key.stream_seed, x32.numel(), size, x32.device)).abs_()
        return sample.topk(kept(self.density, size)).values[-1]
