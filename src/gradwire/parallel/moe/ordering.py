"""In which order rows travel, and in which order experts want them.

Rows travel by chunk of experts, then rank, then expert, then token. So those of a chunk are one piece, which is cut
by ranks, and what a rank receives for a chunk comes by rank, then expert, then token. Experts want it by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grouped:
    """Received rows by expert.

    Attributes:
        order: (rows,): where each lies among what was received; rows that are dropped are left out.
        counts: of each expert.
    """

    order: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Ordering:
    """The order of rows for experts that are spread over ranks.

    A *slot* is an expert's place in that order.

    Args:
        ranks: of the axis.
        local: experts of a rank.
        chunks: that these are cut into.

    >>> ordering = Ordering(ranks=2, local=2, chunks=2)
    >>> ordering.slots(torch.arange(4)).tolist()  # 0 and 2 are the first experts of their ranks
    [0, 2, 1, 3]
    """

    ranks: int
    local: int
    chunks: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The experts of a rank that make each chunk: the first, and the one after the last."""
        size = self.local // self.chunks
        return [(first, first + size) for first in range(0, self.local, size)]

    def slots(self, experts: Tensor) -> Tensor:
        """The slot of each expert."""
        size = self.local // self.chunks
        rank, place = experts // self.local, experts % self.local
        return (place // size * self.ranks + rank) * size + place % size

    def order(self, slots: Tensor, kept: Tensor | None) -> Tensor:
        """The choices that travel, in the order of their slots; those of a slot keep their own."""
        if kept is None:
            return slots.argsort(stable=True)
        last = self.ranks * self.local
        return slots.masked_fill(~kept, last).argsort(stable=True)[: int(kept.sum())]

    def counts(self, slots: Tensor, kept: Tensor | None) -> Tensor:
        """Rows for each expert: (ranks, local)."""
        travelling = slots if kept is None else slots[kept]
        counts = torch.bincount(travelling, minlength=self.ranks * self.local)
        return counts.view(self.chunks, self.ranks, -1).transpose(0, 1).reshape(self.ranks, self.local)

    def grouped(self, counts: Tensor, most: int | None) -> Grouped:
        """Received rows by expert.

        Args:
            counts: (ranks, experts of the chunk): rows of each expert that come from each rank.
            most: rows that an expert takes, those of the first ranks; None: all.
        """
        ranks, experts = counts.shape
        of_row = torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
        order, totals = of_row.argsort(stable=True), counts.sum(0)
        if most is None:
            return Grouped(order, tuple(totals.tolist()))
        starts = totals.cumsum(0) - totals
        places = torch.arange(order.numel(), device=order.device) - starts[of_row[order]]
        return Grouped(order[places < most], tuple(totals.clamp(max=most).tolist()))
