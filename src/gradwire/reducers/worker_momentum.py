"""Momentum before the exchange: each rank sends an average of its gradients in place of the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Reducer, Wrapper
from gradwire.reducers.requirements import require_whole
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class WorkerMomentum(Wrapper):
    """Reduce a moving average of this rank's gradients:  m = momentum * m + (1 - momentum) * g.

    The noise of a batch averages out before a rule sees the gradient. Rules against bad gradients choose by
    distances, which noise blurs: the noise of m is sqrt((1 - momentum) / (1 + momentum)) of that of g, while a bad
    rank's direction, which does not average out, stands apart. Over `EF21` it is EF21-SGDM, whose error does not grow
    with the noise of small batches.

    m starts at zero, so the first 1 / (1 - momentum) steps are small. Each gradient arrives in full, spread over the
    steps that follow. An optimizer with momentum would do that twice: give it none where this one is large.

    A step whose mean is not finite is not kept, so that m forgets what the optimizer skips. Where a rule leaves out
    what is not finite on one rank, that rank's m starts there anew.

    Owned state: m takes turns with a scratch tensor where the inner reducer keeps what it is given, else `x` becomes
    the new m. Nothing of their size is allocated.

    Args:
        inner: any reducer.
        momentum: in [0, 1).

    Raises:
        CompositionError: momentum out of range, or an inner reducer that carries momentum already or that `scatters`.

    References:
        Karimireddy, He & Jaggi 2021, "Learning from history for Byzantine robust optimization", Algorithm 2;
        Fatkhullin, Tyurin & Richtarik 2023, "Momentum provably improves error feedback!", Algorithm 1.

    >>> from gradwire.reducers.aggregate import Krum, Sharded
    >>> WorkerMomentum(Sharded(Krum(2))).momentum
    0.9
    """

    inner: Reducer
    momentum: float = 0.9

    keeps_input: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = False  # what m will add later is owed to nobody yet

    @property
    @override
    def carries_momentum(self) -> bool:
        return True

    @property
    def lossless(self) -> bool:
        """False: the mean is not that of this step's gradients."""
        return False

    def __post_init__(self) -> None:
        require_whole(self.inner, "worker momentum")
        if self.inner.carries_momentum:
            raise CompositionError(
                f"{self.inner} has momentum of its own, and worker_momentum would apply it twice: leave "
                "worker_momentum out, or take a method without momentum (topk:0.01,worker_momentum=0.9)"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise CompositionError(
                f"worker_momentum {self.momentum} is outside [0, 1): it is the share of the old average, e.g. 0.5"
            )

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer."""
        return WorkerMomentum(inner, self.momentum)

    def contraction(self, grain: Grain) -> float | None:
        """None: what is sent is not this step's gradient."""
        return None

    def absolute_error(self, grain: Grain) -> float | None:
        """None, for the same reason."""
        return None

    def init(self, grain: Grain, step: Step) -> State:
        """An average of zeros beside the inner state."""
        return self._state(
            torch.zeros(grain.numel, dtype=torch.float32, device=grain.device),
            torch.zeros(grain.numel if self.inner.keeps_input else 0, dtype=torch.float32, device=grain.device),
            self.inner.init(grain, step),
        )

    def _state(self, average: Tensor, scratch: Tensor, inner: State) -> State:
        kept = Leaf(average, "element", owed=True, momentum=True)
        return State(average=kept, scratch=Leaf(scratch, "scratch"), inner=inner)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program on the average."""
        old, scratch, inner = state.tensor("average"), state.tensor("scratch"), state.part("inner")
        y = buffers.as_dtype(x, torch.float32)
        flat = y.view(-1)
        if self.inner.keeps_input:
            average = torch.mul(old, self.momentum, out=scratch).add_(flat, alpha=1 - self.momentum)
            flat.copy_(average)
            scratch = old
        else:
            average = flat.mul_(1 - self.momentum).add_(old, alpha=self.momentum)
            # A driver's buffer is float32 where this keeps it: send no more than came.
            y = buffers.as_dtype(y, grain.dtype)
        reduced = yield from self.inner.reduce(grain, y, inner, step)
        average.nan_to_num_(0.0, 0.0, 0.0)
        bad = kernels.all_finite(reduced.value).logical_not()
        return Reduced(
            buffers.as_dtype(reduced.value, x.dtype),
            reduced.sent,
            self._state(average, scratch, reduced.state),
            bad if reduced.bad is None else bad.logical_or(reduced.bad),
        )
