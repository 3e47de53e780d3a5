"""Error feedback whose residual is kept as two factors of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.key import Key
from gradwire.core.state import Leaf, State
from gradwire.kernels import low_rank
from gradwire.reducers.base import Reducer
from gradwire.reducers.error_feedback import ErrorFeedback
from gradwire.reducers.low_rank import drawn, gains, unit_columns
from gradwire.reducers.requirements import require_whole
from gradwire.reducers.step import Program, Step


@dataclass(frozen=True)
class FactoredErrorFeedback(ErrorFeedback):
    """Error feedback that keeps each matrix's residual E as two factors of rank r, and loses the rest of it.

        Y = X + decay * P Q^T,   E = Y - sent(Y),   P' = orthogonalise(E Q),   Q' = E^T P'

    This is one step of subspace iteration on E, which begins where the last one ended, as in PowerSGD. But each rank
    does it for itself, and sends nothing. (rows + columns) r floats take the place of rows * columns. P' Q'^T = P' P'^T
    E is a projection of E, so the residual is bounded as without factors; but what lies outside its span is lost at
    once: nothing is conserved, and the residual of top-k, which is of full rank, is kept in part only. On the digits
    task with `topk:0.01` (4 ranks, 3 seeds, 99.2% uncompressed) accuracy was 95.3% without error feedback, 96.0% with
    rank 4, 97.2% with rank 8 and 98.4% with all of the residual: take `residual=bf16` first, this where half is too
    much.

    Parameters whose factors would be no smaller have an ordinary residual. After a change of the world size every rank
    owes what rank 0 owed.

    Args:
        inner: a reducer whose codec is a contraction.
        decay: in (0, 1].
        rank: r, at least 1.

    Raises:
        CompositionError: as `ErrorFeedback`, a rank below 1, or a reducer that `scatters`.

    References:
        Vogels, Karimireddy & Jaggi 2019, "PowerSGD", Algorithm 1, for the iteration.

    >>> from gradwire.codecs import TopK
    >>> from gradwire.reducers import AllGatherExchange
    >>> parameter = ParameterSpec("bias", (64,), torch.float32, torch.device("cpu"))
    >>> type(FactoredErrorFeedback(AllGatherExchange(TopK(0.01)), rank=8).assign(parameter)).__name__
    'ErrorFeedback'
    """

    rank: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self.inner, "a residual of matrices")
        if self.rank < 1:
            raise CompositionError(f"a residual of rank {self.rank} remembers nothing: give 1 or more, or ef=off")

    @property
    @override
    def scope(self) -> Literal["flat", "tensor"]:
        return "tensor"

    @property
    def conserves_sum(self) -> bool:  # type: ignore[override]
        """False: what factors do not say is lost."""
        return False

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """Itself where factors are smaller than the parameter, else an ordinary residual."""
        inner = self.inner.assign(parameter)
        if inner.lossless:
            return inner
        if gains(parameter, self.rank, 1.0):
            return self if inner is self.inner else self.around(inner)
        return ErrorFeedback(inner, self.decay)

    def around(self, inner: Reducer) -> Reducer:
        """The same around another reducer; where that loses nothing, that reducer alone."""
        return inner if inner.lossless else FactoredErrorFeedback(inner, self.decay, self.rank)

    def init(self, grain: Grain, step: Step) -> State:
        """A residual of zero, with columns to begin the iteration from, beside the inner state."""
        batch, rows, columns = grain.shape
        rank = min(self.rank, rows, columns)
        Pt = torch.zeros(batch, rank, rows, dtype=torch.float32, device=grain.device)
        Qt = drawn(grain, self.rank, columns, Key(step.seed, 0, grain.name, "residual"))
        return self._state(Pt, Qt, self.inner.init(grain, step))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The inner program on X + P Q^T."""
        Pt, Qt = state.tensor("Pt"), state.tensor("Qt")
        y = x.float().view(grain.shape)
        low_rank.low_rank_(y, Pt, Qt, self.decay, add=True)
        reduced = yield from self.inner.reduce_keeping(grain, y, state.part("inner"), step)
        start = unit_columns(Qt, Key(step.seed, step.index, grain.name, "residual"))
        found = low_rank.orthonormalise(low_rank.project_columns(y, start))
        new = self._state(found, low_rank.project_rows(found, y), reduced.state)
        return reduced._replace(value=buffers.as_dtype(reduced.value, x.dtype).view(x.shape), state=new)

    def _state(self, Pt: Tensor, Qt: Tensor, inner: State) -> State:
        return State(Pt=Leaf(Pt, "matrix"), Qt=Leaf(Qt, "matrix", scaled=True), inner=inner)
