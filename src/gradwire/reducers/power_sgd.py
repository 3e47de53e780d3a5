"""PowerSGD: low-rank gradients by one step of subspace iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.codecs.cast import Identity
from gradwire.core import collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.key import Key
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Program, Reduced, Reducer, Step
from gradwire.reducers.exchange import AllReduce


@dataclass(frozen=True, eq=False)
class SentFactors:
    """P Q_local^T: what this rank's matrix contributes to the mean."""

    P: Tensor
    Q_local: Tensor

    def subtract_from(self, x: Tensor) -> None:
        """x -= P Q_local^T."""
        x.baddbmm_(self.P.to(x.dtype), self.Q_local.to(x.dtype).mT, alpha=-1.0)


@dataclass(frozen=True)
class PowerSGD(Reducer):
    """Rank-r approximation of the mean gradient (Vogels, Karimireddy & Jaggi 2019, Algorithm 1), batched.

    For M of shape (rows, columns) and the last step's Q of shape (columns, rank):

        P = orthogonalise(mean(M Q)),   Q_local = M^T P,   Q = mean(Q_local),   mean = P Q^T

    What this rank sent is P Q_local^T, so error feedback keeps M - P Q_local^T: the mean of what was sent *is* the
    mean, and no difference between a rank's gradient and the mean piles up. Bytes: (rows + columns) * rank floats.
    Factors of 16-bit gradients travel in the gradients' dtype, others as float32; all arithmetic is float32. Matrices
    of equal shape are one batch. P is made orthonormal by Householder QR, which stays finite for rank-deficient and
    all-zero matrices; columns of Q that vanish are redrawn from the key, so a layer whose gradient was zero gets
    through when it comes back. Parameters too small to gain go uncompressed in one flat all-reduce.

    Args:
        rank: r, at least 1.
        min_compression_rate: a matrix is compressed where rows * columns > rate * rank * (rows + columns).

    Raises:
        CompositionError: rank below 1, or a rate that is not positive.

    >>> PowerSGD(rank=2).assign(ParameterSpec("bias", (64,), torch.float32, torch.device("cpu")))
    AllReduce(codec=Identity())
    """

    rank: int = 4
    min_compression_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise CompositionError(f"rank {self.rank} is below 1; 1, 2 or 4 are usual")
        if not self.min_compression_rate > 0:
            raise CompositionError(f"min_compression_rate {self.min_compression_rate} is not positive")

    @property
    def scope(self) -> Literal["flat", "tensor"]:
        """Matrices."""
        return "tensor"

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """Itself for matrices that gain by it, else an uncompressed all-reduce."""
        rows, columns = parameter.matrix_shape
        gains = rows * columns > self.min_compression_rate * self.rank * (rows + columns)
        # A rate below 1 would let factors through that are as large as the matrix: then nothing is gained.
        low = self.rank < min(rows, columns)
        return self if len(parameter.shape) > 1 and gains and low else AllReduce(Identity())

    def init(self, grain: Grain, step: Step) -> State:
        """Q: Gaussian columns from the key, the same on every rank."""
        batch, rows, columns = grain.shape
        key = Key(step.seed, 0, grain.name, "init")
        return State(Q=Leaf(gaussian(key, (batch, columns, min(self.rank, rows, columns)), grain.device), "matrix"))

    def contraction(self, grain: Grain) -> float | None:
        """1 / min(rows, columns) once Q has found the leading direction; no bound holds for a single step of it.

        Error feedback is part of the method and proven with it (Vogels 2019, Section 3); this is the bound of the
        best rank-1 approximation.
        """
        return min(1.0, 1.0 / max(1, min(grain.shape[-2:])))

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Two all-reduces: of P, then of Q."""
        leaf = state["Q"]
        assert isinstance(leaf, Leaf)
        M = x.view(grain.shape).float()
        wire = _wire_dtype(grain.dtype)
        MQ_part = torch.bmm(M, leaf.tensor).div_(step.world_size).to(wire)
        MQ = yield collective.AllReduce(MQ_part, consumable=True)
        P = torch.linalg.qr(MQ.float()).Q
        Q_part = torch.bmm(M.mT, P).div_(step.world_size).to(wire)
        Q_local = Q_part.float() * step.world_size  # as the wire carries it, so that what rounding took stays owed
        Q = (yield collective.AllReduce(Q_part, consumable=True)).float()
        mean = torch.bmm(P, Q.mT).to(x.dtype).view(x.shape)
        return Reduced(mean, SentFactors(P, Q_local), State(Q=Leaf(self._revive(Q, grain, step), "matrix")))

    def _revive(self, Q: Tensor, grain: Grain, step: Step) -> Tensor:
        """Q with vanished columns redrawn: a zero column would stay zero for ever."""
        key = Key(step.seed, step.index, grain.name, "revive")
        fresh = gaussian(key, (1, *Q.shape[1:]), Q.device)
        vanished = torch.linalg.vector_norm(Q, dim=1, keepdim=True) <= torch.finfo(Q.dtype).tiny ** 0.5
        return torch.where(vanished, fresh, Q)


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize == 2 else torch.float32


def gaussian(key: Key, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw standard normal numbers that depend on the key alone.

    Drawn on the CPU, so that every device gets the same.
    """
    if device.type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator().manual_seed(key.bits & (2**63 - 1))
    return torch.randn(shape, generator=generator).to(device)
