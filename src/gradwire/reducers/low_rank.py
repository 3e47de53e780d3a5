"""What methods of low rank share: which matrices they take, how factors are sent and begin, and what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.key import Key
from gradwire.kernels import low_rank
from gradwire.reducers.base import Reducer
from gradwire.reducers.exchange import PLAIN
from gradwire.reducers.step import Step

FACTOR_DTYPES = {"own": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype in which factors are sent, by its name in a spec; None is `wire_dtype`'s choice."""


class LowRank(Reducer):
    """A reducer of matrices as two factors of `rank` columns; see `gains` for which matrices."""

    rank: int
    min_compression_rate: float

    @property
    @override
    def scope(self) -> Literal["flat", "tensor"]:
        return "tensor"

    @property
    def share(self) -> float:
        """How much of both factors a step sends, on average."""
        return 1.0

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """Itself for matrices that gain by it, else an uncompressed all-reduce."""
        rate = self.min_compression_rate * self.share
        return self if gains(parameter, self.rank, rate) else PLAIN


def mean_of_factors(Pt: Tensor, Qt: Tensor, step: Step) -> Tensor:
    """P Q^T, 1-d, in memory that the step may give to the next grain; as `kernels.low_rank.low_rank` computes it."""
    batch, rows, columns = Pt.shape[0], Pt.shape[2], Qt.shape[2]
    mean = step.empty(batch * rows * columns, Qt)
    low_rank.low_rank_(mean.view(batch, rows, columns), Pt, Qt)
    return mean


@dataclass(frozen=True, eq=False)
class SentFactors:
    """scale * P Q^T: what this rank's matrices contribute to the mean. Both factors are transposed."""

    Pt: Tensor
    Qt: Tensor
    scale: float = 1.0

    def subtract_from(self, x: Tensor) -> None:
        """x -= scale * P Q^T."""
        Pt, Qt = self.Pt.float(), self.Qt.float()
        if x.dtype == torch.float32 and x.is_contiguous():
            low_rank.subtract_low_rank_(x, Pt, Qt, self.scale)
        else:
            x.sub_(low_rank.low_rank(Pt, Qt) * self.scale)


def drawn(grain: Grain, rank: int, length: int, key: Key) -> Tensor:
    """A factor to begin with, transposed: (batch, rank, length) Gaussian numbers, the same on every rank."""
    batch, rows, columns = grain.shape
    return kernels.gaussian(key.stream_seed, (batch, min(rank, rows, columns), length), grain.device)


def unit_columns(Qt: Tensor, key: Key) -> Tensor:
    """Q transposed, (batch, rank, columns), with scaled columns; those of zeros are redrawn, or they would stay."""
    scaled = buffers.copied(Qt)
    low_rank.unit_rows_(scaled.view(-1, Qt.shape[2]), key.stream_seed)
    return scaled


def factor_part(factor: Tensor, grain: Grain, step: Step, factors: str = "own") -> Tensor:
    """This rank's part of a sum that is the mean, in the dtype that is sent. `factor` is overwritten."""
    return buffers.as_dtype(factor.div_(step.world_size), FACTOR_DTYPES[factors] or wire_dtype(grain.dtype))


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors are sent: that of 16-bit gradients, else float32."""
    return dtype if dtype.itemsize == 2 else torch.float32


def gains(parameter: ParameterSpec, rank: int, min_compression_rate: float) -> bool:
    """Whether two factors of `rank` are smaller than the parameter, by more than the rate."""
    rows, columns = parameter.matrix_shape
    large = rows * columns > min_compression_rate * rank * (rows + columns)
    # A rate below 1 would let factors through that are as large as the matrix: then nothing is gained.
    return len(parameter.shape) > 1 and large and rank < min(rows, columns)


def check_rank(rank: int, min_compression_rate: float) -> None:
    """Refuse what is no rank or rate.

    Raises:
        CompositionError: rank below 1, or a rate that is not positive.
    """
    if rank < 1:
        raise CompositionError(f"rank {rank} is below 1; 1, 2 or 4 are usual")
    if not min_compression_rate > 0:
        raise CompositionError(f"min_compression_rate {min_compression_rate} is not positive")
