"""PowerSGD: low-rank gradients by steps of subspace iteration."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.block_int import BlockInt
from gradwire.core import buffers, collective
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, flat_grain
from gradwire.core.key import Key
from gradwire.core.state import Leaf, State
from gradwire.kernels import low_rank
from gradwire.reducers.low_rank import (
    FACTOR_DTYPES,
    LowRank,
    SentFactors,
    check_rank,
    drawn,
    factor_part,
    mean_of_factors,
    unit_columns,
)
from gradwire.reducers.step import Program, Reduced, Step
from gradwire.reducers.two_shot import TwoShot

FACTOR_BITS = {"int8": 8, "int6": 6, "int4": 4}
FACTOR_BLOCK = 64
"""Elements of a factor's row that share a scale."""


class _Shared(NamedTuple):
    """A factor (batch, rank, length) of the mean, and of this rank's part in it, to be multiplied by `scale`."""

    mean: Tensor
    part: Tensor
    scale: float


class _Factors(NamedTuple):
    """P transposed (batch, rank, rows), and Q transposed."""

    Pt: Tensor
    Qt: _Shared


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Rank-r approximation of the mean gradient (Vogels, Karimireddy & Jaggi 2019, Algorithm 1), batched.

    For M of shape (rows, columns) and the last step's Q of shape (columns, rank):

        P = orthogonalise(mean(M Q)),   Q_local = M^T P,   Q = mean(Q_local),   mean = P Q^T

    What this rank sent is P Q_local^T, so error feedback keeps M - P Q_local^T: the mean of what was sent *is* the
    mean, and of the difference between a rank's gradient and the mean only what lies outside the span of P is kept.
    Where it deviates: the authors' code and PyTorch keep M - P Q^T, all of it, which owes the same in sum: that is
    `sent="mean"`. Q is scaled between steps, and `momentum` and `factors` are of no paper (see below). Bytes:
    (rows + columns) * rank floats an iteration. Factors of 16-bit gradients travel in the gradients' dtype, others as
    float32, or all as `factors` says; all arithmetic is float32. In 16 bits twice the rank costs the same: rounding P
    is harmless, since every rank orthogonalises the same sum, what rounding takes from its part of Q a rank owes, and
    only the rounding of the sum itself is lost, as it is of gradients in 16 bits. Factors in 8 bits or fewer take two
    shots, since integers with block scales cannot be summed on the way: two collectives for one, and less than half
    the bytes of 16 bits. Here nothing is lost: what the second rounding takes from its shard of Q the shard's owner
    owes, as a multiple of P. Matrices of one shape are one batch.

    P is made orthonormal by `kernels.low_rank.orthonormalise`, finite for rank-deficient and all-zero matrices. Between
    steps each column of Q is scaled by a power of two to a largest magnitude in [1, 2): that changes no span, and MQ
    then is of the size of M and not of its square, which half precision may not hold. Columns that vanish are redrawn
    from the key, so a layer whose gradient was zero gets through when it comes back. Parameters too small to gain go
    uncompressed in one flat all-reduce.

    Args:
        rank: r, at least 1.
        min_compression_rate: a matrix is compressed where rows * columns > rate * rank * (rows + columns).
        iterations: steps of subspace iteration on each gradient; every one costs two all-reduces more.
        warm_start: begin with the last step's Q; else with one drawn anew each step.
        momentum: share, in [0, 1), of the start before in the next: Q' = (1 - momentum) * Q + momentum * Q_before,
            after signs are made to agree, since those of P's columns are arbitrary. Not in the paper.
        sent: "local" or "mean", what error feedback takes for sent; see above.
        factors: what the factors travel in: "own", "bf16", "fp16", or in blocks of 64 integers with a scale "int8",
            "int6" or "int4".

    Raises:
        CompositionError: rank or iterations below 1, a rate that is not positive, momentum out of range or without
            warm start, unknown `sent` or `factors`.

    References:
        Vogels, Karimireddy & Jaggi 2019, "PowerSGD: practical low-rank gradient compression for distributed
        optimization".

    >>> from gradwire.core.grain import ParameterSpec
    >>> PowerSGD(rank=2).assign(ParameterSpec("bias", (64,), torch.float32, torch.device("cpu")))
    AllReduceExchange(codec=Identity())
    """

    rank: int = 4
    min_compression_rate: float = 1.0
    iterations: int = 1
    warm_start: bool = True
    momentum: float = 0.0
    sent: Literal["local", "mean"] = "local"
    factors: Literal["own", "bf16", "fp16", "int8", "int6", "int4"] = "own"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.min_compression_rate)
        if self.iterations < 1:
            raise CompositionError(f"iterations {self.iterations} is below 1; 1 is usual with a warm start")
        if not 0.0 <= self.momentum < 1.0:
            raise CompositionError(f"momentum {self.momentum} is outside [0, 1)")
        if self.momentum and not self.warm_start:
            raise CompositionError("momentum of Q needs warm_start=True: without it no Q outlives its step")
        if self.sent not in ("local", "mean"):
            raise CompositionError(f"sent {self.sent!r} is neither 'local' nor 'mean'")
        if self.factors not in FACTOR_DTYPES | FACTOR_BITS:
            raise CompositionError(f"factors {self.factors!r} is none of {', '.join(FACTOR_DTYPES | FACTOR_BITS)}")

    @property
    def sums_in_16_bits(self) -> bool:
        """Where the factors are of 16 bits."""
        return FACTOR_DTYPES.get(self.factors) is not None

    @property
    def shows_non_finite(self) -> bool:
        """True where its factors do: what is not finite in M is not finite in a column of P^T M, whatever P is."""
        return self.factors not in FACTOR_BITS or self._integers.shows_non_finite

    def init(self, grain: Grain, step: Step) -> State:
        """Q transposed: Gaussian columns from the key, the same on every rank."""
        if not self.warm_start:
            return State()
        return State(Qt=Leaf(drawn(grain, self.rank, grain.shape[2], Key(step.seed, 0, grain.name, "init")), "matrix"))

    def contraction(self, grain: Grain) -> float | None:
        """1 / min(rows, columns) once Q has found the leading direction; no bound holds for a single step of it.

        Error feedback is part of the method and proven with it (Vogels 2019, Section 3); this is the bound of the
        best rank-1 approximation. With quantised factors it is that bound times the quantiser's: P has orthonormal
        columns, so the approximation loses exactly what Q loses.
        """
        best = min(1.0, 1.0 / max(1, min(grain.shape[-2:])))
        if self.factors not in FACTOR_BITS:
            return best
        kept = self._integers.contraction(grain)
        return None if kept is None else best * kept

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Two exchanges an iteration: of P, then of Q."""
        M = x.view(grain.shape).float()
        start = self._start(grain, state, step)
        found = yield from self._iterate(M, start, grain, step)
        for i in range(1, self.iterations):
            again = unit_columns(found.Qt.mean, Key(step.seed, step.index, grain.name, f"iteration {i}"))
            found = yield from self._iterate(M, again, grain, step)
        Pt, Qt = found
        mean = mean_of_factors(Pt, Qt.mean, step)
        sent = SentFactors(Pt, Qt.part, Qt.scale) if self.sent == "local" else SentFactors(Pt, Qt.mean)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, self._next(start, Qt.mean, grain, step))

    def _iterate(self, M: Tensor, Qt: Tensor, grain: Grain, step: Step) -> Generator[Collective, Tensor, _Factors]:
        """One step of subspace iteration on the mean of M."""
        MQt = yield from self._mean_of_columns(low_rank.project_columns(M, Qt), grain, step)
        Pt = low_rank.orthonormalise(MQt)
        return _Factors(Pt, (yield from self._shared(low_rank.project_rows(Pt, M), grain, step)))

    def _mean_of_columns(self, MQt: Tensor, grain: Grain, step: Step) -> Generator[Collective, Tensor, Tensor]:
        """The mean of M Q transposed; nobody owes what rounding loses of it. `MQt` is overwritten."""
        if self.factors not in FACTOR_BITS:
            return (yield collective.AllReduce(factor_part(MQt, grain, step, self.factors), consumable=True)).float()
        # Columns of M Q differ in size, so each wants scales of its own: blocks run along them.
        flat = flat_grain(MQt.numel(), f"{grain.name} P", device=str(MQt.device))
        reduced = yield from self._integers.reduce(flat, MQt.view(-1), State(), step)
        return reduced.value.view(MQt.shape)

    def _shared(self, Qt: Tensor, grain: Grain, step: Step) -> Generator[Collective, Tensor, _Shared]:
        """The mean of Q transposed, and this rank's part in it. `Qt` is overwritten."""
        if self.factors not in FACTOR_BITS:
            part = factor_part(Qt, grain, step, self.factors)
            return _Shared((yield collective.AllReduce(part)).float(), part, step.world_size)
        exchange, left = self._integers, Qt.clone().view(-1)
        flat = flat_grain(left.numel(), f"{grain.name} Q", device=str(left.device))
        reduced = yield from exchange.reduce_keeping(flat, left, exchange.init(flat, step), step)
        # What an owner owes is of this step's P and of no use to the next one's: this rank has not sent it.
        mine = left[exchange.shards(left.numel(), step.world_size).of(step.rank)]
        mine.add_(reduced.state.tensor("owner")[: mine.numel()], alpha=step.world_size)
        return _Shared(reduced.value.view(Qt.shape), Qt.sub_(left.view(Qt.shape)), 1.0)

    @property
    def _integers(self) -> TwoShot:
        return TwoShot(BlockInt(FACTOR_BITS[self.factors], FACTOR_BLOCK))

    def _start(self, grain: Grain, state: State, step: Step) -> Tensor:
        """The Q to begin with, transposed: (batch, rank, columns)."""
        leaf = state.get("Qt")
        if isinstance(leaf, Leaf):
            return leaf.tensor
        return drawn(grain, self.rank, grain.shape[2], Key(step.seed, step.index, grain.name, "start"))

    def _next(self, start: Tensor, Qt: Tensor, grain: Grain, step: Step) -> State:
        """The state with the Q that the next step begins with."""
        if not self.warm_start:
            return State()
        fresh = unit_columns(Qt, Key(step.seed, step.index, grain.name, "revive"))
        if self.momentum:
            agrees = low_rank.products(fresh, start) >= 0
            start = torch.where(agrees[:, :, None], start, -start)
            fresh = fresh.mul_(1.0 - self.momentum).add_(start.mul_(self.momentum))
        return State(Qt=Leaf(fresh, "matrix"))
