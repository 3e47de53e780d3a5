"""Truncated singular value decomposition: the best that low rank can do, for reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers, collective
from gradwire.core.grain import Grain
from gradwire.core.payload import Field, Layout, Payload
from gradwire.core.state import State
from gradwire.kernels import low_rank
from gradwire.reducers.low_rank import LowRank, SentFactors, check_rank, wire_dtype
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class SVD(LowRank):
    """Each rank sends the best rank-r approximation of its own matrix, U_r S_r and V_r^T, to all ranks.

        mean = 1/n sum over ranks, in rank order, of (U_r S_r) V_r^T

    No paper has it as a method: it is the optimum of Eckart & Young 1936 for every single rank, and the yardstick that
    PowerSGD approaches; the mean has rank n r at most. Deterministic, a contraction with delta = r / min(rows,
    columns), since the r largest of so many squared singular values are at least their share. A full decomposition
    takes hundreds of times as long as a step of PowerSGD: this is for tables of quality, not for training. Bytes a rank
    sends: (n - 1) (rows + columns) r floats.

    Args:
        rank: r, at least 1.
        min_compression_rate: a matrix is compressed where rows * columns > rate * rank * (rows + columns).

    Raises:
        CompositionError: rank below 1, or a rate that is not positive.

    References:
        Eckart & Young 1936, "The approximation of one matrix by another of lower rank".

    >>> from gradwire.core.grain import ParameterSpec
    >>> SVD(2).assign(ParameterSpec("bias", (64,), torch.float32, torch.device("cpu")))
    AllReduceExchange(codec=Identity())
    """

    rank: int = 4
    min_compression_rate: float = 1.0

    def __post_init__(self) -> None:
        check_rank(self.rank, self.min_compression_rate)

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def contraction(self, grain: Grain) -> float | None:
        """r / min(rows, columns), less what 16-bit factors round away."""
        share = min(1.0, self.rank / max(1, min(grain.shape[-2:])))
        return share if wire_dtype(grain.dtype) == torch.float32 else share / 2

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        layout = self._layout(grain)
        wire = layout.empty(x.device)
        own = _factors(layout.views(wire), grain)
        for i, M in enumerate(x.view(grain.shape)):  # one at a time: U and V are as large as M
            _decompose(M.float(), own[0][i], own[1][i])
        rows = yield collective.AllGather(wire)
        mean = buffers.zeros(grain.shape, torch.float32, x.device)
        for row in collective.by_rank(rows):
            Pt, Qt = _factors(layout.views(row), grain)
            low_rank.low_rank_(mean, Pt.float(), Qt.float(), 1.0 / step.world_size, add=True)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), SentFactors(*own), state)

    def _layout(self, grain: Grain) -> Layout:
        """First P^T, and then Q^T."""
        batch, rows, columns = grain.shape
        rank, dtype = min(self.rank, rows, columns), wire_dtype(grain.dtype)
        return Layout((Field(dtype, batch * rows * rank), Field(dtype, batch * rank * columns)))


def _factors(payload: Payload, grain: Grain) -> tuple[Tensor, Tensor]:
    batch, rows, columns = grain.shape
    Pt, Qt = payload
    rank = Pt.numel() // (batch * rows) if batch * rows else 0
    return Pt.view(batch, rank, rows), Qt.view(batch, rank, columns)


def _decompose(M: Tensor, Pt: Tensor, Qt: Tensor) -> None:
    """Write (U_r S_r)^T and V_r^T of M; NaN where M is not finite, which the decomposition would refuse."""
    finite = torch.isfinite(M)
    U, s, Vt = torch.linalg.svd(torch.where(finite, M, 0.0), full_matrices=False)
    rank = Pt.shape[0]
    Pt.copy_(torch.where(finite.all(), U[:, :rank] * s[:rank], float("nan")).mT)
    Qt.copy_(Vt[:rank])
