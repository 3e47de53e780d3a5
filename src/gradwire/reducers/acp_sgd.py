"""ACP-SGD: one of the two factors of low-rank gradients a step, in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
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


@dataclass(frozen=True)
class ACPSGD(LowRank):
    """Alternate compressed PowerSGD (Zhang et al. 2023): half a step of subspace iteration, and one all-reduce, a step.

    For M of shape (rows, columns), on the first step, the third and so on P is computed and Q of the step before held,
    on the others P is held:

        odd steps:   Q = orthonormalise(Q),   P_local = M Q,     P = mean(P_local),   mean = P Q^T
        even steps:  P = orthonormalise(P),   Q_local = M^T P,   Q = mean(Q_local),   mean = P Q^T

    What this rank sent is P_local Q^T, or P Q_local^T, so error feedback keeps M - M Q Q^T, or M - P P^T M: what the
    held factor does not see. Bytes: rows * rank floats on an odd step, columns * rank on an even one, on average half
    of what PowerSGD sends with that rank. Nothing waits for a first all-reduce before it can compute what goes into a
    second: the factor and the parameters that go uncompressed travel together, so a step of one wave is one collective.
    The price is that the held factor was found in the last gradient, and PowerSGD's P in this one: on the byte-GPT (150
    steps, 4 virtual ranks, 3 seeds) rank 16 ended at a held-out loss of 2.63, where PowerSGD of rank 8 ended at 2.43
    with the same bytes and of rank 4 at 2.51 with half of them. It can pay only where what a step waits for is the
    number of its collectives.

    Where it deviates: bytes, memory and the choice of matrices are those of `PowerSGD` here. Whether a step is odd is
    told by its number alone. Both factors are kept, so a step that is not kept, after a
    gradient that was not finite, only makes the next one hold an older factor. As in `PowerSGD` matrices of one shape
    are one batch, columns of a factor are scaled by powers of two between steps, and those that vanish are redrawn
    from the key. Factors of 16-bit gradients travel in the gradients' dtype, others as float32, or all as `factors`
    says; all arithmetic is float32, and what rounding takes from this rank's part of a factor it owes.

    Args:
        rank: r, at least 1; 2 r sends what PowerSGD sends with r.
        min_compression_rate: a matrix is compressed where rows * columns > rate * rank * (rows + columns) / 2, which
            is what a step sends on average.
        factors: what the factors travel in: "own", "bf16" or "fp16". Integers with block scales cannot be summed on
            the way and would take a second collective.

    Raises:
        CompositionError: rank below 1, a rate that is not positive, unknown `factors`.

    References:
        Zhang, Zhang, Shi, Chu & Li 2023, "Evaluation and optimization of gradient compression for distributed deep
        learning", ICDCS.

    >>> import torch
    >>> from gradwire.core.grain import matrix_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(ACPSGD(rank=1), matrix_grain(2, 2), world_size=2)
    >>> x = torch.tensor([[[3.0, 6.0], [1.0, 2.0]]])
    >>> [ranks.step([x, x])[0].round(decimals=4).tolist() for _ in range(2)][1]
    [[[3.0, 6.0], [1.0, 2.0]]]
    """

    rank: int = 4
    min_compression_rate: float = 1.0
    factors: Literal["own", "bf16", "fp16"] = "own"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.min_compression_rate)
        if self.factors not in FACTOR_DTYPES:
            raise CompositionError(
                f"factors {self.factors!r} is none of {', '.join(FACTOR_DTYPES)}: a step has one all-reduce, in which "
                "integers with scales cannot be summed; powersgd has factors=int8"
            )

    @property
    def sums_in_16_bits(self) -> bool:
        """Where the factors are of 16 bits."""
        return FACTOR_DTYPES[self.factors] is not None

    @property
    def shows_non_finite(self) -> bool:
        """True: every element of M is in a row of M Q and in a column of P^T M, and what is not finite stays so."""
        return True

    @property
    @override
    def share(self) -> float:
        return 0.5

    def init(self, grain: Grain, step: Step) -> State:
        """P and Q transposed: Gaussian columns from the key, the same on every rank."""
        _, rows, columns = grain.shape
        Pt = drawn(grain, self.rank, rows, Key(step.seed, 0, grain.name, "init P"))
        return _state(Pt, drawn(grain, self.rank, columns, Key(step.seed, 0, grain.name, "init")))

    def contraction(self, grain: Grain) -> float | None:
        """1 / max(rows, columns): what one direction keeps on average that knows nothing of the gradient.

        The directions that are held were found in the gradient before and keep more where gradients resemble each
        other; no bound holds for a single step.
        """
        return 1.0 / max(1, *grain.shape[-2:])

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """One all-reduce: of P on the first step and every other one from there, else of Q."""
        M = x.view(grain.shape).float()
        Pt, Qt = state.tensor("Pt"), state.tensor("Qt")
        key = Key(step.seed, step.index, grain.name, "revive")
        if step.index % 2 == 0:  # steps are counted from 0 here
            held = low_rank.orthonormalise(Qt)
            part = factor_part(low_rank.project_columns(M, held), grain, step, self.factors)
            found = (yield collective.AllReduce(part)).float()
            sent, factors = SentFactors(part, held, step.world_size), (found, held)
            Pt = unit_columns(found, key)
        else:
            held = low_rank.orthonormalise(Pt)
            part = factor_part(low_rank.project_rows(held, M), grain, step, self.factors)
            found = (yield collective.AllReduce(part)).float()
            sent, factors = SentFactors(held, part, step.world_size), (held, found)
            Qt = unit_columns(found, key)
        mean = mean_of_factors(*factors, step)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, _state(Pt, Qt))


def _state(Pt: Tensor, Qt: Tensor) -> State:
    return State(Pt=Leaf(Pt, "matrix"), Qt=Leaf(Qt, "matrix"))
