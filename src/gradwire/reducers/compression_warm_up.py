"""One reducer for the first steps, another from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.state import State
from gradwire.reducers.base import Program, Reducer, Step, require_whole


@dataclass(frozen=True)
class CompressionWarmUp(Reducer):
    """`before` for the first `steps` steps, then `after`, each with its own state.

    Early gradients change direction quickly, which compression with memory takes badly (PowerSGD's `start_iter`, the
    warm-up of 1-bit Adam).

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

    @property
    def keeps_input(self) -> bool:  # type: ignore[override]
        """It does where either of the two does."""
        return self.before.keeps_input or self.after.keeps_input

    @property
    def conserves_sum(self) -> bool:  # type: ignore[override]
        """Where both do: before the switch the later state is empty, and after it the earlier's stays behind."""
        return self.before.conserves_sum and self.after.conserves_sum

    @property
    def scope(self) -> Literal["flat", "tensor"]:
        """A matrix at a time where either asks for it: an elementwise reducer takes any shape."""
        return "tensor" if "tensor" in (self.before.scope, self.after.scope) else "flat"

    @property
    @override
    def shows_non_finite(self) -> bool:
        return self.before.shows_non_finite and self.after.shows_non_finite

    @property
    @override
    def lossless(self) -> bool:
        return self.before.lossless and self.after.lossless

    @property
    @override
    def averages(self) -> bool:
        return self.before.averages and self.after.averages

    @property
    @override
    def linear(self) -> bool:
        return self.before.linear and self.after.linear

    @property
    def fewest_ranks(self) -> int:
        """What the more demanding needs."""
        return max(self.before.fewest_ranks, self.after.fewest_ranks)

    @property
    @override
    def repeatable(self) -> bool:
        return self.before.repeatable and self.after.repeatable

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """The same warm-up between what the two assign."""
        return CompressionWarmUp(self.before.assign(parameter), self.after.assign(parameter), self.steps)

    def _serving(self, step: Step) -> tuple[str, Reducer]:
        return ("before", self.before) if step.index < self.steps else ("after", self.after)

    def contraction(self, grain: Grain) -> float | None:
        """The weaker of the two."""
        deltas = [self.before.contraction(grain), self.after.contraction(grain)]
        known = [delta for delta in deltas if delta is not None]
        return min(known) if len(known) == len(deltas) else None

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State(before=self.before.init(grain, step), after=self.after.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The program of the one that serves this step."""
        name, reducer = self._serving(step)
        if not reducer.keeps_input:
            x = x.to(grain.dtype)  # a driver's buffer is float32 where the other one keeps it: send no more than came
        reduced = yield from reducer.reduce(grain, x, state.part(name), step)
        return reduced._replace(state=State({**state, name: reduced.state}))
