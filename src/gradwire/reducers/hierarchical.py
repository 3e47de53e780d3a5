"""Two levels: uncompressed inside a node, another reducer between nodes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers, collective
from gradwire.core.axis import NodeSize, SubGroups
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.figures import listed
from gradwire.core.grain import Grain, Segment
from gradwire.core.program import along, apart
from gradwire.core.state import Leaf, State, replace_leaves
from gradwire.reducers.base import Reducer, weakest
from gradwire.reducers.node_cut import NodeCut, cut_into_nodes
from gradwire.reducers.requirements import require_whole
from gradwire.reducers.sharding import Shards, sum_dtype
from gradwire.reducers.step import Program, Reduced, Sent, Step

AS_FOUND = 0
"""The size of nodes that ranks have yet to find out, which a session does (`gradwire.drivers.nodes`)."""

_ALIGNED = 256
"""Shards are cut at multiples of this many elements, so that blocks of codecs do not end with every shard."""


@dataclass(frozen=True, eq=False)
class SentShard:
    """All of x but what the exchange between nodes lost of y, the node's part of the mean, in this rank's shard.

    The rank that encodes for its node owes for all of it: ranks_per_node * (y - sent(y)). A rank that serves no shard
    owes nothing.
    """

    shard: slice
    y: Tensor
    inner: Sent | None
    ranks_per_node: float

    def subtract_from(self, x: Tensor) -> None:
        """x = 0 outside the shard, and there ranks_per_node times what was lost."""
        flat = x.view(-1)
        if self.inner is None:
            flat.zero_()
            return
        left = buffers.copied(self.y)
        self.inner.subtract_from(left)
        flat.zero_()
        flat[self.shard].copy_(left).mul_(self.ranks_per_node)


@dataclass(frozen=True)
class Hierarchical(Reducer):
    """Reduce-scatter inside each node, `inter` between nodes on every shard, all-gather inside.

    Of n ranks on k nodes, place i of every node serves shard i, so that all network interfaces work and not one
    leader's. There are as many shards as the smallest node has ranks:

        y_i = k/n * sum over the node of x[shard i],    z_i = inter(y_i over nodes),    mean = (z_0, z_1, ...)

    where `inter` is a mean, so z_i is the mean over all ranks, however many each node has; on equal nodes y_i is the
    node's mean. Bytes a rank sends inside its node of m: 2 (m - 1)/m gradients where all nodes have m ranks; between
    nodes: what `inter` sends of one shard. Compression belongs on the slow axis only, so the fast one carries the
    gradient's own dtype. The rank that encoded y_i owes n/k times what `inter` lost of it, and other ranks owe nothing:
    summed over a node this is error feedback on the node's sum, so it is as stable as `inter` alone. Nodes of one leave
    `inter` alone. In a run of one node nothing is compressed, since nothing leaves it.

    For three levels `inter` is a `Hierarchical` too, whose ranks are the nodes of this one.

    Args:
        inter: an elementwise reducer without error feedback of its own.
        node_size: ranks that share a node, or the ranks of each node where these differ; ranks of a node are numbered
            one after the other, as torchrun does. `AS_FOUND` leaves it to a session, whose ranks find out who shares a
            node.

    Raises:
        CompositionError: an `inter` that keeps a residual (put error feedback around this), that reduces matrices,
            that `scatters`, or that is no mean: a rule or a private mean would see shards, and clip or choose among
            them one by one; at the first step, a number of ranks that `node_size` does not divide or add up to, or
            nodes that nobody has found.

    >>> from gradwire.codecs import BlockInt
    >>> from gradwire.reducers import TwoShot
    >>> Hierarchical(TwoShot(BlockInt(4)), node_size=8).axes(world_size=32)
    (Axis(size=8, stride=1), Axis(size=4, stride=8))
    >>> sites = Hierarchical(Hierarchical(TwoShot(BlockInt(4)), node_size=2), node_size=8)
    >>> sites.axes(world_size=32)
    (Axis(size=8, stride=1), Axis(size=2, stride=8), Axis(size=2, stride=16))
    """

    inter: Reducer
    node_size: NodeSize

    def __post_init__(self) -> None:
        sizes = (self.node_size,) if isinstance(self.node_size, int) else self.node_size
        if self.node_size != AS_FOUND and min(sizes, default=0) < 1:
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
        if isinstance(self.node_size, int):
            return max(self.node_size, 1) * self.inter.rank_multiple
        return sum(self.node_size)

    @override
    def require_ranks(self, world_size: int) -> None:
        sizes = self.node_size
        if isinstance(sizes, int):
            has_listed = isinstance(self.inter, Hierarchical) and not isinstance(self.inter.node_size, int)
            if world_size % max(sizes, 1) or not has_listed:
                self._require_multiple(world_size)
        elif sum(sizes) != world_size:
            raise CompositionError(
                f"nodes of {listed(sizes)} ranks have {sum(sizes)} ranks together, and this run has {world_size}: give "
                "node= (node_size) the ranks of every node, or leave it to the ranks by node=auto"
            )
        if sizes != AS_FOUND:
            self.inter.require_ranks(cut_into_nodes(sizes, world_size).count)

    def nodes(self, world_size: int) -> NodeCut:
        """The ranks of each node, and those that exchange between nodes.

        Raises:
            CompositionError: a world size that nodes of this size do not make up, or nodes that nobody has found.
        """
        self.require_ranks(world_size)
        if self.node_size == AS_FOUND:
            raise CompositionError("node=auto needs ranks that find their nodes: write a number here, as in node=8")
        return cut_into_nodes(self.node_size, world_size)

    def axes(self, world_size: int) -> tuple[SubGroups, ...]:
        """The axis inside a node, the axis between nodes, and those into which `inter` cuts that.

        Raises:
            CompositionError: see `nodes`.
        """
        nodes = self.nodes(world_size)
        inner = tuple(axis.within(nodes.between) for axis in self.inter.axes(nodes.count))
        return (nodes.inside, *(inner or (nodes.between,)))

    def contraction(self, grain: Grain) -> float | None:
        """The inner reducer's, of a shard or of all: it holds for the sum of a node's ranks, not for each rank."""
        places = self.node_size if isinstance(self.node_size, int) else min(self.node_size)
        shard = _shards(grain.numel, max(places, 1)).size
        return weakest(self.inter.contraction(_part(grain, 0, numel)) for numel in {shard, grain.numel})

    def init(self, grain: Grain, step: Step) -> State:
        """The inner state of this rank's shard, which is empty where the rank serves none."""
        shard = self._shard(grain.numel, step)
        part = _part(grain, shard.start, shard.stop - shard.start)
        return self._placed(self.inter.init(part, self._inner_step(grain, step)), shard.start, step)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all and sum inside, `inter` between, all-gather inside."""
        nodes, shard = self.nodes(step.world_size), self._shard(grain.numel, step)
        shards = _shards(x.numel(), nodes.places)
        y = yield from _node_mean(x.reshape(-1), shards, nodes, step)
        if nodes.serves(step.rank):
            part = _part(grain, shard.start, shard.stop - shard.start)
            program = self.inter.reduce(part, y, _within_shard(state, shard.start), self._inner_step(grain, step))
            is_whole = nodes.is_even and nodes.places == 1
            reduced = yield from program if is_whole else along(program, nodes.between)
            sent = SentShard(shard, y, reduced.sent, nodes.ranks_per_node)
            reduced = reduced._replace(sent=sent, state=self._placed(reduced.state, shard.start, step))
        else:
            yield from apart(self._without_data(grain, step), nodes.between, nodes.count, x.device)
            reduced = Reduced(y, SentShard(shard, y, None, nodes.ranks_per_node), state)
        mean = yield from _joined(reduced.value, x, shards, nodes, step)
        return reduced._replace(value=mean.view(x.shape))

    def _shard(self, numel: int, step: Step) -> slice:
        """The elements that this rank's place serves; none, behind the end, where it serves none."""
        nodes = self.nodes(step.world_size)
        return _shards(numel, nodes.places).of(nodes.place(step.rank))

    def _inner_step(self, grain: Grain, step: Step) -> Step:
        nodes = self.nodes(step.world_size)
        largest = _shards(step.largest_of(grain.numel), nodes.places).size_of(0)
        return replace(step, rank=nodes.between.index(step.rank), world_size=nodes.count, largest=largest)

    def _without_data(self, grain: Grain, step: Step) -> Program:
        """What the first rank of a node does between nodes, on tensors without data."""
        inner, nodes = self._inner_step(grain, step), self.nodes(step.world_size)
        meta = torch.device("meta")
        part = _part(grain, 0, _shards(grain.numel, nodes.places).size_of(0))
        part = replace(part, device=meta)
        x = torch.empty(part.shape, dtype=part.dtype, device=meta)
        return self.inter.reduce(part, x, self.inter.init(part, inner), inner)

    def _placed(self, state: State, start: int, step: Step) -> State:
        """The inner state, whose owned shards lie within this rank's, which begins at `start`."""
        node = self.nodes(step.world_size).between.index(step.rank)
        return replace_leaves(state, lambda _, leaf: _moved(leaf, start + leaf.first(node)))


def in_levels(reducer: Reducer, sizes: Sequence[NodeSize]) -> Reducer:
    """Return a reducer between groups of groups of ranks, inside which nothing is compressed.

    Args:
        reducer: what goes between the coarsest groups.
        sizes: what the groups of each level have, the finest level first: ranks, then groups of the level before.
            A size of 1 makes no groups.

    >>> from gradwire.reducers import AllReduceExchange
    >>> from gradwire.codecs import Identity
    >>> in_levels(AllReduceExchange(Identity()), (8, 4)) == Hierarchical(
    ...     Hierarchical(AllReduceExchange(Identity()), 4), 8
    ... )
    True
    """
    for size in reversed(sizes):
        reducer = reducer if size == 1 else Hierarchical(reducer, size)
    return reducer


def _within_shard(state: State, start: int) -> State:
    """The state as the inner reducer made it, which knows of the shard from `start` on only."""
    return replace_leaves(state, lambda _, leaf: _moved(leaf, leaf.first(0) - start))


def _moved(leaf: Leaf, start: int) -> Leaf:
    return replace(leaf, start=start) if leaf.kind == "owned" else leaf


def _part(grain: Grain, start: int, numel: int) -> Grain:
    """Elements of a grain as a grain of their own; its name keeps the keys of shards apart."""
    name = f"{grain.name}@{start}"
    return Grain(name, (Segment(grain.name, start, numel, 0),), (numel,), grain.dtype, grain.device)


def _shards(numel: int, places: int) -> Shards:
    """The cut among the ranks of a node, aligned where there are several; a single rank has the whole."""
    return Shards(numel, places, _ALIGNED if places > 1 else 1)


def _node_mean(flat: Tensor, shards: Shards, nodes: NodeCut, step: Step) -> Generator[Collective, Tensor, Tensor]:
    """The node's part of the mean, of this rank's shard: its sum in rank order in float32 or better, times k/n."""
    if nodes.is_even and nodes.places == 1:
        return flat
    if nodes.is_even:
        received = yield collective.AllToAll(shards.rows(flat), nodes.inside)
    else:
        received = yield _to_servers(shards.rows(flat), nodes, step.rank)
        if not nodes.serves(step.rank):
            return flat.new_empty(0)
    numel = shards.size_of(nodes.place(step.rank))
    total = buffers.zeros((numel,), sum_dtype(flat.dtype), flat.device)
    values = received.reshape(-1).view(flat.dtype).view(nodes.inside.size_of(step.rank), shards.size)
    for row in collective.by_rank(values):
        total.add_(row[:numel], alpha=1.0 / nodes.ranks_per_node)
    return buffers.as_dtype(total, flat.dtype)


def _joined(
    mean: Tensor, x: Tensor, shards: Shards, nodes: NodeCut, step: Step
) -> Generator[Collective, Tensor, Tensor]:
    """The shards' means of all places, end to end."""
    if nodes.is_even and nodes.places == 1:
        return mean
    row = buffers.as_dtype(shards.padded(mean), x.dtype).view(torch.uint8)
    if nodes.is_even:
        rows = yield collective.AllGather(row, nodes.inside)
    else:
        rows = yield _to_all(row, nodes, step.rank)
    return shards.joined(rows, like=x)


def _to_servers(rows: Tensor, nodes: NodeCut, rank: int) -> collective.AllToAllV:
    """Row i for the rank of the node at place i, of those that serve a shard."""
    ranks, place, nbytes = nodes.inside.size_of(rank), nodes.place(rank), rows.shape[1]
    sends = tuple(nbytes * (to < nodes.places) for to in range(ranks))
    receives = (nbytes * nodes.serves(rank),) * ranks
    return collective.AllToAllV(rows.reshape(-1), sends, receives, place, nodes.inside)


def _to_all(row: Tensor, nodes: NodeCut, rank: int) -> collective.AllToAllV:
    """The row of a rank that serves a shard, for all ranks of its node."""
    ranks, place, nbytes = nodes.inside.size_of(rank), nodes.place(rank), row.numel()
    mine = nbytes * nodes.serves(rank)
    receives = tuple(nbytes * (source < nodes.places) for source in range(ranks))
    rows = row[:mine].repeat(ranks)
    return collective.AllToAllV(rows, (mine,) * ranks, receives, place, nodes.inside)
