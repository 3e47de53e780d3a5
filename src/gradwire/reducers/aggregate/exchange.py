"""Exchanges with a rule: which rank gets which columns of the n gradients, and how the result reaches all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs import Identity
from gradwire.codecs.base import Codec, layout_of
from gradwire.core import agreement, buffers, collective
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.payload import Layout
from gradwire.core.state import Leaf, State
from gradwire.kernels import robust
from gradwire.reducers.aggregate.rule import Rule
from gradwire.reducers.base import Reducer
from gradwire.reducers.scatter_reduce import OnShards, ShardwiseScatterReduce
from gradwire.reducers.sent import SentAll, SentPayload
from gradwire.reducers.sharding import ShardPayloads, Shards, sum_dtype
from gradwire.reducers.step import Program, Reduced, Step


class Aggregate(Reducer):
    """A reducer whose result is what a rule makes of all ranks' tensors, and no mean."""

    rule: Rule
    conserves_sum: ClassVar[bool] = False

    @property
    def averages(self) -> bool:
        """False: it is what the rule says."""
        return False

    @property
    @override
    def linear(self) -> bool:
        return self.rule.linear

    @property
    @override
    def fewest_ranks(self) -> int:
        return self.rule.fewest_ranks

    def init(self, grain: Grain, step: Step) -> State:
        """The last result where the rule wants it, at first zeros.

        Raises:
            CompositionError: fewer ranks than the rule needs.
        """
        self.require_ranks(step.world_size)
        if not self.rule.remembers:
            return State()
        last = torch.zeros(self._columns(grain, step), dtype=sum_dtype(grain.dtype), device=grain.device)
        return State(last=Leaf(last, "owned", scaled=True))

    @abstractmethod
    def _columns(self, grain: Grain, step: Step) -> int:
        """How many columns of the rows this rank combines."""


@dataclass(frozen=True)
class Sharded(Aggregate):
    """Rank j gets shard j of every rank's tensor, applies the rule, sends the result to all: the bytes of a mean.

    An all-to-all of rows and an all-gather of the result, 2 (n - 1)/n tensors a rank whatever n is, and no rank ever
    holds more than one tensor's worth of rows. A geometric rule also needs the squared distances between whole
    gradients: each owner computes those of its shards, and one small collective a step, n^2 float64 values, adds them
    up over owners and grains (`Total`), so the rule is the same as on the whole model in one piece. It has to wait for
    the backward pass to end; rules that look at coordinates alone do not.

    Each element of the result is computed by one rank, so it is the same everywhere bit for bit.

    Args:
        rule: e.g. `Median()`, `Krum(1)`.

    >>> from gradwire.drivers.lockstep import Lockstep
    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.reducers.aggregate import Median
    >>> ranks = Lockstep(Sharded(Median()), flat_grain(2), world_size=3)
    >>> ranks.step([torch.tensor([1.0, 5.0]), torch.tensor([2.0, 6.0]), torch.tensor([-100.0, 7.0])])[2]
    tensor([1., 6.])
    """

    rule: Rule

    @property
    def lossless(self) -> bool:
        """True: gradients travel as they are."""
        return True

    def contraction(self, grain: Grain) -> float | None:
        """1: nothing is lost on the way to the rule."""
        return 1.0

    @override
    def scattered(self) -> Reducer:
        return RuleOnShards(self.rule)

    def _columns(self, grain: Grain, step: Step) -> int:
        return Shards(grain.numel, step.world_size).size

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, the rule, all-gather."""
        shards = Shards(x.numel(), step.world_size)
        received = yield collective.AllToAll(shards.rows(x))
        values = buffers.as_dtype(shards.values(received, x.dtype), sum_dtype(x.dtype))
        rows, distances = _remembering(values, state), None
        if self.rule.geometric:
            distances = yield agreement.Total(robust.squared_distances(rows), of=self)
        combined = self.rule.combine(rows, distances)
        gathered = yield collective.AllGather(buffers.as_dtype(combined, x.dtype).view(torch.uint8))
        return Reduced(shards.joined(gathered, like=x), SentAll(), _remembered(combined, state))


@dataclass(frozen=True)
class Gathered(Aggregate):
    """Every payload goes to every rank, which decodes them all and applies the rule: a rule over any codec.

    As `AllGatherExchange`, n - 1 payloads a rank, so it suits sparse payloads and few ranks. Every rank has all rows of
    a grain at hand while it combines them: n tensors of a grain's size, decoded a second time by geometric rules, which
    wait for the distances over all grains of the step (with no further bytes), so that only payloads are kept
    meanwhile.

    What a codec loses is lost, since error feedback needs a `linear` rule, so the codec should lose little (`FP16`,
    `BlockInt(8)`): most of what rules see of top-k payloads are zeros, and the median of those is zero.

    Args:
        rule: e.g. `Median()`, `Krum(1)`.
        codec: any codec.

    Raises:
        CompositionError: a rule that remembers its last result.
    """

    rule: Rule
    codec: Codec

    def __post_init__(self) -> None:
        if self.rule.remembers:
            raise CompositionError(f"{self.rule} keeps its last result by shards: use it without a codec, as Sharded")

    @property
    @override
    def lossless(self) -> bool:
        return self.codec.lossless

    @override
    def contraction(self, grain: Grain) -> float | None:
        return self.codec.contraction(grain.numel)

    @override
    def scattered(self) -> Reducer:
        return RuleOnShards(self.rule, self.codec)

    def _columns(self, grain: Grain, step: Step) -> int:
        return grain.numel

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """One all-gather, then the rule."""
        flat, key = x.reshape(-1), step.key(grain)
        layout = layout_of(self.codec, flat.numel(), flat.dtype)
        wire = layout.empty(flat.device)
        payload = layout.views(wire)
        self.codec.encode_into(flat, key, payload)
        received = yield collective.AllGather(wire)
        combined = yield from self._combine(grain, received, layout, flat, step)
        return Reduced(buffers.as_dtype(combined, x.dtype).view(x.shape), SentPayload(self.codec, payload, key), state)

    def _combine(
        self, grain: Grain, received: Tensor, layout: Layout, like: Tensor, step: Step
    ) -> Generator[Collective, Tensor, Tensor]:
        rows, distances = self._decoded(grain, received, layout, like, step), None
        if self.rule.geometric:
            mine = robust.squared_distances(rows)
            del rows  # what waits for the other grains should be small
            distances = yield agreement.Total(mine, of=self, over="grains")
            rows = self._decoded(grain, received, layout, like, step)
        return self.rule.combine(rows, distances)

    def _decoded(self, grain: Grain, received: Tensor, layout: Layout, like: Tensor, step: Step) -> Tensor:
        """All ranks' tensors, one a row."""
        rows = buffers.empty((len(received), like.numel()), sum_dtype(like.dtype), like.device)
        for rank, (wire, row) in enumerate(zip(received, rows, strict=True)):
            self.codec.decode_into(layout.views(wire), row, step.key(grain, rank=rank))
        return rows


@dataclass(frozen=True)
class RuleOnShards(OnShards, Aggregate):
    """Rank j gets shard j of every rank's tensor and applies the rule to it: its shard of the result, for FSDP2.

        y_j = rule(decode(C(x_1))[shard j], ..., decode(C(x_n))[shard j])

    An all-to-all, as a scatter-reduce makes it: (n - 1)/n payloads a rank. A rule that looks at coordinates alone
    (`Median`, `TrimmedMean`) needs nothing else. A geometric one also needs the distances between ranks: each owner
    computes those of its shard, and one more small collective, n^2 float64 values, adds them up over owners and grains
    (`Total`). Under FSDP2 the grains of a parameter group are reduced by themselves, inside the backward pass, so there
    distances are those of the group: `Krum` chooses anew for each group, and `CenteredClipping` has its radius in each.
    A guarantee in terms of distances then holds for each group by itself.

    Shards are coded one by one, and tensors in half precision as float32. What a codec loses is lost.

    Args:
        rule: e.g. `Median()`, `Krum(1)`.
        codec: what shards travel in, as they are by default.

    >>> from gradwire.drivers.lockstep import Lockstep
    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.reducers.aggregate import Median
    >>> ranks = Lockstep(RuleOnShards(Median()), flat_grain(4), world_size=3)
    >>> ranks.step([torch.arange(4.0), torch.arange(4.0) + 1.0, torch.full((4,), -100.0)])
    [tensor([0., 1.]), tensor([2., 3.]), tensor([])]
    """

    rule: Rule
    codec: Codec = field(default_factory=Identity)

    @override
    def shards(self, numel: int, world_size: int) -> Shards:
        return Shards(numel, world_size)

    @override
    def contraction(self, grain: Grain) -> float | None:
        return ShardwiseScatterReduce(self.codec).contraction(grain)

    def _columns(self, grain: Grain, step: Step) -> int:
        return self.shards(grain.numel, step.world_size).size

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, then the rule."""
        flat, n = buffers.as_dtype(x.reshape(-1), sum_dtype(x.dtype)), step.world_size
        shards = self.shards(flat.numel(), n)
        sharded, size = ShardPayloads(self.codec, shards, flat.dtype), shards.size_of(step.rank)
        sent_rows, sent = sharded.encode(flat, step.key(grain, "first"), self.codec.encode_into)
        received = yield collective.AllToAll(sent_rows)
        values = buffers.zeros((n, shards.size), flat.dtype, flat.device)
        for rank, row in enumerate(collective.by_rank(received)):
            sharded.accumulate(row, step.rank, values[rank, :size], step.key(grain, "first", rank=rank), alpha=1.0)
        rows, distances = _remembering(values, state), None
        if self.rule.geometric:
            distances = yield agreement.Total(robust.squared_distances(rows), of=self)
        combined = self.rule.combine(rows, distances)
        return Reduced(buffers.as_dtype(combined[:size], x.dtype), sent, _remembered(combined, state))


def _remembering(rows: Tensor, state: State) -> Tensor:
    """The rows, and behind them the last result where there is one."""
    last = state.get("last")
    return buffers.joined([rows, last.tensor.view(1, -1)]) if isinstance(last, Leaf) else rows


def _remembered(combined: Tensor, state: State) -> State:
    return State(last=Leaf(combined, "owned", scaled=True)) if "last" in state else state
