"""Which keys a query sees, and what that makes of a block of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.parallel.sequences.layouts import packed_ends

Seen = Literal["all", "none", "causal"] | Tensor
"""What queries of a block see: all of its keys, none of them, those before them, or what a boolean mask says."""


@dataclass(frozen=True)
class AttentionMask:
    """A query at position i sees a key at position j if all of these hold:

        causal:   j <= i
        window w: |i - j| < w
        lengths:  i and j lie in the same one of the packed sequences

    Args:
        causal: see no later keys.
        window: positions on each side, the query's own counted, so at least 1; None for all.
        lengths: of the packed sequences, which add up to the whole length; None for one sequence.

    Raises:
        CompositionError: a window, or a length of a packed sequence, below 1.

    >>> AttentionMask(causal=True).seen(range(4, 8), range(4))
    'all'
    >>> AttentionMask(causal=True, window=2).seen(range(2), range(2, 4))
    'none'
    """

    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise CompositionError(f"a window of {self.window} positions: each query sees its own at least, so give 1")
        if self.lengths is not None:
            packed_ends(self.lengths, sum(self.lengths))

    def seen(self, queries: range, keys: range) -> Seen:
        """What queries at some positions see of keys at others; neither range is empty."""
        whole, diagonal = True, False
        if self.causal:
            if keys[0] > queries[-1]:
                return "none"
            if keys[-1] > queries[0]:
                whole, diagonal = False, keys == queries
        if self.window is not None:
            oldest, newest = queries[-1] - keys[0], keys[-1] - queries[0]
            if queries[0] - keys[-1] >= self.window or keys[0] - queries[-1] >= self.window:
                return "none"
            if oldest >= self.window or (not self.causal and newest >= self.window):
                whole, diagonal = False, False
        if self.lengths is not None:
            first, last = self._sequences(queries), self._sequences(keys)
            if first[1] < last[0] or last[1] < first[0]:
                return "none"
            if not first[0] == first[1] == last[0] == last[1]:
                whole, diagonal = False, False
        if whole:
            return "all"
        return "causal" if diagonal else self.table(queries, keys)

    def table(self, queries: range, keys: range) -> Tensor:
        """The mask as booleans, (queries, keys), True where a query sees a key.

        >>> AttentionMask(causal=True, window=2).table(range(3), range(3)).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
        """
        i, j = torch.arange(queries.start, queries.stop)[:, None], torch.arange(keys.start, keys.stop)
        table = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if self.causal:
            table &= j <= i
        if self.window is not None:
            table &= (i - j).abs() < self.window
        if self.lengths is not None:
            ends = packed_ends(self.lengths, sum(self.lengths))
            table &= torch.bucketize(i, ends, right=True) == torch.bucketize(j, ends, right=True)
        return table

    def _sequences(self, positions: range) -> tuple[int, int]:
        """Which packed sequences the first and the last of some positions lie in."""
        assert self.lengths is not None
        ends = packed_ends(self.lengths, sum(self.lengths))
        first, last = torch.bucketize(torch.tensor([positions[0], positions[-1]]), ends, right=True).tolist()
        return first, last


EVERYTHING = AttentionMask()
"""Each query sees all keys."""
