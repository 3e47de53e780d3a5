"""Majority vote: every rank sends signs, and signs come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs import Sign
from gradwire.codecs.base import check_block
from gradwire.core import collective
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.sharding import CutPayload, Shards
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class MajorityVote(Reducer):
    """mean_j = s sign(sum over ranks of sign(x_j)): one bit an element each way (Bernstein et al. 2018, Algorithm 3).

    Rank j counts the votes of shard j (all-to-all of packed signs) and sends their majority to all (all-gather).

    Where it deviates: the papers leave two rules open. Here zero votes for +, as in `Sign`, so keep parameters whose
    gradients are mostly zeros (embeddings) out of it by a `Partition`. Where an even number of ranks is split, rank
    (step mod n) decides: no sign and no rank is favoured, and nothing is drawn. The papers step by +-1 and leave the
    size to the learning rate; here s is the median over ranks of mean|x| over the block, so that a rate meant for SGD
    fits. That is a float32 a block each way, 1.008 bits an element with the default block.

    It conserves nothing and is not the mean, nor does it contract: what it keeps instead is that the sign of every
    element is that of most ranks, and that no rank, however large its gradient, has more than one vote on it. Nor has
    it on the size of the step: a mean of scales let two ranks of ten, which sent ten times too much, ruin a training.

    Args:
        block: elements that share a scale; a multiple of 8.

    Raises:
        CompositionError: a block that is not a positive multiple of 8.

    References:
        Bernstein, Wang, Azizzadenesheli & Anandkumar 2018, "signSGD: compressed optimisation for non-convex problems".
        Bernstein, Zhao, Azizzadenesheli & Anandkumar 2019, "signSGD with majority vote is communication efficient and
        fault tolerant".

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(MajorityVote(), flat_grain(2), world_size=3)
    >>> ranks.step([torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]), torch.tensor([-3.0, -3.0])])[0]
    tensor([ 2., -2.])
    """

    block: int = 4096

    conserves_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def averages(self) -> bool:
        """False: a vote is no mean, so weights have no meaning for it."""
        return False

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        codec, flat, n = Sign(self.block), x.reshape(-1), step.world_size
        key, cut = step.key(grain), CutPayload(codec, Shards(flat.numel(), n, self.block), torch.float32)
        rows, sent = cut.encode(flat, key, codec.encode_into)
        received = yield collective.AllToAll(rows)
        gathered = yield collective.AllGather(_count(received, cut, step))
        mean = step.empty(flat.numel(), x)
        cut.decode_into(gathered, mean, key)
        return Reduced(mean.view(x.shape), sent, state)


def _count(received: Tensor, cut: CutPayload, step: Step) -> Tensor:
    """The row of the shard's result: the median of all rows' scales, and the majority of their bits."""
    wire = cut.empty_row(received.device)
    scales, bits = cut.row.views(wire)
    rows = [cut.row.views(row) for row in received]
    ordered, n = torch.stack([row[0] for row in rows]).sort(0).values, len(rows)
    scales.copy_(ordered[(n - 1) // 2] * 0.5 + ordered[n // 2] * 0.5)
    kernels.majority(torch.stack([row[1] for row in rows]), step.index % step.world_size, bits)
    return wire
