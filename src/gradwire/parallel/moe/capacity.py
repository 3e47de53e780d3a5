"""How many rows an expert takes, and which are dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError

Drop = Literal["before", "after"]
Priority = Literal["order", "weight"]


@dataclass(frozen=True)
class Capacity:
    """An expert takes ceil(factor tokens K / E) rows; what is beyond is dropped, and adds nothing to its token.

    Dropped "before" the exchange, tokens are those of one rank, so what is dropped depends on how many ranks there are.
    Dropped "after" it, they are those of all ranks of the axis; all rows travel, and an expert takes those of lower
    ranks and earlier tokens first.

    Args:
        factor: 1 is what balanced routing needs.
        drop: "before" or "after" the exchange.
        priority: "order": earlier tokens first; "weight": those of larger weight first, before the exchange only.

    Raises:
        CompositionError: a factor that is not positive, another word, or "weight" after the exchange.

    References:
        Lepikhin et al. 2020, "GShard", section 2.2. Fedus et al. 2021, "Switch Transformers", equation 3.

    >>> Capacity(1.25).rows(choices=64, experts=8, factor=1.25)
    10
    """

    factor: float = 1.25
    drop: Drop = "before"
    priority: Priority = "order"

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise CompositionError(
                f"capacity {self.factor} would drop every token: give a factor above 0, such as 1.25"
            )
        if self.drop not in ("before", "after") or self.priority not in ("order", "weight"):
            raise CompositionError(
                f"drop={self.drop!r}, priority={self.priority!r}: use 'before' or 'after', and 'order' or 'weight'"
            )
        if self.drop == "after" and self.priority == "weight":
            raise CompositionError("weights do not travel with rows: drop by weight before the exchange, or in order")

    def rows(self, choices: int, experts: int, factor: float) -> int:
        """What an expert takes of so many choices."""
        return math.ceil(factor * choices / experts - 1e-9)

    def next_factor(self, factor: float, dropped: int, choices: int) -> float:
        """The factor of the next step, given what was dropped in the last one on all ranks of the axis."""
        return factor


@dataclass(frozen=True)
class DynamicCapacity(Capacity):
    """A capacity whose factor follows the share of choices that was dropped.

        factor <- min(most, factor rate)     where the share is above `target`
        factor <- max(least, factor / rate)  where it is below target / 2

    The share is that of all ranks of the axis in the step before, which travels with the numbers of rows.

    Args:
        factor: to begin with.
        drop: as in `Capacity`.
        priority: as in `Capacity`.
        target: the share of choices that may be dropped.
        least: the factor goes no lower.
        most: the factor goes no higher.
        rate: of change in a step.

    Raises:
        CompositionError: as `Capacity`; bounds that are out of order; a target outside [0, 1), or a rate of 1 or less.

    >>> DynamicCapacity(1.0, target=0.01).next_factor(1.0, dropped=5, choices=100)
    1.1
    """

    target: float = 0.01
    least: float = 0.5
    most: float = 4.0
    rate: float = 1.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= self.factor <= self.most:
            raise CompositionError(
                f"the factor {self.factor} is outside {self.least} to {self.most}: give other bounds"
            )
        if not 0 <= self.target < 1 or self.rate <= 1:
            raise CompositionError(f"target {self.target} lies in [0, 1), and rate {self.rate} above 1: change them")

    def next_factor(self, factor: float, dropped: int, choices: int) -> float:
        """By the share that was dropped."""
        if not choices:
            return factor
        share = dropped / choices
        if share > self.target:
            return min(self.most, factor * self.rate)
        return max(self.least, factor / self.rate) if share < self.target / 2 else factor


def kept_within(slots: Tensor, weights: Tensor, experts: int, capacity: int, priority: Priority) -> Tensor:
    """Which choices an expert has room for.

    Args:
        slots: (choices,): the expert of each, in the order of tokens.
        weights: (choices,): of each.
        experts: how many.
        capacity: rows each takes.
        priority: who comes first.

    >>> slots = torch.tensor([0, 1, 0, 0])
    >>> kept_within(slots, torch.tensor([0.1, 0.5, 0.9, 0.3]), 2, 2, "order").tolist()
    [True, True, True, False]
    >>> kept_within(slots, torch.tensor([0.1, 0.5, 0.9, 0.3]), 2, 2, "weight").tolist()
    [False, True, True, True]
    """
    first = (
        weights.argsort(descending=True, stable=True) if priority == "weight" else torch.arange(len(slots)).to(slots)
    )
    order = first[slots[first].argsort(stable=True)]
    starts = torch.bincount(slots, minlength=experts).cumsum(0).roll(1)
    starts[0] = 0
    places = torch.arange(len(slots), device=slots.device) - starts[slots[order]]
    return torch.zeros_like(slots, dtype=torch.bool).scatter(0, order, places < capacity)
