"""A reducer for each stretch of steps, inside a wrapper that keeps what they owe."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, flat_grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.requirements import require_whole
from gradwire.reducers.step import Program, Step


@dataclass(frozen=True)
class Scheduled(Reducer):
    """`stages[0]` for its number of steps, then the next; the last one for ever.

    Stages remember nothing, so the residual of an `ErrorFeedback` or `MomentumCorrection` around all of them goes on
    through every change: `CompressionWarmUp` is for reducers with states of their own. Which stage serves depends on
    the step's number alone, so all ranks change together.

    Args:
        stages: pairs of (steps, reducer). The last one's number is not read.

    Raises:
        CompositionError: no stages, a negative number of steps, or a stage that keeps state or `scatters`.

    >>> from gradwire.codecs import TopK
    >>> from gradwire.reducers import AllGatherExchange
    >>> schedule = Scheduled(((10, AllGatherExchange(TopK(0.25))), (0, AllGatherExchange(TopK(0.01)))))
    >>> schedule.serving(9).codec.density, schedule.serving(10).codec.density
    (0.25, 0.01)
    """

    stages: tuple[tuple[int, Reducer], ...]

    def __post_init__(self) -> None:
        if not self.stages or any(steps < 0 for steps, _ in self.stages):
            raise CompositionError("a schedule needs at least one stage, and steps that are 0 or more")
        for _, reducer in self.stages:
            require_whole(reducer, "a schedule")
            ranks = reducer.rank_multiple * max(2, reducer.fewest_ranks)
            if reducer.keeps_input or reducer.init(flat_grain(8), Step(0, 0, ranks)):
                raise CompositionError(
                    f"{reducer} keeps state, which would be left behind when its stage ends: put error feedback around "
                    "the schedule, or use CompressionWarmUp"
                )

    def serving(self, index: int) -> Reducer:
        """Return the reducer of a step."""
        for steps, reducer in self.stages[:-1]:
            if index < steps:
                return reducer
            index -= steps
        return self.stages[-1][1]

    @property
    def shows_non_finite(self) -> bool:
        """False, whatever its stages say: the ranks agree on a flag."""
        return False

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The program of the stage that serves this step."""
        return (yield from self.serving(step.index).reduce(grain, x, state, step))
