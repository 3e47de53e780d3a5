"""Two levels: uncompressed inside a node, another reducer between nodes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import collective
from gradwire.core.collective import Axis, Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, Segment
from gradwire.core.program import along
from gradwire.core.state import Leaf, State, replace_leaves
from gradwire.reducers.base import Program, Reduced, Reducer, Sent, Step, require_whole, weakest
from gradwire.reducers.sharding import Shards, sum_dtype

AS_FOUND = 0
"""The size of nodes that ranks have yet to find out, which a session does (`gradwire.drivers.nodes`)."""

_ALIGNED = 256
"""Shards are cut at multiples of this many elements, so that blocks of codecs do not end with every shard."""


@dataclass(frozen=True, eq=False)
class SentShard:
    """All of x but what the exchange between nodes lost of the node's mean y, in the shard this rank serves.

    The rank that encodes for its node owes for all of it: node_size * (y - sent(y)).
    """

    shard: slice
    y: Tensor
    inner: Sent
    node_size: int

    def subtract_from(self, x: Tensor) -> None:
        """x = 0 outside the shard, and there node_size times what was lost."""
        left = self.y.clone()
        self.inner.subtract_from(left)
        flat = x.view(-1)
        flat.zero_()
        flat[self.shard].copy_(left).mul_(self.node_size)


@dataclass(frozen=True)
class Hierarchical(Reducer):
    """Reduce-scatter inside each node, `inter` between nodes on every shard, all-gather inside.

    Rank j m + i is place i of node j, where m is the ranks a node. Place i of every node serves shard i, so that all
    network interfaces work and not one leader's:

        y_i = mean over the node of x[shard i],    z_i = inter(y_i over nodes),    mean = (z_0, ..., z_{m - 1})

    Bytes a rank sends inside its node: 2 (m - 1)/m gradients; between nodes: what `inter` sends of 1/m. Compression
    belongs on the slow axis only, so the fast one carries the gradient's own dtype. The rank that encoded y_i owes m
    times what `inter` lost of it, and other ranks owe nothing: summed over a node this is error feedback on the node's
    sum, so it is as stable as `inter` alone. Nodes of one leave `inter` alone. In a run of one node nothing is
    compressed, since nothing leaves it.

    Args:
        inter: an elementwise reducer without error feedback of its own.
        node_size: ranks that share a node; ranks of a node are numbered one after the other, as torchrun does.
            `AS_FOUND` leaves it to a session, whose ranks find out who shares a node.

    Raises:
        CompositionError: an `inter` that keeps a residual (put error feedback around this), that reduces matrices,
            that `scatters`, or that is no mean: a rule or a private mean would see shards, and clip or choose among
            them one by one; at the first step, a number of ranks that `node_size` does not divide, or nodes that nobody
            has found.

    >>> from gradwire.codecs import BlockInt
    >>> from gradwire.reducers import TwoShot
    >>> Hierarchical(TwoShot(BlockInt(4)), node_size=8).axes(world_size=32)
    (Axis(size=8, stride=1), Axis(size=4, stride=8))
    """

    inter: Reducer
    node_size: int

    def __post_init__(self) -> None:
        if self.node_size < 1 and self.node_size != AS_FOUND:
            raise CompositionError(f"node_size {self.node_size} is below 1; write how many ranks share a node")
        if self.inter.keeps_input:
            raise CompositionError(
                f"{self.inter} keeps a residual of its shard alone: write ErrorFeedback(Hierarchical(...)) instead"
            )
        require_whole(self.inter, "a node's part of it")
        if not self.inter.averages:
            raise CompositionError(f"{self.inter} is no mean, and between nodes it would see shards only: take a codec")
        if self.inter.scope != "flat":
            raise CompositionError(f"{self.inter} reduces whole matrices, and nodes are given shards: take a codec")

    @property
    def shows_non_finite(self) -> bool:
        """False: it does not rely on what the sum of a node makes of a NaN, so the ranks agree on a flag."""
        return False

    @property
    @override
    def rank_multiple(self) -> int:
        return max(self.node_size, 1)

    def axes(self, world_size: int) -> tuple[Axis, Axis]:
        """The axis inside a node and the axis between nodes.

        Raises:
            CompositionError: a world size that is no multiple of the node size, or nodes that nobody has found.
        """
        self.require_ranks(world_size)
        if self.node_size == AS_FOUND:
            raise CompositionError("node=auto needs ranks that find their nodes: write a number here, as in node=8")
        return Axis(self.node_size), Axis(world_size // self.node_size, self.node_size)

    def contraction(self, grain: Grain) -> float | None:
        """The inner reducer's, of a shard or of all: it holds for the sum of a node's ranks, not for each rank."""
        shard = _shards(grain.numel, max(self.node_size, 1)).size
        return weakest(self.inter.contraction(_part(grain, 0, numel)) for numel in {shard, grain.numel})

    def init(self, grain: Grain, step: Step) -> State:
        """The inner state of this rank's shard."""
        shard = self._shard(grain.numel, step)
        return self._placed(self.inter.init(self._part(grain, step), self._inner_step(step)), shard.start, step)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all and sum inside, `inter` between, all-gather inside."""
        intra, between = self.axes(step.world_size)
        shard, part = self._shard(grain.numel, step), self._part(grain, step)
        shards = _shards(x.numel(), intra.size)
        y = yield from _node_mean(x.reshape(-1), shards, intra, step)
        program = self.inter.reduce(part, y, state, self._inner_step(step))
        reduced = yield from along(program, between) if intra.size > 1 else program
        mean = yield from _joined(reduced.value, x, shards, intra)
        sent = SentShard(shard, y, reduced.sent, intra.size)
        return Reduced(mean.view(x.shape), sent, self._placed(reduced.state, shard.start, step), reduced.bad)

    def _shard(self, numel: int, step: Step) -> slice:
        """The elements that this rank's place serves."""
        intra, _ = self.axes(step.world_size)
        return _shards(numel, intra.size).of(intra.index(step.rank))

    def _part(self, grain: Grain, step: Step) -> Grain:
        shard = self._shard(grain.numel, step)
        return _part(grain, shard.start, shard.stop - shard.start)

    def _inner_step(self, step: Step) -> Step:
        _, between = self.axes(step.world_size)
        return replace(step, rank=between.index(step.rank), world_size=between.size)

    def _placed(self, state: State, start: int, step: Step) -> State:
        """The inner state, whose owned shards lie within this rank's."""
        node = self._inner_step(step).rank

        def place(_: str, leaf: Leaf) -> Leaf:
            return leaf if leaf.kind != "owned" else replace(leaf, start=start + replace(leaf, start=None).first(node))

        return replace_leaves(state, place)


def _part(grain: Grain, start: int, numel: int) -> Grain:
    """Elements of a grain as a grain of their own; its name keeps the keys of shards apart."""
    name = f"{grain.name}@{start}"
    return Grain(name, (Segment(grain.name, start, numel, 0),), (numel,), grain.dtype, grain.device)


def _shards(numel: int, places: int) -> Shards:
    """The cut among the ranks of a node, aligned where there are several; a single rank has the whole."""
    return Shards(numel, places, _ALIGNED if places > 1 else 1)


def _node_mean(flat: Tensor, shards: Shards, axis: Axis, step: Step) -> Generator[Collective, Tensor, Tensor]:
    """The mean over the node of this rank's shard, summed in rank order in float32 or better."""
    if axis.size == 1:
        return flat
    received = yield collective.AllToAll(shards.rows(flat), axis)
    numel = shards.size_of(axis.index(step.rank))
    total = torch.zeros(numel, dtype=sum_dtype(flat.dtype), device=flat.device)
    for row in collective.by_rank(shards.values(received, flat.dtype)):
        total.add_(row[:numel], alpha=1.0 / axis.size)
    return total.to(flat.dtype)


def _joined(mean: Tensor, x: Tensor, shards: Shards, axis: Axis) -> Generator[Collective, Tensor, Tensor]:
    """The shards' means of all places, end to end."""
    if axis.size == 1:
        return mean
    rows = yield collective.AllGather(shards.padded(mean).to(x.dtype).view(torch.uint8), axis)
    return shards.joined(rows, like=x)
