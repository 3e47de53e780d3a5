"""Adasum: gradients on one line are averaged, gradients at right angles are added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers, collective
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.kernels import robust
from gradwire.reducers.aggregate.rule import add_in_order, in_order_sum
from gradwire.reducers.base import Reducer
from gradwire.reducers.sent import SentAll
from gradwire.reducers.sharding import Shards, sum_dtype
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class Adasum(Reducer):
    """Combine gradients in pairs, layer by layer, along a tree over ranks (Maleki et al. 2021).

        a (+) b = a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)

    That is the mean of a and b, and half of what each has at right angles to the other. So two gradients on one line,
    in the same or in opposite directions, give their mean, and orthogonal ones their sum. At any angle, with c the
    cosine of it,

        |a (+) b|^2 = (|a|^2 + |b|^2) (1 - 3 c^2 / 4) + |a| |b| c^3 / 2,   |a + b| / 2 <= |a (+) b|

    The first is at most |a|^2 + |b|^2, and so in a whole tree |result|^2 <= sum_i |x_i|^2: learning rates are those of
    a single rank. At acute angles the length lies between those of the mean and of the sum. At obtuse angles the sum
    is short, and the result may be longer than it: 1 - c/2 times as long, up to 1.5, where |a| = |b|.

    A zero gradient leaves the other as it is. The tree halves the ranks, the lower half the larger, and every layer
    (parameter) has coefficients of its own.

    Where it deviates: the authors' code, in Horovod, wants a number of ranks that is a power of two, and here any will
    do; of three ranks the third counts as much as both others together. Horovod's optimizers combine the steps that
    ranks have made of their gradients, and here gradients are combined.

    Since all nodes of the tree are combinations of the n gradients, it is evaluated on each layer's n x n products: an
    all-to-all of shards, an all-gather of the products, and one of the result; 2 (n - 1)/n tensors a rank and 8 n^2
    bytes for each layer and peer. Layers are never cut into grains.

    References:
        Maleki, Musuvathi, Mytkowicz et al. 2021, "Scaling distributed training with adaptive summation", MLSys.

    >>> from gradwire.core.grain import matrix_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(Adasum(), matrix_grain(1, 2), world_size=2)
    >>> ranks.step([torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])])[0]
    tensor([[[2., 3.]]])
    >>> ranks.step([torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[4.0, 0.0]]])])[0]
    tensor([[[3., 0.]]])
    """

    conserves_sum: ClassVar[bool] = False

    @property
    @override
    def averages(self) -> bool:
        return False

    @property
    @override
    def scope(self) -> Literal["flat", "tensor"]:
        return "tensor"

    @property
    def lossless(self) -> bool:
        """True: gradients travel as they are."""
        return True

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def contraction(self, grain: Grain) -> float | None:
        """1: nothing is lost."""
        return 1.0

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, all-gather of products, all-gather."""
        shards = Shards(x.numel(), step.world_size)
        received = yield collective.AllToAll(shards.rows(x))
        rows = buffers.as_dtype(shards.values(received, x.dtype), sum_dtype(x.dtype))
        mine = _layer_products(rows, grain, step)
        parts = yield collective.AllGather(mine.view(-1).view(torch.uint8))
        products = add_in_order(parts.view(torch.float64)).view(mine.shape)
        combined = _combine(rows, tree(products), grain, step)
        gathered = yield collective.AllGather(buffers.as_dtype(combined, x.dtype).view(torch.uint8))
        return Reduced(shards.joined(gathered, like=x), SentAll(), state)


def tree(G: Tensor) -> Tensor:
    """Return the coefficients c of the result sum_i c_i x_i from the products G (layers, n, n): (layers, n)."""
    n = G.shape[-1]
    each = torch.eye(n, dtype=G.dtype, device=G.device).expand(G.shape[0], n, n)
    return _node(G, list(each.unbind(1)))


def _node(G: Tensor, leaves: list[Tensor]) -> Tensor:
    if len(leaves) == 1:
        return leaves[0]
    half = (len(leaves) + 1) // 2
    a, b = _node(G, leaves[:half]), _node(G, leaves[half:])
    Ga, Gb = in_order_sum(G * a[..., None, :]), in_order_sum(G * b[..., None, :])
    both = in_order_sum(a * Gb)
    return a * _share(both, in_order_sum(a * Ga)) + b * _share(both, in_order_sum(b * Gb))


def _share(both: Tensor, square: Tensor) -> Tensor:
    """1 - a.b / 2|a|^2, and 1 where a is zero."""
    nothing = square <= 0
    return (1.0 - both / (2.0 * torch.where(nothing, 1.0, square)))[..., None].masked_fill(nothing[..., None], 1.0)


def _layer_columns(grain: Grain, step: Step) -> Iterator[tuple[int, int, int]]:
    """Yield (layer, start, stop) of the columns of this rank's shard that each layer has."""
    owned = Shards(grain.numel, step.world_size).of(step.rank)
    for layer, segment in enumerate(grain.segments):
        start, stop = max(segment.offset, owned.start), min(segment.offset + segment.numel, owned.stop)
        if start < stop:
            yield layer, start - owned.start, stop - owned.start


def _layer_products(rows: Tensor, grain: Grain, step: Step) -> Tensor:
    """What this rank's shard adds to the products of each layer: (layers, n, n)."""
    n = step.world_size
    products = torch.zeros(len(grain.segments), n, n, dtype=torch.float64, device=rows.device)
    for layer, start, stop in _layer_columns(grain, step):
        products[layer] = robust.products(buffers.contiguous(rows[:, start:stop]))
    return products


def _combine(rows: Tensor, coefficients: Tensor, grain: Grain, step: Step) -> Tensor:
    """This rank's shard of the result."""
    out = buffers.zeros(rows.shape[1:], rows.dtype, rows.device)
    for layer, start, stop in _layer_columns(grain, step):
        robust.weighted_sum(buffers.contiguous(rows[:, start:stop]), coefficients[layer], out[start:stop])
    return out
