"""Deep Gradient Compression: momentum is kept where gradients wait, so that waiting does not weaken it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.topk import TopK, check_density
from gradwire.core import agreement, buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec, flat_grain
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Reducer, Wrapper
from gradwire.reducers.exchange import AllGatherExchange
from gradwire.reducers.requirements import require_linear
from gradwire.reducers.scheduled import Scheduled
from gradwire.reducers.step import Program, Step

ClipOf = Literal["mean", "sum"]
"""Of which combination of the ranks' gradients `clip` is the largest norm."""

DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
"""What the paper warms up with, an epoch each, before 0.001."""


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Accumulate the local *velocity* instead of the gradient (Lin 2018, Section 3.2), and send of that sum:

        u = m u + g,   v = v + u,   mean of sent(v),   v = v - sent(v),   u = 0 where v was sent

    The optimizer must have no momentum of its own: it is in here. What is sent is forgotten from u too (momentum factor
    masking, Section 3.3), else old momentum pushes a stale weight on. An entry counts as sent where nothing is left of
    it, so values must travel in full precision for masking; where only a part is sent, u goes on. Where v is zero and
    nothing was sent, u is zero too, unless the two cancelled to the last bit: then that momentum is forgotten, which
    keeping apart would cost a pass over memory each step.

    With `clip`, each of n ranks scales its own gradient g_k before adding it (local gradient clipping, Section 3.2):

        g_k = g_k * min(1, bound / |g_k|),   bound = clip sqrt(n)

    so that `clip` is the largest norm of the mean where gradients are independent, as in training without compression.
    In the paper n parts nabla_k are summed, |nabla_k| <= clip / sqrt(n), since n independent parts of norm b sum to a
    norm of b sqrt(n). These parts are divided by n already: nabla_k = g_k / n in Section 3.2 and in Algorithms 1 and 4,
    where a node adds up 1 / (n b) of each of its b examples' gradients. Here the mean is taken after clipping, so the
    bound of g_k is n times that of nabla_k: n clip / sqrt(n). Where all gradients are equal the mean's norm may reach
    clip sqrt(n), in the paper too. The norm |g_k| is that of all gradients which this reducer serves, whatever their
    grains.

    With `clip_of="sum"` the bound is clip / sqrt(n), n times smaller: then `clip` is the threshold of a sum of whole
    gradients. So it was up to version 0.2.0, and what was saved then goes on so.

    Owned state: `x` becomes the new u, and v takes turns with a scratch tensor, so nothing of their size is allocated.

    Args:
        inner: a contraction that keeps no residual: `AllGatherExchange(TopK(...))`, or a `Scheduled` one.
        momentum: m, in [0, 1). With 0 this is error feedback.
        clip: the threshold of the combined gradient's norm; 0 clips nothing.
        clip_of: what is so combined: "mean", or "sum".

    Raises:
        CompositionError: an inner reducer that is no contraction, that loses something and is not `linear`, or that
            keeps its input; momentum or clip out of range; `clip_of` of something else, or without `clip`.

    References:
        Lin, Han, Mao, Wang & Dally 2018, "Deep gradient compression: reducing the communication bandwidth for
        distributed training", Sections 3.2 and 3.3.

    >>> from gradwire.codecs import TopK
    >>> MomentumCorrection(AllGatherExchange(TopK(0.01))).momentum
    0.9
    """

    inner: Reducer
    momentum: float = 0.9
    clip: float = 0.0
    clip_of: ClipOf = "mean"

    keeps_input: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = False  # what u will add later is owed to nobody yet

    def __post_init__(self) -> None:
        if self.inner.keeps_input:
            raise CompositionError(f"{self.inner} keeps its own residual; momentum correction keeps one already")
        if not self.inner.lossless:
            require_linear(self.inner, "momentum correction")
        if not 0.0 <= self.momentum < 1.0:
            raise CompositionError(f"momentum {self.momentum} is outside [0, 1)")
        if not self.clip >= 0.0:
            raise CompositionError(f"clip {self.clip} is no norm: it must be positive, or 0 for none")
        if self.clip_of not in get_args(ClipOf):
            raise CompositionError(f"clip_of={self.clip_of!r}: a clip is that of the 'mean' or of the 'sum'")
        if self.clip_of != "mean" and not self.clip:
            raise CompositionError(f"clip_of={self.clip_of} says nothing without clip=: give a clip, or leave it out")
        if self.inner.scope == "tensor" or not self.inner.contraction(flat_grain(1 << 20)):
            raise CompositionError(
                f"momentum correction over {self.inner} is not possible: it takes an elementwise contraction, e.g. "
                "AllGatherExchange(TopK(0.01))"
            )

    @property
    def carries_momentum(self) -> bool:
        """Unless it is zero."""
        return self.momentum > 0

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer."""
        return dataclasses.replace(self, inner=inner)

    def _bound(self, world_size: int) -> float:
        """The largest norm of one rank's gradient."""
        root = world_size**0.5
        return self.clip * root if self.clip_of == "mean" else self.clip / root

    def init(self, grain: Grain, step: Step) -> State:
        """u and v of zeros, and room for the next v."""
        u, v, scratch = (torch.zeros(grain.numel, dtype=torch.float32, device=grain.device) for _ in range(3))
        return _state(u, v, scratch, self.inner.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program on v + m u + g."""
        old_u, old_v, y = (state.tensor(name) for name in ("velocity", "residual", "scratch"))
        inner = state.part("inner")
        u = x.float().view(-1)
        if self.clip:
            square = yield agreement.Total(
                torch.linalg.vector_norm(u).double().square(), of=(self, "norm"), over="grains"
            )
            u.mul_(_clipping(square, self._bound(step.world_size)))
        u.add_(old_u, alpha=self.momentum)
        torch.add(old_v, u, out=y)
        reduced = yield from self.inner.reduce(grain, y.view(grain.shape), inner, step)
        reduced.sent.subtract_from(y.view(grain.shape))
        u.masked_fill_(torch.eq(y, 0, out=buffers.empty(y.shape, torch.bool, y.device)), 0.0)
        return reduced._replace(
            value=buffers.as_dtype(reduced.value, x.dtype), state=_state(u, y, old_v, reduced.state)
        )


def _state(u: Tensor, v: Tensor, scratch: Tensor, inner: State) -> State:
    return State(
        velocity=Leaf(u, "element", owed=True, momentum=True),
        residual=Leaf(v, "element", owed=True),
        scratch=Leaf(scratch, "scratch"),
        inner=inner,
    )


def _clipping(square: Tensor, bound: float) -> Tensor:
    """The factor that brings a norm down to `bound`, given its square; 0-d, 1 where it is below."""
    norm = square.sqrt().float()
    return torch.where(norm > bound, bound / norm, torch.ones_like(norm))


@dataclass(frozen=True)
class DGC(Wrapper):
    """Deep Gradient Compression as its paper has it: `MomentumCorrection` of top-k, with a density that ramps down.

    The first steps send 25%, 6.25%, 1.5625% and 0.4% of the entries (those of these that are above `density`), `ramp`
    steps each: an epoch in the paper (Section 3.3).

    Where it deviates: the paper selects in two stages, to save time: a threshold sampled from 0.1 to 1% of the
    gradient, then, where too many entries exceed it, exact top-k of those. So does the selection that every top-k here
    goes through (`kernels.topk_indices`), and its result is the exact top-k always: a sample of four thousand elements
    only guesses where candidates begin, and where it guesses wrong all elements are counted. The paper takes top-k of
    each layer, and this of each grain. The warm-up here is of the density alone, by steps and not by epochs.

    Args:
        density: the fraction sent in the end, in (0, 1].
        momentum: of the correction; give the optimizer none.
        clip: the threshold of the mean gradient's norm, see `MomentumCorrection`; 0 clips nothing.
        clip_of: see `MomentumCorrection`.
        ramp: steps at each of the warm-up's densities; 0 for no warm-up.

    Raises:
        CompositionError: a value out of range.

    References:
        Lin, Han, Mao, Wang & Dally 2018, "Deep gradient compression: reducing the communication bandwidth for
        distributed training".

    >>> DGC(0.01, ramp=100).inner.inner.serving(250)
    AllGatherExchange(codec=TopK(density=0.015625, values='fp32', indices='auto'))
    """

    density: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    clip_of: ClipOf = dataclasses.field(default="mean", kw_only=True)
    ramp: int = 0

    keeps_input: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.ramp and self.density >= max(DENSITIES):
            raise CompositionError(
                f"ramp={self.ramp} comes down from a density of {max(DENSITIES)}, and {self.density} is not below it: "
                "leave ramp out"
            )
        _ = self.inner

    @functools.cached_property
    def inner(self) -> MomentumCorrection:  # type: ignore[override]
        """The parts it is made of."""
        ramp = [
            (self.ramp, AllGatherExchange(TopK(density)))
            for density in DENSITIES
            if self.ramp and density > self.density
        ]
        schedule = Scheduled((*ramp, (0, AllGatherExchange(TopK(self.density)))))
        return MomentumCorrection(schedule, self.momentum, self.clip, self.clip_of)

    def around(self, inner: Reducer) -> Reducer:
        """The inner reducer alone: there is nothing else here."""
        return inner

    @override
    def assign(self, parameter: ParameterSpec) -> Reducer:
        return self

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return (yield from self.inner.reduce(grain, x, state, step))
