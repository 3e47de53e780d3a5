"""Dropout of attention weights that does not depend on how a sequence is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.kernels.random.reference import mix, uniform_words


@dataclass(frozen=True)
class AttentionDropout:
    """Drop each weight of attention with the chance `rate`, and divide the others by 1 - rate.

        out_i = sum over j of P_ij m_ij / (1 - rate) v_j,    m_ij = 0 with chance rate, else 1

    Whether the weight of sequence b, query head h, query i and key j stays depends on the key and these four numbers
    alone. So every layout, any number of ranks, and a forward pass that is made again drop the same weights.

    With k0, k1 the words that key the stream and `mix` as in `gradwire.kernels.random`,

        m_ij = 1 where mix(k1 ^ mix(j ^ mix(i ^ mix(h ^ mix(b ^ k0))))) >= rate 2^32

    Args:
        rate: chance of a weight to be dropped, from 0 up to but not including 1.
        key: of the draws. Give it the step and the layer, else all of them drop the same weights; and the rank of a
            data-parallel replica, whose sequences are others.
        first_head: number of the first query head among those of the model, where a caller attends for some of them.

    Raises:
        CompositionError: a rate that is no chance below 1.

    References:
        Srivastava et al. 2014, "Dropout", section 4; Vaswani et al. 2017, "Attention is all you need", section 5.4.

    >>> AttentionDropout(0.5, Key(seed=1, step=7, layer="blocks.0")).factors(1, 1, range(1), range(4))
    tensor([[[[0., 0., 2., 2.]]]])
    """

    rate: float
    key: Key = field(default_factory=Key)
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise CompositionError(f"a dropout of {self.rate}: give a chance from 0 up to but not including 1")

    def factors(
        self, batch: int, heads: int, queries: range, keys: range, device: torch.device | None = None
    ) -> Tensor:
        """What weights are multiplied by, 0 or 1 / (1 - rate).

        Args:
            batch: sequences.
            heads: query heads, from `first_head`.
            queries: positions in the whole sequence.
            keys: likewise.
            device: where to; None for the CPU.

        Returns:
            (batch, heads, queries, keys) float32.
        """
        first, last = uniform_words(self.key.stream_seed)
        heads_of = range(self.first_head, self.first_head + heads)
        word = mix(_numbers(range(batch), 3, device) ^ first)
        for numbers, dims in ((heads_of, 2), (queries, 1), (keys, 0)):
            word = mix(_numbers(numbers, dims, device) ^ word)
        stays = mix(word ^ last) >= round(self.rate * 2**32)
        return stays.to(torch.float32) / (1 - self.rate)


def _numbers(of: range, dims: int, device: torch.device | None) -> Tensor:
    """The numbers of a range, with so many dimensions behind them."""
    return torch.arange(of.start, of.stop, device=device).view(-1, *[1] * dims)
