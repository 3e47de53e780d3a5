"""Weights: ranks that count for more, e.g. by the number of examples they saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Program, Reducer, Step, Wrapper


class Weights:
    """Every rank's weight, which a training loop may set anew before each step, alike on all ranks.

    The sum must be known where gradients are scaled, so each rank needs all weights: a loop that knows only its own
    exchanges them first, e.g. by `torch.distributed.all_gather_object`.

    Args:
        values: one a rank.

    Raises:
        CompositionError: none, a negative or non-finite one, or all zero.

    >>> weights = Weights([32, 32])
    >>> weights.set([32, 7])
    >>> weights.values
    (32.0, 7.0)
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values: tuple[float, ...] = ()
        self.set(values)

    def set(self, values: Sequence[float]) -> None:
        """Use these from the next step on; see the class for what is refused."""
        given = tuple(float(value) for value in values)
        if not given or not all(0 <= value < math.inf for value in given):
            raise CompositionError(f"weights {given}: give one a rank, each finite and 0 or more")
        if not any(given):
            raise CompositionError("all weights are zero, so there is nothing to average: skip the step instead")
        if self.values and len(given) != len(self.values):
            raise CompositionError(f"{len(given)} weights where there were {len(self.values)}: give one a rank")
        self.values = given

    # The values change, and ranks compare reducers by their text: what is equal and printed must not.
    def __repr__(self) -> str:
        return f"Weights of {len(self.values)} ranks"


@dataclass(frozen=True)
class Weighted(Wrapper):
    """The weighted mean sum_i w_i x_i / sum_i w_i: rank i hands n w_i / sum(w) * x_i to the inner reducer.

    One all-reduce and the same bytes as the mean. A rank of weight zero sends zeros, but what is not finite there still
    spoils the step. Weights go outside error feedback, so that what is owed is owed in weighted units:
    `Weighted(ErrorFeedback(...))`. Scaling by up to n comes before the division by n, so float16 gradients are scaled
    down by a power of two meanwhile, which brings every factor to 1 or less: what fits does not overflow.

    Args:
        inner: the reducer that averages.
        weights: one a rank; a sequence, or `Weights` that change.

    Raises:
        CompositionError: weights as for `Weights`; an inner reducer that is no mean; error feedback around it; at the
            first step, another number of weights than ranks.

    >>> import torch
    >>> from gradwire.codecs import Identity
    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> from gradwire.reducers import AllReduceExchange
    >>> ranks = Lockstep(Weighted(AllReduceExchange(Identity()), (3, 1)), flat_grain(1), world_size=2)
    >>> ranks.step([torch.tensor([4.0]), torch.tensor([8.0])])[0]
    tensor([5.])
    """

    inner: Reducer
    weights: Weights | tuple[float, ...]

    conserves_sum = False

    def __post_init__(self) -> None:
        if not self.inner.averages:
            raise CompositionError(f"{self.inner} is no mean, so weights have no meaning for it; leave them out")
        if not isinstance(self.weights, Weights):
            object.__setattr__(self, "weights", Weights(self.weights).values)

    @property
    def averages(self) -> bool:
        """False: the mean is weighted."""
        return False

    @property
    def lossless(self) -> bool:
        """False: error feedback must not think that there is nothing to it."""
        return False

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer."""
        return Weighted(inner, self.weights)

    def contraction(self, grain: Grain) -> float | None:
        """Asked by error feedback, which does not belong outside weights.

        Raises:
            CompositionError: unless error feedback is inside.
        """
        if not self.inner.keeps_input:
            raise CompositionError("weights go outside error feedback: write Weighted(ErrorFeedback(...), weights)")
        return self.inner.contraction(grain)

    def _values(self) -> tuple[float, ...]:
        return self.weights.values if isinstance(self.weights, Weights) else self.weights

    def init(self, grain: Grain, step: Step) -> State:
        """The inner reducer's.

        Raises:
            CompositionError: another number of weights than ranks.
        """
        if len(self._values()) != step.world_size:
            raise CompositionError(f"{len(self._values())} weights for {step.world_size} ranks: give one a rank")
        return self.inner.init(grain, step)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Scale, then the inner program."""
        values = self._values()
        factors = [step.world_size * value / sum(values) for value in values]
        scale = factors[step.rank]
        if x.dtype != torch.float16:  # float32 has the room that a weight needs
            y = x.mul_(scale) if self.inner.keeps_input else x * scale
            return (yield from self.inner.reduce(grain, y, state, step))
        if state:  # what is remembered must not change its unit with the weights
            reduced = yield from self.inner.reduce(grain, x.float() * scale, state, step)
            return reduced._replace(value=reduced.value.to(x.dtype))
        room = 2.0 ** -math.ceil(math.log2(max(factors)))
        reduced = yield from self.inner.reduce(grain, x * (scale * room), state, step)
        return reduced._replace(value=reduced.value / room)
