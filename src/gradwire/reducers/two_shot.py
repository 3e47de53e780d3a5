"""Two-shot exchanges: a scatter-reduce, then a gather. Bytes do not grow with the number of ranks."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec, payload_share
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.gather import Gather, ShardGather, ShardwiseGather
from gradwire.reducers.scatter_reduce import Scatter, ScatterReduce, ShardwiseScatterReduce, require_cuttable
from gradwire.reducers.sharding import Shards, sum_dtype
from gradwire.reducers.step import Program, Reduced, Step


class _Halves(Reducer):
    """Two halves, one after the other."""

    codec: Codec
    second: Codec

    @property
    @abstractmethod
    def scatter(self) -> Scatter:
        """The program of the first half."""

    @property
    @abstractmethod
    def gather(self) -> ShardGather:
        """The second half, with the owner's residual."""

    @property
    @override
    def payload_share(self) -> float:
        return payload_share(self.codec)

    @property
    def lossless(self) -> bool:
        """Where both codecs are."""
        return self.codec.lossless and self.second.lossless

    @property
    def conserves_sum(self) -> bool:  # type: ignore[override]
        """Where the second encoding loses nothing, or the owner keeps what it lost."""
        return self.gather.conserves_sum

    def scattered(self) -> Reducer:
        """The first half, in shards that are coded one by one."""
        return ShardwiseScatterReduce(self.codec)

    def init(self, grain: Grain, step: Step) -> State:
        """The owner's residual: zeros, one for each element of the shard."""
        return self.gather.init(grain, step)

    def contraction(self, grain: Grain) -> float | None:
        """The first half's: the second's error stays with the owner."""
        return self.scatter.contraction(grain)

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return self._program(grain, x, state, step, keeping=False)

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, sum, all-gather, with the subtraction done by the encoder."""
        return self._program(grain, x, state, step, keeping=True)

    def _program(self, grain: Grain, x: Tensor, state: State, step: Step, keeping: bool) -> Program:
        scatter = self.scatter
        run = scatter.reduce_keeping if keeping else scatter.reduce
        # In the dtype of sums, so that the owner's shard is not rounded between the halves.
        mine = yield from run(grain, buffers.as_dtype(x, sum_dtype(x.dtype)), State(), step)
        whole = yield from self.gather.gather(grain, mine.value, state, step, x.dtype)
        return Reduced(whole.tensor.view(x.shape), mine.sent, whole.state)


@dataclass(frozen=True)
class TwoShot(_Halves):
    """Scatter-reduce then gather: about 2 (n - 1)/n payloads a rank, whatever n is.

    Rank j owns shard j of the tensor. Each rank encodes every shard and sends it to its owner (all-to-all); the
    owner decodes them in rank order, averages, adds what it still owes, encodes the mean again and sends it to all
    (all-gather). The second encoding has an error of its own, which the owner keeps as its residual s and adds next
    time (the server error of 1-bit Adam, Tang et al. 2021, Algorithm 1), else the mean is biased for good:

        y = mean_i decode(C(x_i)) + s,    mean = decode(C2(y)),    s' = y - mean

    A second codec that is unbiased and no contraction keeps no residual, which would grow without bound: its error is
    gone, so the exchange conserves nothing. The second rounding draws from a key of its own. The halves can be had
    alone: `ScatterReduce` and `Gather`.

    Args:
        codec: of the first shot; its tensor must be divisible into shards.
        second: of the second shot; by default the first codec's `second_shot_codec`: the same, but for clipping.

    Raises:
        CompositionError: a codec that cannot be cut into shards of equal payloads.

    >>> from gradwire.codecs import BlockInt
    >>> TwoShot(BlockInt(4)).second
    BlockInt(bits=4, block=256, stochastic=False)
    """

    codec: Codec
    second: Codec = None  # type: ignore[assignment]  # by default of the first's means, set below

    # For `repr` and equality the second codec must be the one used, so it is resolved once, here.
    def __post_init__(self) -> None:
        if self.second is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "second", self.codec.second_shot_codec)
        require_cuttable(self.codec)
        require_cuttable(self.second)

    @property
    def shows_non_finite(self) -> bool:
        """Where both codecs do."""
        return self.codec.shows_non_finite and self.second.shows_non_finite

    @property
    def scatter(self) -> ScatterReduce:
        """Shards of one payload."""
        return ScatterReduce(self.codec, self._unit)

    @property
    def gather(self) -> Gather:
        """Shards of one payload."""
        return Gather(self.second, self._unit)

    @property
    def _unit(self) -> int:
        return math.lcm(self.codec.granularity, self.second.granularity)

    def shards(self, numel: int, world_size: int) -> Shards:
        """Return how a tensor of `numel` elements is cut: at multiples of both codecs' granularity."""
        return self.scatter.shards(numel, world_size)


@dataclass(frozen=True)
class SparseTwoShot(_Halves):
    """Scatter-reduce then gather of sparse payloads: about 2 (n - 1)/n payloads a rank, whatever n is.

    Rank j owns shard j of the tensor. Each rank encodes every shard by itself and sends it to its owner (all-to-all);
    the owner decodes them in rank order, averages, adds what it still owes, selects and encodes again, and sends that
    to all (all-gather). What the second selection leaves out is the owner's residual s:

        y = mean_i decode(C(x_i)) + s,    mean = decode(C2(y)),    s' = y - mean

    Each shard sends its own largest k/n (see `ShardwiseScatterReduce`). Where a few shards hold most of a gradient,
    they take more steps to drain than with `AllGatherExchange`, whose n - 1 payloads a rank are as many bytes at two
    ranks and more from three on.

    Args:
        codec: of the first shot: `TopK`, or a `Chain` of it. It needs no `granularity`.
        second: of the second shot; by default the same.

    Raises:
        CompositionError: an additive codec, which rides an all-reduce, or a second one whose error nobody could keep.

    References:
        Renggli et al. 2019, "SparCML", splits a sparse all-reduce into shards and gathers them, with sizes exchanged
        and no second selection; Li & Hoefler 2022, "Near-optimal sparse allreduce for distributed deep learning",
        selects again and balances shards by moving their bounds.

    >>> from gradwire.codecs import TopK
    >>> SparseTwoShot(TopK(0.01)).second
    TopK(density=0.01, values='fp32', indices='auto')
    """

    codec: Codec
    second: Codec = None  # type: ignore[assignment]  # by default the first, set below

    def __post_init__(self) -> None:
        if self.second is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "second", self.codec)
        if self.codec.additive:
            raise CompositionError(
                f"payloads of {self.codec} can be added, which costs no second shot: use exchange=allreduce "
                "(AllReduceExchange)"
            )
        if not (self.gather.conserves_sum or self.second.unbiased):
            raise CompositionError(
                f"{self.second} is no contraction, so a shard's owner could not keep what it loses in the second shot: "
                "use bf16 or fp32 values, or exchange=allgather (AllGatherExchange)"
            )

    @property
    def scatter(self) -> ShardwiseScatterReduce:
        """Shards coded one by one."""
        return ShardwiseScatterReduce(self.codec)

    @property
    def gather(self) -> ShardwiseGather:
        """Shards coded one by one."""
        return ShardwiseGather(self.second)


def two_shot(codec: Codec) -> Reducer:
    """Return the two-shot exchange that suits a codec: shards of one payload, or shards coded one by one.

    >>> from gradwire.codecs import BlockInt, TopK
    >>> type(two_shot(BlockInt(4))).__name__, type(two_shot(TopK(0.1))).__name__
    ('TwoShot', 'SparseTwoShot')
    """
    return TwoShot(codec) if codec.granularity else SparseTwoShot(codec)
