"""One reducer for the first steps, another from then on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.requirements import require_whole
from gradwire.reducers.step import Program, Step


@dataclass(frozen=True)
class CompressionWarmUp(Reducer):
    """`before` for the first `steps` steps, then `after`, each with its own state.

    Early gradients change direction quickly, which compression with memory takes badly (PowerSGD's `start_iter`, the
    warm-up of 1-bit Adam). What was sent is conserved where both conserve it: the later state is empty before the
    switch, and the earlier one stays as it is after it.

    Args:
        before: usually uncompressed or 16 bits.
        after: the reducer proper.
        steps: how many steps `before` serves, at least 0.

    Raises:
        CompositionError: a negative number of steps, or a reducer that `scatters`.
    """

    before: Reducer
    after: Reducer
    steps: int

    def __post_init__(self) -> None:
        for part in (self.before, self.after):
            require_whole(part, "a warm-up")
        if self.steps < 0:
            raise CompositionError(f"a warm-up of {self.steps} steps: it must be 0 or more")

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """The same warm-up between what the two assign."""
        return CompressionWarmUp(self.before.assign(parameter), self.after.assign(parameter), self.steps)

    def _serving(self, step: Step) -> tuple[str, Reducer]:
        return ("before", self.before) if step.index < self.steps else ("after", self.after)

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State(before=self.before.init(grain, step), after=self.after.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The program of the one that serves this step."""
        name, reducer = self._serving(step)
        if not reducer.keeps_input:
            # A driver's buffer is float32 where the other one keeps it: send no more than came.
            x = buffers.as_dtype(x, grain.dtype)
        reduced = yield from reducer.reduce(grain, x, state.part(name), step)
        return reduced._replace(state=State({**state, name: reduced.state}))
