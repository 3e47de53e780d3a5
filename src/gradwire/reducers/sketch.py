"""Random sketches of matrices: M S with S drawn anew each step, so that no factor has to be found or kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.cast import Identity
from gradwire.core import buffers, collective
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.key import Key
from gradwire.core.state import State
from gradwire.kernels import low_rank
from gradwire.reducers.base import Reducer
from gradwire.reducers.exchange import AllReduceExchange
from gradwire.reducers.low_rank import SentFactors, check_rank, factor_part, mean_of_factors
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class Sketch(Reducer):
    """Project each matrix on r random directions that all ranks draw alike: one all-reduce of rows * r numbers.

    For M of shape (rows, columns) and S of shape (columns, r) with orthonormal columns, uniform over subspaces:

        mean = mean(M S) S^T

    M S S^T is a projection of M, so it is a contraction with delta = r / columns in expectation over S, and error
    feedback sends what is left in later steps, for which S is drawn anew: with one S for ever, the part of the
    gradient that it does not see would pile up. (A Gaussian S decoded with its transpose is no contraction: its
    eigenvalues are about columns / r.) Linear, so the mean of what is sent is the mean. Nothing is kept between steps
    and nothing depends on past gradients. Matrices of equal shape share S. Parameters with fewer than two dimensions
    or no more than r columns go uncompressed; for flat tensors there is `Hadamard`. No paper has it as a method.

    Args:
        rank: r, at least 1.

    Raises:
        CompositionError: rank below 1.

    References:
        The subspace is that of Halko, Martinsson & Tropp 2011, "Finding structure with randomness", section 4.1, with
        the projection on the side of the random matrix itself.

    >>> Sketch(8).assign(ParameterSpec("w", (64, 64), torch.float32, torch.device("cpu")))
    Sketch(rank=8)
    """

    rank: int = 32

    keyed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rank(self.rank, 1.0)

    @property
    @override
    def scope(self) -> Literal["flat", "tensor"]:
        return "tensor"

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """Itself for matrices of more than r columns, else an uncompressed all-reduce."""
        compresses = len(parameter.shape) > 1 and parameter.numel > 0 and self.rank < parameter.matrix_shape[1]
        return self if compresses else AllReduceExchange(Identity())

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def contraction(self, grain: Grain) -> float | None:
        """r / columns, in expectation over S."""
        return min(1.0, self.rank / max(1, grain.shape[-1]))

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        M = x.view(grain.shape).float()
        St = directions(step.key(grain, "sketch").shared, grain.shape[2], self.rank, x.device)
        St = St.expand(grain.shape[0], -1, -1)
        part = factor_part(low_rank.project_columns(M, St), grain, step)
        MSt = (yield collective.AllReduce(part)).float()
        mean, sent = mean_of_factors(MSt, St, step), SentFactors(part, St, step.world_size)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, state)


def directions(key: Key, columns: int, rank: int, device: torch.device) -> Tensor:
    """S transposed, (min(rank, columns), columns): orthonormal rows, uniform over subspaces, as Gaussian ones are."""
    return low_rank.orthonormalise(kernels.gaussian(key.stream_seed, (1, min(rank, columns), columns), device))[0]
