"""The first half of a two-shot: each rank ends with its own shard of the mean, as sharded training wants it."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec
from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.sharding import CutPayload, Encode, ShardedPayload, ShardPayloads, Shards, sum_dtype
from gradwire.reducers.step import Program, Reduced, Step


class OnShards(Reducer):
    """A reducer after which each rank has its own shard of the result, 1-d, and nothing of the others."""

    codec: Codec

    @property
    @override
    def scatters(self) -> bool:
        return True

    @property
    def ends_alike(self) -> bool:
        """No: each rank with its own shard."""
        return False

    @property
    @override
    def lossless(self) -> bool:
        return self.codec.lossless

    @abstractmethod
    def shards(self, numel: int, world_size: int) -> Shards:
        """Return how a tensor of `numel` elements is cut."""

    @override
    def owned(self, grain: Grain, step: Step) -> slice:
        return self.shards(grain.numel, step.world_size).of(step.rank)


class Scatter(OnShards):
    """A reducer whose result is this rank's shard of the mean: `reduce` returns it as `mean`, 1-d.

    Each rank encodes every shard and sends it to its owner (all-to-all), who decodes them in rank order and averages:

        y_j = 1/n sum over ranks i of decode(C(x_i))[shard j]

    Bytes a rank sends: (n - 1)/n payloads. Tensors in half precision are coded as float32, so `Identity` sends twice
    their bytes and `BF16` or `FP16` as many. `owned` says which elements the result holds. Error feedback, a `Guard`
    and other wrappers go around it as around any reducer. No rank sees the whole mean, so `shows_non_finite` is False
    whatever the codec is, and a guard has the ranks agree on a flag.
    """

    @abstractmethod
    def sharded(self, numel: int, world_size: int, dtype: torch.dtype) -> ShardedPayload:
        """Return how its payloads are made."""

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    @override
    def contraction(self, grain: Grain) -> float | None:
        return self.codec.contraction(grain.numel)

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return self._program(grain, x, state, step, self.codec.encode_into)

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all and sum, with the subtraction done by the encoder."""
        return self._program(grain, x, state, step, self.codec.encode_keeping_into)

    def _program(self, grain: Grain, x: Tensor, state: State, step: Step, encode: Encode) -> Program:
        flat, n = buffers.as_dtype(x.reshape(-1), sum_dtype(x.dtype)), step.world_size
        sharded = self.sharded(flat.numel(), n, flat.dtype)
        rows, sent = sharded.encode(flat, step.key(grain, "first"), encode)
        received = yield collective.AllToAll(rows)
        mean = buffers.zeros((sharded.shards.size_of(step.rank),), flat.dtype, flat.device)
        for rank, row in enumerate(collective.by_rank(received)):
            sharded.accumulate(row, step.rank, mean, step.key(grain, "first", rank=rank), alpha=1.0 / n)
        return Reduced(buffers.as_dtype(mean, x.dtype), sent, state)


@dataclass(frozen=True)
class ScatterReduce(Scatter):
    """Scatter-reduce of one payload that is cut into shards: all of them are coded by one call.

    Shards are of one size, a multiple of the codec's granularity, but a payload holds only those of its elements that
    exist: zeros behind the end would dilute the last block's scale.

    Args:
        codec: its tensor must be divisible into shards.
        unit: shards are also cut at multiples of this many elements.

    Raises:
        CompositionError: a codec that cannot be cut into shards of equal payloads.

    >>> from gradwire import Lockstep
    >>> from gradwire.codecs import Identity
    >>> from gradwire.core.grain import flat_grain
    >>> ranks = Lockstep(ScatterReduce(Identity()), flat_grain(3), world_size=2)
    >>> ranks.step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 5.0])])
    [tensor([2., 2.]), tensor([4.])]
    """

    codec: Codec
    unit: int = 1

    def __post_init__(self) -> None:
        require_cuttable(self.codec)

    def shards(self, numel: int, world_size: int) -> Shards:
        """Cut at multiples of the unit and of the codec's granularity."""
        return Shards(numel, world_size, math.lcm(self.unit, self.codec.granularity))

    @override
    def sharded(self, numel: int, world_size: int, dtype: torch.dtype) -> CutPayload:
        return CutPayload(self.codec, self.shards(numel, world_size), dtype)


@dataclass(frozen=True)
class ShardwiseScatterReduce(Scatter):
    """Scatter-reduce of shards that are coded one by one: for any codec, and shards of ceil(numel / n) elements.

    The largest k entries of a whole tensor fall unevenly over shards, so rows for them would need spare room, or counts
    in advance. Here each shard sends its own largest k/n: of all choices that fit in rows of k/n entries it is the one
    that leaves the least behind, and every row has the same size.

    Args:
        codec: any codec; it needs no `granularity`.

    >>> from gradwire import Lockstep
    >>> from gradwire.codecs import TopK
    >>> from gradwire.core.grain import flat_grain
    >>> ranks = Lockstep(ShardwiseScatterReduce(TopK(0.5)), flat_grain(4), world_size=2)
    >>> ranks.step([torch.tensor([4.0, 1.0, 2.0, 3.0])] * 2)
    [tensor([4., 0.]), tensor([0., 3.])]
    """

    codec: Codec

    def contraction(self, grain: Grain) -> float | None:
        """Half of the codec's contraction for the whole tensor, since k is rounded in every shard.

        With z = density * d, max(1, round(z)) is at least 2/3 z in a shard and at most 4/3 z (or 1) on the whole.
        """
        delta = self.codec.contraction(grain.numel)
        return None if delta is None else delta / 2

    def shards(self, numel: int, world_size: int) -> Shards:
        """As even as can be."""
        return Shards(numel, world_size)

    def sharded(self, numel: int, world_size: int, dtype: torch.dtype) -> ShardPayloads:
        """A payload a shard."""
        return ShardPayloads(self.codec, self.shards(numel, world_size), dtype)


def require_cuttable(codec: Codec) -> None:
    """Refuse a codec whose payloads cannot be cut into shards.

    Raises:
        CompositionError: with what to use instead.
    """
    if not codec.granularity:
        raise CompositionError(
            f"payloads of {codec} cannot be cut into shards: use SparseTwoShot (exchange=twoshot), which codes "
            "each shard by itself, or AllGatherExchange (exchange=allgather)"
        )


def scatter_reduce(codec: Codec) -> Scatter:
    """Return the scatter-reduce that suits a codec: shards of one payload, or shards coded one by one.

    >>> from gradwire.codecs import BlockInt, TopK
    >>> type(scatter_reduce(BlockInt(4))).__name__, type(scatter_reduce(TopK(0.1))).__name__
    ('ScatterReduce', 'ShardwiseScatterReduce')
    """
    return ScatterReduce(codec) if codec.granularity else ShardwiseScatterReduce(codec)
