"""Error feedback: what was not sent this time is added to what is sent next time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.error_memory import PROBE_NUMEL, add_owed_, require_bounded, require_decay
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, flat_grain, matrix_grain
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Reducer, Wrapper, as_reducer
from gradwire.reducers.requirements import require_linear
from gradwire.reducers.step import Program, Step


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Keep e = y - sent(y), where y = x + decay * e, and reduce y (Seide 2014; Karimireddy 2019, Algorithm 1).

    What `gradwire.compress` does with a codec alone, around an exchange: the exchange's encoder takes from y what it
    sends, and leaves the new residual.

    Where it deviates: in the paper y is lr * x + e and is itself the step. Here e is in units of gradients, and any
    optimizer makes the step, so what waits is scaled by the learning rate of the step in which it is sent.

    Needs a contraction: over anything else the residual grows without bound. It also needs a result that is linear in
    what is sent: a rule such as the median drops parts of payloads that this rank counts as sent. Residuals are float32
    even for gradients in half precision. Owned state: the tensor `x` becomes the new residual, so nothing of its size
    is allocated.

    Args:
        inner: a reducer whose codec is a contraction.
        decay: in (0, 1]; below 1 old errors fade and conservation no longer holds.

    Raises:
        CompositionError: an inner reducer that is no contraction, that loses something and is not `linear`, or that
            itself keeps its input.

    References:
        Karimireddy, Rebjock, Stich & Jaggi 2019, "Error feedback fixes SignSGD and other gradient compression
        schemes", Algorithm 1.

    >>> from gradwire.codecs import QSGD, TopK
    >>> from gradwire.reducers import AllGatherExchange
    >>> ErrorFeedback(AllGatherExchange(TopK(0.01)))
    ErrorFeedback(inner=AllGatherExchange(codec=TopK(density=0.01, values='fp32', indices='auto')), decay=1.0)
    >>> ErrorFeedback(AllGatherExchange(QSGD(15)))
    Traceback (most recent call last):
        ...
    gradwire.core.errors.CompositionError: ...
    """

    inner: Reducer
    decay: float = 1.0

    keeps_input: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if as_reducer(self.inner).keeps_input:
            raise CompositionError(f"{self.inner} keeps its own residual; one error feedback is enough")
        require_decay(self.decay)
        if not self.inner.lossless:
            require_linear(self.inner, "error feedback")
        probe = matrix_grain(1024, 1024) if self.inner.scope == "tensor" else flat_grain(PROBE_NUMEL)
        bounds = self.inner.contraction(probe), self.inner.absolute_error(probe)
        without = "use it without error feedback (option ef=off)"
        require_bounded(*bounds, f"error feedback over {self.inner}", without)

    @property
    def conserves_sum(self) -> bool:  # type: ignore[override]
        """It does so only without decay."""
        return self.inner.conserves_sum and self.decay == 1.0

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer; where that loses nothing, that reducer alone."""
        return inner if inner.lossless else ErrorFeedback(inner, self.decay)

    def init(self, grain: Grain, step: Step) -> State:
        """A residual of zeros beside the inner state."""
        residual = torch.zeros(grain.numel, dtype=torch.float32, device=grain.device)
        return State(residual=Leaf(residual, "element", owed=True), inner=self.inner.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program on x + e."""
        inner = state.part("inner")
        y = add_owed_(x.float(), state.tensor("residual"), self.decay)
        reduced = yield from self.inner.reduce_keeping(grain, y, inner, step)
        new = State(residual=Leaf(y.view(-1), "element", owed=True), inner=reduced.state)
        return reduced._replace(value=buffers.as_dtype(reduced.value, x.dtype), state=new)
