"""The contract of a rule: how the n gradients of a step, one a rank, become one.

Rules guard against bad gradients (a broken sensor, poisoned data, a diverging worker), not against malicious ranks: the
ranks do the aggregating, and each could write what it likes into its part of the result.

- `combine(rows, distances)` sees some columns of all n gradients, one a row, and returns what they become.
- `geometric`: it needs D, the squared distances between whole gradients, of which one grain shows a part only: the
  exchange adds them up over the grains of the step.
- `remembers`: the last result stands as one row more behind the n, zeros at first.
- `least(bad)` ranks are needed; `tolerates(n)` gradients may be anything.
- `reach(n)`: a c with |result - mean of the good| <= c * (the greatest distance between good ones), whatever those that
  it tolerates are; None for a rule that bounds its result otherwise.

- `linear`: the result is linear in the rows (a mean of all of them), so that memory of what a codec lost may go around.

A rule decides nothing by branching on values: weights and choices are tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.kernels import robust
from gradwire.kernels.rounding import square_root


class Rule(ABC):
    """How n gradients become one. See the module's text for the contract."""

    geometric: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    @property
    def linear(self) -> bool:
        """Whether results of gradients sent in parts add up to the result of the gradients."""
        return False

    @property
    def fewest_ranks(self) -> int:
        """Ranks that it needs at least."""
        return 1

    @abstractmethod
    def tolerates(self, n: int) -> int:
        """Return how many of `n` gradients may be anything."""

    @abstractmethod
    def reach(self, n: int) -> float | None:
        """Return c in |result - mean of the good| <= c * diameter of the good, or None."""

    @abstractmethod
    def combine(self, rows: Tensor, distances: Tensor | None) -> Tensor:
        """Return what `rows` (n, numel), float32 or float64, become: 1-d, in the same dtype."""


@dataclass(frozen=True)
class TolerantRule(Rule):
    """A rule that is told how many bad gradients to expect.

    Raises:
        CompositionError: a negative number.
    """

    bad: int = 1

    def __post_init__(self) -> None:
        if self.bad < 0:
            raise CompositionError(f"{type(self).__name__} with bad={self.bad}: it must be 0 or more")

    def tolerates(self, n: int) -> int:
        """As many as it is told to."""
        return self.bad


class GeometricRule(Rule):
    """A rule whose result is a weighted sum of the rows, with weights that depend on their distances alone."""

    geometric: ClassVar[bool] = True

    @abstractmethod
    def weights(self, distances: Tensor) -> Tensor:
        """Return a weight for each row, float64, from D of shape (n, n) without anything that is not finite."""

    def combine(self, rows: Tensor, distances: Tensor | None) -> Tensor:
        """Sum_i weights[i] * rows[i]."""
        assert distances is not None
        out = buffers.empty(rows.shape[1:], rows.dtype, rows.device)
        robust.weighted_sum(rows, self.weights(distances), out)
        return out


def usable(distances: Tensor) -> Tensor:
    """Return a mask of the rows that are finite: those at a finite distance of some other one.

    >>> import math
    >>> import torch
    >>> D = torch.tensor([[0.0, 1.0, math.nan], [1.0, 0.0, math.nan], [math.nan, math.nan, 0.0]])
    >>> usable(D).tolist()
    [True, True, False]
    """
    return distances.isfinite().sum(dim=1) > min(1, distances.shape[0] - 1)


def distances_to(combination: Tensor, distances: Tensor) -> Tensor:
    """Return |x_i - v| for v = sum_k c_k x_k with sum c = 1, from D alone: sqrt(D c - (c . D c) / 2)."""
    away = in_order_sum(distances * combination)
    return square_root((away - 0.5 * in_order_sum(combination * away)).clamp(min=0.0))


def in_order_sum(x: Tensor) -> Tensor:
    """Sums along the last dimension, from the first element to the last.

    `torch.sum` and products of matrices add in an order that depends on the processor, and weights that every rank
    computes for itself must be the same on all of them.

    >>> import torch
    >>> in_order_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([3., 7.])
    """
    return add_in_order(x.movedim(-1, 0))


def add_in_order(parts: Tensor) -> Tensor:
    """The sum of the rows in their order."""
    first, *others = parts.unbind(0)
    for part in others:
        first = first + part
    return first
