"""Rules that seek a centre in space: the geometric median and centred clipping.

Both iterate v from the gradients' differences to it. All their iterates are combinations v = sum_k c_k x_k with
sum c = 1, and distances to such a v follow from the distances between the x_k; so only the n x n matrix of those is
exchanged, once, and the iterations run on the n coefficients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.kernels.rounding import square_root
from gradwire.reducers.aggregate.rule import GeometricRule, distances_to, in_order_sum, usable

_FAR = 1e6
"""An outlier this many times farther away than the majority is as good as infinitely far."""


@dataclass(frozen=True)
class GeometricMedian(GeometricRule):
    """argmin_v sum_i |x_i - v| by the smoothed Weiszfeld iteration (Pillutla et al. 2022, Algorithm 2: RFA).

        v = sum_i b_i x_i / sum_i b_i,    b_i = 1 / max(smoothing, |x_i - v|)

    Tolerates any minority. Where it deviates: the paper makes 3 iterations, each a round of communication; here they
    cost nothing on the wire. The paper starts from the mean, which outliers take along: with three of seven gradients
    1.7e7 away, three iterations end 3.5e5 away. Here the start is the mean of the majority that is nearest to the
    medoid (the gradient with the least sum of distances), and since no step of Weiszfeld's increases that sum, the
    result is bounded however few the iterations. What is a million times farther from the medoid than that majority,
    beyond what products in float64 resolve, is left out.

    Args:
        iterations: at least 1.
        smoothing: nu, the distance below which nearness counts no further, in the gradients' units.

    Raises:
        CompositionError: an iteration count below 1, or a smoothing that is not positive.

    References:
        Pillutla, Kakade & Harchaoui 2022, "Robust aggregation for federated learning", IEEE TSP 70.
    """

    iterations: int = 8
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise CompositionError(f"rfa with {self.iterations} iterations: it must be 1 or more")
        if not 0 < self.smoothing < math.inf:
            raise CompositionError(f"rfa with smoothing {self.smoothing}: it must be positive, e.g. 1e-6")

    @override
    def tolerates(self, n: int) -> int:
        return (n - 1) // 2

    def reach(self, n: int) -> float:
        """(2 h + n r)/(2 h - n) + 1 with h good ones and r = 2 h/(2 h - n) + 1.

        With S the sum of distances and g a good one, any v has (2 h - n)|v - g| <= S(v) - S(g) + 2 h diameters. The
        medoid m has S(m) <= S(g), so h good ones lie within r diameters of it; the start is as near, so its S exceeds
        that of m by n r diameters at most; and iterations do not increase S.
        """
        good = n - self.tolerates(n)
        margin = 2 * good - n
        return (2 * good + n * (2 * good / margin + 1)) / margin + 1

    def weights(self, distances: Tensor) -> Tensor:
        """The coefficients of v after the last iteration."""
        n, finite = distances.shape[0], usable(distances)
        D = torch.where(finite[:, None] & finite, distances, 0.0)
        sums = torch.where(finite, in_order_sum(square_root(D)), math.inf)
        medoid = sums.sort(stable=True).indices[:1]
        from_medoid = torch.where(finite, D.index_select(0, medoid)[0], math.inf)
        nearest = from_medoid.sort(stable=True)
        there = (from_medoid <= _FAR**2 * nearest.values[n // 2]).double()
        c = torch.zeros(n, dtype=D.dtype, device=D.device).index_fill(0, nearest.indices[: n // 2 + 1], 1.0)
        c = c * there / in_order_sum(c * there)
        for _ in range(self.iterations):
            b = there / distances_to(c, D).clamp(min=self.smoothing)
            c = b / in_order_sum(b)
        return c


@dataclass(frozen=True)
class CenteredClipping(GeometricRule):
    """Average what gradients differ from the last result by, each difference clipped (Karimireddy et al. 2021, Alg. 2).

        v' = v + 1/n sum_i (x_i - v) min(1, radius / |x_i - v|),    from the last step's result, at first 0

    A bad gradient moves the result by radius / n at most, a whole step by radius per iteration. It wants a radius of
    about the distance between good gradients. Where it deviates: the paper feeds it workers' momenta, which vary less
    than gradients; here that is `worker_momentum=`, which is off by default.

    State: the last result, each rank that of its shard.

    Args:
        radius: tau, in the gradients' units (those of scaled ones under a `GradScaler`).
        iterations: of the above within a step; the paper finds that 1 is enough.

    Raises:
        CompositionError: a radius that is not positive, or an iteration count below 1.

    References:
        Karimireddy, He & Jaggi 2021, "Learning from history for Byzantine robust optimization".
    """

    radius: float
    iterations: int = 1

    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.radius < math.inf:
            raise CompositionError(f"a clipping radius of {self.radius}: it must be positive")
        if self.iterations < 1:
            raise CompositionError(f"clip with {self.iterations} iterations: it must be 1 or more")

    @override
    def tolerates(self, n: int) -> int:
        return (n - 1) // 2

    def reach(self, n: int) -> None:
        """None: it keeps within radius * iterations of the last result instead."""
        return

    def weights(self, distances: Tensor) -> Tensor:
        """The coefficients of v, of which the last is that of the last result."""
        there = usable(distances).double()
        D = torch.where(there[:, None] * there > 0, distances, 0.0)
        n = distances.shape[0] - 1
        c = torch.zeros(n + 1, dtype=torch.float64, device=distances.device)
        c = torch.cat([c[:n], c[n:] + 1.0])
        share = torch.cat([there[:n] / n, c[:1] * 0.0])
        for _ in range(self.iterations):
            moved = share * (self.radius / distances_to(c, D).clamp(min=self.radius))
            c = c * (1.0 - in_order_sum(moved)) + moved
        return c
