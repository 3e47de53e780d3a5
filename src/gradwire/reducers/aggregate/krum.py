"""Rules that choose whole gradients by their distances to each other: Krum, multi-Krum, Bulyan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.kernels import robust
from gradwire.reducers.aggregate.rule import GeometricRule, Rule, TolerantRule, in_order_sum


@dataclass(frozen=True)
class Krum(TolerantRule, GeometricRule):
    """The gradient with the least squared distances to its n - bad - 2 nearest (Blanchard et al. 2017, section 4).

        score(i) = sum of |x_i - x_j|^2 over the n - bad - 2 nearest j,    result = x_i of the least score

    With few neighbours scores are often equal (each of two that are mutually nearest has the other's): then the one
    that is nearer to all wins, and after that the lower rank. Where it deviates: in the paper the lower rank wins at
    once. One worker's gradient has its full noise: expect slower
    training than with a mean of many, which `MultiKrum` gives.

    Args:
        bad: f, with n >= 2 * bad + 3.

    Raises:
        CompositionError: a negative number; at the first step, too few ranks.

    References:
        Blanchard, El Mhamdi, Guerraoui & Stainer 2017, "Machine learning with adversaries: Byzantine tolerant
        gradient descent".
    """

    @property
    def fewest_ranks(self) -> int:
        """2 * bad + 3."""
        return 2 * self.bad + 3

    def chosen(self, n: int) -> int:
        """How many gradients are averaged."""
        return 1

    def reach(self, n: int) -> float:
        """1 + sqrt(n): the chosen have scores no worse than a good one's, and a good one among their nearest."""
        return 1.0 + math.sqrt(n)

    def weights(self, distances: Tensor) -> Tensor:
        """1/m for the m best, else 0."""
        n = distances.shape[0]
        m = self.chosen(n)
        best = ranking(apart(distances), n - self.bad - 2)[:m]
        return torch.zeros(n, dtype=torch.float64, device=distances.device).index_fill(0, best, 1.0 / m)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the m gradients with the best Krum scores (multi-Krum of Blanchard et al. 2017).

    Args:
        bad: f, with n >= 2 * bad + 3.
        keep: m, at most n - bad - 2; 0 stands for that many.

    Raises:
        CompositionError: a negative number; at the first step, too few ranks.

    References:
        Blanchard, El Mhamdi, Guerraoui & Stainer 2017, "Machine learning with adversaries: Byzantine tolerant gradient
        descent".
    """

    keep: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 0:
            raise CompositionError(f"MultiKrum with keep={self.keep}: it must be 1 or more, or 0 for all that may be")

    @property
    def fewest_ranks(self) -> int:
        """2 * bad + 3, and enough to keep so many."""
        return max(2 * self.bad + 3, self.keep + self.bad + 2)

    def chosen(self, n: int) -> int:
        """`keep`, or n - bad - 2."""
        return self.keep or n - self.bad - 2


@dataclass(frozen=True)
class Bulyan(TolerantRule, Rule):
    """Choose theta = n - 2 bad gradients by repeated Krum, then average what is nearest to their median.

    Krum's choice is taken out and Krum asked again of the rest, until theta are chosen; of each coordinate's theta
    values the beta = theta - 2 bad nearest to their median are averaged (El Mhamdi et al. 2018). A gradient
    near enough for Krum can still be far at one coordinate, which the second part undoes.

    Where it deviates: where so few are left that Krum's r - bad - 2 neighbours (of r) would be none, the nearest one
    counts: the paper leaves this open.

    Args:
        bad: f, with n >= 4 * bad + 3.

    Raises:
        CompositionError: a negative number; at the first step, too few ranks.

    References:
        El Mhamdi, Guerraoui & Rouault 2018, "The hidden vulnerability of distributed learning in Byzantium".
    """

    geometric = True

    @property
    def fewest_ranks(self) -> int:
        """4 * bad + 3."""
        return 4 * self.bad + 3

    def reach(self, n: int) -> float:
        """n: at each coordinate a majority of the chosen are good, so the result lies within twice their range."""
        return 2.0 * n

    def selected(self, distances: Tensor) -> Tensor:
        """Return the indices of the theta that Krum chooses one after the other, in ascending order."""
        n = distances.shape[0]
        left = apart(distances)
        chosen = torch.empty(0, dtype=torch.int64, device=distances.device)
        for taken in range(n - 2 * self.bad):
            best = ranking(left, max(1, n - taken - self.bad - 2), last=chosen)[:1]
            chosen = torch.cat([chosen, best])
            left = left.index_fill(0, best, math.inf).index_fill(1, best, math.inf)
        return chosen.sort().values

    def combine(self, rows: Tensor, distances: Tensor | None) -> Tensor:
        """Select, then average around the median."""
        assert distances is not None
        out = buffers.empty(rows.shape[1:], rows.dtype, rows.device)
        selected = self.selected(distances)
        chosen = buffers.empty((len(selected), rows.shape[1]), rows.dtype, rows.device)
        torch.index_select(rows, 0, selected, out=chosen)
        robust.mean_around_median(chosen, rows.shape[0] - 4 * self.bad, out)
        return out


def apart(distances: Tensor) -> Tensor:
    """D with infinity where it is not finite and on the diagonal: nobody is a neighbour of itself."""
    itself = torch.eye(distances.shape[0], dtype=torch.bool, device=distances.device)
    return torch.where(distances.isfinite() & ~itself, distances, math.inf)


def ranking(distances: Tensor, neighbours: int, last: Tensor | None = None) -> Tensor:
    """Return the rows from the best to the worst Krum score: the sum of the least `neighbours` distances.

    Of equal scores the one whose finite distances have the lesser sum comes first, then the lower index. Rows in `last`
    come last.

    >>> D = apart(torch.tensor([[0.0, 9.0, 16.0], [9.0, 0.0, 1.0], [16.0, 1.0, 0.0]], dtype=torch.float64))
    >>> ranking(D, neighbours=1).tolist()
    [1, 2, 0]
    """
    scores = in_order_sum(distances.sort(dim=1).values[:, :neighbours])
    from_all = in_order_sum(torch.where(distances.isfinite(), distances, 0.0))
    if last is not None:
        scores, from_all = scores.index_fill(0, last, math.inf), from_all.index_fill(0, last, math.inf)
    nearest = from_all.sort(stable=True).indices
    return nearest[scores[nearest].sort(stable=True).indices]
