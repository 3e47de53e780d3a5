"""Weights: ranks that count for more, e.g. by the number of examples they saw."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import agreement, buffers, collective
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError, StepError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer, Wrapper
from gradwire.reducers.step import Program, Step

GIVEN: Literal["given"] = "given"
"""Weights that each rank says in each step."""


class Weights:
    """Every rank's weight, which a training loop may set anew before each step, alike on all ranks.

    The sum must be known where gradients are scaled, so each rank needs all weights. A loop that knows only its own
    takes "given" in their place, see `Weighted`.

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

    With weights "given" each rank says in each step what it counts for (`Session.weigh`): the number of its samples
    where last batches are uneven, or how far it is trusted. With means of samples as gradients and their numbers as
    weights, the result is the gradient of all samples in one batch. sum(w) is one all-reduce of a float64 a step, which
    travels before the first grain does. On a GPU the first grain waits for the device, which has to show it.

    Args:
        inner: the reducer that averages.
        weights: one a rank, a sequence, or `Weights` that change; or "given".

    Raises:
        CompositionError: weights as for `Weights`; an inner reducer that is no mean; error feedback around it; at the
            first step, another number of weights than ranks.
        StepError: in a step, alike on all ranks, with weights "given": a rank that said nothing, weights that are
            negative or not finite, by the number of their rank, or a sum of zero.

    >>> import torch
    >>> from gradwire.codecs import Identity
    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> from gradwire.reducers import AllReduceExchange
    >>> ranks = Lockstep(Weighted(AllReduceExchange(Identity()), (3, 1)), flat_grain(1), world_size=2)
    >>> ranks.step([torch.tensor([4.0]), torch.tensor([8.0])])[0]
    tensor([5.])
    >>> ranks = Lockstep(Weighted(AllReduceExchange(Identity()), "given"), flat_grain(1), world_size=2)
    >>> ranks.weigh([32, 96])
    >>> ranks.step([torch.tensor([4.0]), torch.tensor([8.0])])[0]
    tensor([7.])
    """

    inner: Reducer
    weights: Weights | tuple[float, ...] | Literal["given"]

    conserves_sum = False

    def __post_init__(self) -> None:
        if not self.inner.averages:
            raise CompositionError(f"{self.inner} is no mean, so weights have no meaning for it; leave them out")
        if isinstance(self.weights, str) and self.weights != GIVEN:
            raise CompositionError(f"weights {self.weights!r}: give one a rank, or {GIVEN!r} to be told in each step")
        if not isinstance(self.weights, Weights | str):
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

    @property
    @override
    def weighs(self) -> bool:
        return self.weights == GIVEN

    def init(self, grain: Grain, step: Step) -> State:
        """The inner reducer's.

        Raises:
            CompositionError: another number of weights than ranks.
        """
        values = self._values()
        if values is not None and len(values) != step.world_size:
            raise CompositionError(f"{len(values)} weights for {step.world_size} ranks: give one a rank")
        return self.inner.init(grain, step)

    def _values(self) -> tuple[float, ...] | None:
        """All ranks' weights, where each rank knows them."""
        if isinstance(self.weights, str):
            return None
        return self.weights.values if isinstance(self.weights, Weights) else self.weights

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Scale, then the inner program."""
        values = self._values()
        if values is None:
            scale, largest = (yield from _told(step, x.device)), float(step.world_size)
        else:
            factors = [step.world_size * value / sum(values) for value in values]
            scale, largest = factors[step.rank], max(factors)
        if x.dtype != torch.float16:  # float32 has the room that a weight needs
            y = (x if self.inner.keeps_input else buffers.copied(x)).mul_(scale)
            return (yield from self.inner.reduce(grain, y, state, step))
        if state:  # what is remembered must not change its unit with the weights
            reduced = yield from self.inner.reduce(grain, buffers.copied(x, torch.float32).mul_(scale), state, step)
            return reduced._replace(value=buffers.as_dtype(reduced.value, x.dtype))
        room = 2.0 ** -math.ceil(math.log2(largest))
        reduced = yield from self.inner.reduce(grain, buffers.copied(x).mul_(scale * room), state, step)
        return reduced._replace(value=reduced.value / room)


def _told(step: Step, device: torch.device) -> Generator[Collective, Tensor, float]:
    """n w / sum(w) of this rank, from what ranks have said in this step.

    Raises:
        StepError: weights that make no mean, alike on all ranks.
    """
    weight = math.nan if step.weight is None else float(step.weight)
    mine = torch.full((1,), weight if 0 <= weight < math.inf else math.nan, dtype=torch.float64, device=device)
    total = yield agreement.Once(collective.AllReduce(mine), of=GIVEN)
    if total.is_meta:
        return 1.0
    whole = float(total)  # the same bits on every rank, so all of them go the same way from here
    if 0 < whole < math.inf:
        return step.world_size * (weight / whole)
    said = torch.tensor([weight, float(step.weight is not None)], dtype=torch.float64, device=device)
    rows = yield agreement.Once(collective.AllGather(said.view(torch.uint8)), of=(GIVEN, "by whom"))
    raise StepError(_without_mean(rows.view(torch.float64).tolist()))


def _without_mean(said: Sequence[Sequence[float]]) -> str:
    """Why there is no mean, from each rank's weight and whether it has said one."""
    for rank, (weight, was_said) in enumerate(said):
        if not was_said:
            return (
                f"rank {rank} did not say what it counts for in this step: with weights=given every rank calls "
                "session.weigh(number) before each step begins, with 0 where it has nothing"
            )
        if not 0 <= weight < math.inf:
            return (
                f"rank {rank} gave the weight {weight:g}: give a finite number, 0 or more, such as how many samples "
                "it has"
            )
    if any(weight for weight, _ in said):
        return "the weights of this step add up to more than a float64 holds: divide all of them by one large number"
    return "all ranks gave the weight 0 in this step, so there is no mean: give one above 0, or skip the step on all"
