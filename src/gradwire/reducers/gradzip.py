"""GradZip: low rank by alternating least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.state import Leaf, State
from gradwire.kernels import low_rank
from gradwire.reducers.low_rank import (
    LowRank,
    SentFactors,
    check_rank,
    drawn,
    factor_part,
    mean_of_factors,
    unit_columns,
)
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class GradZip(LowRank):
    """Alternating matrix factorisation with all-reduced factors (Cho et al. 2019), regularised least squares.

    For M of shape (rows, columns) and the last step's Q of shape (columns, rank), a sweep of alternating least squares:

        P = mean(M Q (Q^T Q + a I)^-1),   Q_local = M^T P (P^T P + b I)^-1,   Q = mean(Q_local),   mean = P Q^T

    with a and b the regularisation times the mean of the diagonal of Q^T Q and P^T P. Each factor is the minimiser of
    |M - P Q^T|^2 + a |P|^2 for the mean M while the other is held, and linear in M, so the means of the ranks' own
    solutions are the solution for the mean. Without regularisation P spans what PowerSGD's spans and the product is
    the same; with it nothing has to be made orthonormal, and directions weaker than the regularisation shrink, which
    error feedback sends later. Bytes: (rows + columns) * rank floats.

    Where it deviates: factors are regularised relative to their size, so that no constant has to fit the gradients'
    scale, and P, which follows from Q, is not kept between steps.

    Args:
        rank: r, at least 1.
        regularisation: above 0; larger is better conditioned and shrinks more.
        min_compression_rate: a matrix is compressed where rows * columns > rate * rank * (rows + columns).

    Raises:
        CompositionError: rank below 1, a rate or a regularisation that is not positive.

    References:
        Cho, Muthusamy, Nemanich & Puri 2019, "GradZip: gradient compression using alternating matrix factorization for
        large-scale deep learning".

    >>> from gradwire.core.grain import ParameterSpec
    >>> GradZip(2).assign(ParameterSpec("bias", (64,), torch.float32, torch.device("cpu")))
    AllReduceExchange(codec=Identity())
    """

    rank: int = 4
    regularisation: float = 1e-2
    min_compression_rate: float = 1.0

    def __post_init__(self) -> None:
        check_rank(self.rank, self.min_compression_rate)
        if not self.regularisation > 0:
            raise CompositionError(
                f"regularisation {self.regularisation} is not positive: factors of a matrix of lower rank have no "
                "unique least squares; for none use powersgd"
            )

    def init(self, grain: Grain, step: Step) -> State:
        """Q transposed: Gaussian columns from the key, the same on every rank."""
        return State(Qt=Leaf(drawn(grain, self.rank, grain.shape[2], Key(step.seed, 0, grain.name, "init")), "matrix"))

    def contraction(self, grain: Grain) -> float | None:
        """As for PowerSGD, 1 / min(rows, columns) once Q has found the leading direction, less what is shrunk."""
        return 1.0 / max(1, min(grain.shape[-2:])) / (1 + self.rank * self.regularisation) ** 2

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Two all-reduces: of P, then of Q."""
        M = x.view(grain.shape).float()
        Pt_part = factor_part(low_rank.project_columns(M, self._solved(state.tensor("Qt"))), grain, step)
        Pt = (yield collective.AllReduce(Pt_part, consumable=True)).float()
        Qt_part = factor_part(low_rank.project_rows(self._solved(Pt), M), grain, step)
        Qt = (yield collective.AllReduce(Qt_part)).float()
        mean, sent = mean_of_factors(Pt, Qt, step), SentFactors(Pt, Qt_part, step.world_size)
        new = State(Qt=Leaf(unit_columns(Qt, Key(step.seed, step.index, grain.name, "revive")), "matrix"))
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, new)

    def _solved(self, Ft: Tensor) -> Tensor:
        """(F^T F + a I)^-1 F^T, in float64; zero where F is zero. Only what this rank sends depends on its rounding."""
        Dt = Ft.double()
        gram = Dt @ Dt.mT
        diagonal = gram.diagonal(dim1=1, dim2=2)
        # A factor of zeros would leave nothing to invert; 1 / (2 sqrt(a)), the most of the result, fits float32.
        a = (self.regularisation * diagonal.mean(1)).clamp_min(torch.finfo(torch.float32).tiny ** 2)
        inverse = torch.linalg.inv_ex(gram + torch.diag_embed(a[:, None].expand_as(diagonal))).inverse
        return (inverse @ Dt).float()
