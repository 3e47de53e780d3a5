"""Memory for error feedback by other means: residuals of half the size, and estimates in place of residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, flat_grain, matrix_grain
from gradwire.core.key import Key
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Reducer, Wrapper
from gradwire.reducers.error_feedback import ErrorFeedback
from gradwire.reducers.requirements import require_linear, require_whole
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class LeanErrorFeedback(ErrorFeedback):
    """Error feedback whose residual is kept in bfloat16, rounded stochastically: 2 bytes a parameter instead of 4.

        y = x + decay * e,   e' = round(y - sent(y)),   E[round(z)] = z

    Rounding to nearest would make the same error again and again: a small gradient that is added to a residual 256
    times as large would vanish every time. Stochastic rounding keeps it in expectation, so what is owed is conserved on
    average and not to the last bit. Its error, at most 2^-7 of an element, is an unbiased noise of the compression, a
    fraction of 2^-14 of its energy at most.

    Args:
        inner: a reducer whose codec is a contraction.
        decay: in (0, 1].

    Raises:
        CompositionError: as `ErrorFeedback`.

    >>> from gradwire.codecs import TopK
    >>> from gradwire.reducers import AllGatherExchange
    >>> LeanErrorFeedback(AllGatherExchange(TopK(0.01)))
    LeanErrorFeedback(inner=AllGatherExchange(codec=TopK(density=0.01, values='fp32', indices='auto')), decay=1.0)
    """

    @property
    def conserves_sum(self) -> bool:  # type: ignore[override]
        """False: only on average."""
        return False

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer; where that loses nothing, that reducer alone."""
        return inner if inner.lossless else LeanErrorFeedback(inner, self.decay)

    def init(self, grain: Grain, step: Step) -> State:
        """A residual of zeros beside the inner state."""
        residual = torch.zeros(grain.numel, device=grain.device, dtype=torch.bfloat16)
        return State(residual=Leaf(residual, "element", owed=True), inner=self.inner.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program on x + e."""
        residual, inner = state.tensor("residual"), state.part("inner")
        y = x.float()
        kernels.add_bf16_(y.view(-1), residual, self.decay)
        reduced = yield from self.inner.reduce(grain, y, inner, step)
        reduced.sent.subtract_from(y.view(grain.shape))
        new = State(residual=Leaf(_rounded(y.view(-1), step.key(grain, "residual")), "element", owed=True))
        new["inner"] = reduced.state
        return reduced._replace(value=buffers.as_dtype(reduced.value, x.dtype), state=new)


def _rounded(y: Tensor, key: Key) -> Tensor:
    out = buffers.empty(y.shape, torch.bfloat16, y.device)
    kernels.round_bf16(y, key.stream_seed, out)
    return out


@dataclass(frozen=True, eq=False)
class _SentEstimate:
    """This rank's estimate after the step."""

    minus_h: Tensor

    def subtract_from(self, x: Tensor) -> None:
        """Subtract the estimate: x -= h."""
        x.add_(self.minus_h.view(x.shape))


@dataclass(frozen=True)
class EF21(Wrapper):
    """Each rank keeps an estimate h of its own gradient, and sends the compressed error of it; all know the mean of h.

        c = C(x - h),   h' = h + c,   mean' = mean + mean over ranks of c

    Where gradients change slowly the differences vanish, and with them the error of any contraction: nothing is added
    up as in error feedback, so no old gradient comes late and large. Where they are mostly noise there is nothing to
    track, and plain error feedback is better. CHOCO-SGD keeps the same estimates of parameters.

    Nothing is owed: no conservation. Owned state: `x` becomes the new -h and the difference's buffer the new mean, so
    nothing of their size is allocated; two tensors of the gradient's size to remember and one of scratch, where error
    feedback takes one.

    The mean is never corrected, so sums must not be rounded more than float32 does: each rank's h would know nothing of
    it, and the mean drift away from theirs. Exchanges that sum in 16 bits are refused, and where the gradients
    themselves are of 16 bits, low rank wants `factors=int8`.

    The mean is a sum of means of differences, so rules that are not `linear` are refused, lossless or not: medians of
    differences do not add up to the median.

    Args:
        inner: a reducer whose codec is a contraction, and whose sums are float32.

    Raises:
        CompositionError: an inner reducer that is no contraction, that is not `linear`, that itself keeps its input,
            that `scatters`, or that sums in 16 bits.

    References:
        Richtarik, Sokolov & Fatkhullin 2021, "EF21: a new, simpler, theoretically better, and practically faster error
        feedback", Algorithm 2; Koloskova, Stich & Jaggi 2019, "Decentralized stochastic optimization and gossip
        algorithms with compressed communication", Algorithm 2.

    >>> import torch
    >>> from gradwire import Lockstep
    >>> from gradwire.codecs import TopK
    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.reducers import AllGatherExchange
    >>> ranks = Lockstep(EF21(AllGatherExchange(TopK(0.5))), flat_grain(4), world_size=2)
    >>> [ranks.step([torch.tensor([4.0, 1.0, 2.0, 3.0])] * 2)[0].tolist() for _ in range(2)]
    [[4.0, 0.0, 0.0, 3.0], [4.0, 1.0, 2.0, 3.0]]
    """

    inner: Reducer

    keeps_input: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.inner.keeps_input:
            raise CompositionError(f"{self.inner} keeps its own residual; one memory is enough")
        require_linear(self.inner, "EF21")
        require_whole(self.inner, "EF21's estimate of it")
        probe = matrix_grain(1024, 1024) if self.inner.scope == "tensor" else flat_grain(1 << 20)
        if not self.inner.contraction(probe):
            raise CompositionError(f"EF21 over {self.inner} would not converge, since it is no contraction")
        if self.inner.sums_in_16_bits:
            raise CompositionError(
                f"EF21 over {self.inner} would drift, since it sums in 16 bits: take ef=on, or factors=int8"
            )

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer; where that loses nothing, that reducer alone."""
        return inner if inner.lossless else EF21(inner)

    def init(self, grain: Grain, step: Step) -> State:
        """Estimates of zero, and room for the difference."""
        minus_h, mean, scratch = (torch.zeros(grain.numel, dtype=torch.float32, device=grain.device) for _ in range(3))
        return _estimates(minus_h, mean, scratch, self.inner.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program on x - h."""
        minus_h, mean, off = (state.tensor(name) for name in ("minus_h", "mean", "scratch"))
        inner = state.part("inner")
        new_h = x.float().view(-1)
        torch.add(new_h, minus_h, out=off)
        reduced = yield from self.inner.reduce(grain, off.view(grain.shape), inner, step)
        # Only what was reduced can say what was sent of it, by what is left: -h' = left - off - h.
        new_h.copy_(off)
        reduced.sent.subtract_from(new_h.view(grain.shape))
        new_h.sub_(off).add_(minus_h)
        total = reduced.value.view(-1).add_(mean)
        off.copy_(total)  # a guard may write over what is returned
        new = _estimates(new_h, off, mean, reduced.state)
        return Reduced(total.to(x.dtype).view(x.shape), _SentEstimate(new_h), new, reduced.bad)


def _estimates(minus_h: Tensor, mean: Tensor, scratch: Tensor, inner: State) -> State:
    return State(
        minus_h=Leaf(minus_h, "element", scaled=True),
        mean=Leaf(mean, "element", scaled=True),
        scratch=Leaf(scratch, "scratch"),
        inner=inner,
    )
