"""Rules that look at each coordinate by itself: median and trimmed mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.kernels import robust
from gradwire.reducers.aggregate.rule import Rule, TolerantRule


@dataclass(frozen=True)
class Median(Rule):
    """The median of each coordinate, for even n the mean of the two in the middle (Yin et al. 2018, Definition 1).

    Tolerates any minority: at each coordinate the result lies among the good values. Its price: where gradients are
    skewed, as sparse ones are, the median of a coordinate is not its mean even without any bad gradient.

    References:
        Yin, Chen, Kannan & Bartlett 2018, "Byzantine-robust distributed learning: towards optimal statistical rates".

    >>> import torch
    >>> Median().combine(torch.tensor([[1.0, 5.0], [2.0, 6.0], [-100.0, 7.0]]), None)
    tensor([1., 6.])
    """

    @override
    def tolerates(self, n: int) -> int:
        return (n - 1) // 2

    def reach(self, n: int) -> float:
        """n: each coordinate is off by at most the range of the good, and squares of ranges add up to pairs'."""
        return float(n)

    def combine(self, rows: Tensor, distances: Tensor | None) -> Tensor:
        """Sort each column, take its middle."""
        return _trimmed(rows, (rows.shape[0] - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean(TolerantRule):
    """The mean of each coordinate without its `bad` greatest and its `bad` least (Yin et al. 2018, Definition 2).

    Args:
        bad: how many of each end to leave out; n must exceed 2 * bad. The paper's beta is bad / n.

    Raises:
        CompositionError: a negative number; at the first step, too few ranks.

    References:
        Yin, Chen, Kannan & Bartlett 2018, "Byzantine-robust distributed learning: towards optimal statistical rates".

    >>> import torch
    >>> TrimmedMean(1).combine(torch.tensor([[1.0], [2.0], [6.0], [900.0]]), None)
    tensor([4.])
    """

    @property
    def linear(self) -> bool:
        """Where nothing is trimmed: then it is the mean."""
        return self.bad == 0

    @property
    def fewest_ranks(self) -> int:
        """2 * bad + 1."""
        return 2 * self.bad + 1

    def reach(self, n: int) -> float:
        """n, as for the median: what is left lies among the good values."""
        return float(n)

    def combine(self, rows: Tensor, distances: Tensor | None) -> Tensor:
        """Sort each column, drop its ends, average."""
        return _trimmed(rows, self.bad)


def _trimmed(rows: Tensor, trim: int) -> Tensor:
    out = buffers.empty(rows.shape[1:], rows.dtype, rows.device)
    robust.trimmed_mean(rows, trim, out)
    return out
