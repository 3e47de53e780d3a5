"""The exchange of Dion: momentum that ranks keep apart, and an update of low rank with orthonormal factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.key import Key
from gradwire.core.state import Leaf, State
from gradwire.kernels import low_rank
from gradwire.kernels.rounding import square_root
from gradwire.reducers.base import Reducer
from gradwire.reducers.exchange import PLAIN
from gradwire.reducers.low_rank import LowRank, SentFactors, check_rank, drawn, factor_part, unit_columns
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class OrthonormalMomentum(LowRank):
    """Direction of an update of low rank, orthonormal or nearly so, out of momentum that every rank keeps for itself.

    For gradients G_i of shape (rows, columns), each rank's momentum M_i, and the last step's Q of shape (columns, rank)
    (Ahn, Xu et al. 2025):

        B_i = M_i + G_i,   P = orth(mean_i B_i Q),   R = mean_i B_i^T P,   M_i = B_i - (1 - momentum) P R^T
        Q = R with columns of length 1,   result = sqrt(rows / columns) P Q^T

    With `right="orthonormal"` Q is an orthonormal basis of what R spans: all singular values of P Q^T are then 1, where
    normalised columns let them reach sqrt(rank). That is the right factor of Orth-Dion (Nakamori et al. 2026), and the
    one thing that is taken from it. Its momentum is another one, R_i = beta (B_i - P P^T B_i), which keeps nothing of
    what a step has used, and its update has no sqrt(rows / columns).

    The mean of the momenta is what one process would have that saw the mean gradient, since everything that is
    exchanged is linear in B_i. The result is no mean and not linear. Bytes: (rows + columns) * rank floats.

    Between steps columns of Q are scaled by powers of two, which P does not depend on, and columns of zeros are redrawn
    from the key, so a layer whose gradient was zero gets through when it comes back. What is no matrix, and a matrix
    whose factors are no smaller than itself, rows * columns <= rank * (rows + columns), go uncompressed, as means.

    Owned state: `x` becomes the new momentum.

    Args:
        rank: columns of the factors, at least 1.
        momentum: share of what a step has used that stays in the momentum, in [0, 1).
        right: "normalised" (Dion) or "orthonormal" (Dion with orthonormal right factors).

    Raises:
        CompositionError: rank below 1, momentum out of range, or an unknown `right`.

    References:
        Ahn, Xu et al. 2025, "Dion: distributed orthonormalized updates";
        Nakamori et al. 2026, "Orth-Dion: eliminating geometric mismatch in distributed low-rank spectral optimization",
        arXiv:2605.16341, of which it has the orthonormal right factor alone.

    >>> from gradwire.core.grain import matrix_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(OrthonormalMomentum(rank=1), matrix_grain(2, 2), world_size=2)
    >>> ranks.step([torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[4.0, 0.0], [0.0, 0.0]]])])[0].abs()
    tensor([[[1., 0.],
             [0., 0.]]])
    """

    rank: int
    momentum: float = 0.95
    right: Literal["normalised", "orthonormal"] = "normalised"
    min_compression_rate: ClassVar[float] = 1.0  # type: ignore[misc]

    keeps_input: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = False  # what was used stays in part, and lengths are lost

    def __post_init__(self) -> None:
        check_rank(self.rank, 1.0)
        if not 0.0 <= self.momentum < 1.0:
            raise CompositionError(f"momentum {self.momentum} is outside [0, 1)")
        if self.right not in ("normalised", "orthonormal"):
            raise CompositionError(f"right {self.right!r} is neither 'normalised' nor 'orthonormal'")

    @property
    def averages(self) -> bool:
        """False: lengths are lost."""
        return False

    @property
    @override
    def carries_momentum(self) -> bool:
        return True

    @property
    def shows_non_finite(self) -> bool:
        """True: what is not finite in B is not finite in P or in R, nor in the result."""
        return True

    def init(self, grain: Grain, step: Step) -> State:
        """Momentum of zeros, and Gaussian columns from the key, the same on every rank."""
        momentum = torch.zeros(grain.numel, dtype=torch.float32, device=grain.device)
        return _state(momentum, drawn(grain, self.rank, grain.shape[2], Key(step.seed, 0, grain.name, "init")))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Two all-reduces, of P and of R."""
        B = x.float().view(grain.shape).add_(state.tensor("momentum").view(grain.shape))
        BQt = low_rank.project_columns(B, state.tensor("Qt"))
        Pt = low_rank.orthonormalise((yield collective.AllReduce(factor_part(BQt, grain, step))).float())
        Rt = (yield collective.AllReduce(factor_part(low_rank.project_rows(Pt, B), grain, step))).float()
        low_rank.subtract_low_rank_(B, Pt, Rt, 1.0 - self.momentum)
        Qt = low_rank.orthonormalise(Rt) if self.right == "orthonormal" else unit_length(Rt)
        result = buffers.like(B)
        _, rows, columns = grain.shape
        low_rank.low_rank_(result, Pt, Qt, math.sqrt(rows / columns))
        fresh = unit_columns(Rt, Key(step.seed, step.index, grain.name, "revive"))
        return Reduced(buffers.as_dtype(result, x.dtype).view(x.shape), SentFactors(Pt, Rt), _state(B.view(-1), fresh))


class OrthonormalMomentumOfAll(OrthonormalMomentum):
    """`OrthonormalMomentum` of every matrix, with min(rank, rows, columns) columns, as Dion's authors have it.

    A class of its own and no option of the other one, whose `repr` saved states hold.

    >>> from gradwire.core.grain import ParameterSpec
    >>> OrthonormalMomentumOfAll(16).assign(ParameterSpec("w", (24, 12), torch.float32, torch.device("cpu")))
    OrthonormalMomentumOfAll(rank=16, momentum=0.95, right='normalised')
    """

    @override
    def assign(self, parameter: ParameterSpec) -> Reducer:
        return self if len(parameter.shape) > 1 else PLAIN


def unit_length(vectors: Tensor) -> Tensor:
    """Rows of (batch, rank, length) at length 1, those of zeros left; the same bits on every processor.

    >>> unit_length(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]))
    tensor([[[0.6000, 0.8000],
             [0.0000, 0.0000]]])
    """
    length = square_root(low_rank.products(vectors, vectors))
    return buffers.copied(
        buffers.copied(vectors, torch.float64).div_(torch.where(length == 0, 1.0, length)[:, :, None]), torch.float32
    )


def _state(momentum: Tensor, Qt: Tensor) -> State:
    return State(momentum=Leaf(momentum, "element", owed=True, momentum=True), Qt=Leaf(Qt, "matrix"))
