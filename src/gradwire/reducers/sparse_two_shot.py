"""Two-shot for codecs whose payloads cannot be cut: every shard is coded by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.codecs.base import Codec
from gradwire.core import collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Program, Reduced, Reducer, Step
from gradwire.reducers.exchange import TwoShot, payload_share


@dataclass(frozen=True)
class SparseTwoShot(Reducer):
    """Scatter-reduce then gather of sparse payloads: about 2 (n - 1)/n payloads a rank, whatever n is.

    Rank j owns shard j of the tensor. Each rank encodes every shard by itself and sends it to its owner (all-to-all);
    the owner decodes them in rank order, averages, adds what it still owes, selects and encodes again, and sends that
    to all (all-gather). What the second selection leaves out is the owner's residual s:

        y = mean_i decode(C(x_i)) + s,    mean = decode(C2(y)),    s' = y - mean

    The largest k entries of a whole tensor fall unevenly over shards, so rows for them would need spare room, or counts
    in advance. Here each shard sends its own largest k/n: of all choices that fit in rows of k/n entries it is the one
    that leaves the least behind, and every row has the same size. Where a few shards hold most of a gradient, they take
    more steps to drain than with `AllGather`, whose n - 1 payloads a rank are as many bytes at two ranks and more from
    three on.

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
                f"payloads of {self.codec} can be added, which costs no second shot: use exchange=allreduce (AllReduce)"
            )
        if not (self.second.lossless or self.second.unbiased or self._owes()):
            raise CompositionError(
                f"{self.second} is no contraction, so a shard's owner could not keep what it loses in the second shot: "
                "use bf16 or fp32 values, or exchange=allgather (AllGather)"
            )

    @property
    def lossless(self) -> bool:
        """Where both codecs are."""
        return self.codec.lossless and self.second.lossless

    @property
    def payload_share(self) -> float:
        """The codec's."""
        return payload_share(self.codec)

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """Where the second encoding loses nothing, or the owner keeps what it lost."""
        return self.second.lossless or self._owes()

    def _owes(self) -> bool:
        return not self.second.lossless and self.second.contraction(1) is not None

    def init(self, grain: Grain, step: Step) -> State:
        """The owner's residual: zeros, one for each element of the shard."""
        if not self._owes():
            return State()
        shard = -(-grain.numel // step.world_size)
        return State(owner=Leaf(torch.zeros(shard, dtype=torch.float32, device=grain.device), "owned", owed=True))

    def contraction(self, grain: Grain) -> float | None:
        """Half the codec's on the whole: k is rounded in every shard.

        With z = density * d, max(1, round(z)) is at least 2/3 z in a shard and at most 4/3 z (or 1) on the whole.
        """
        delta = self.codec.contraction(grain.numel)
        return None if delta is None else delta / 2

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, sum and select, all-gather."""
        flat, dtype = x.reshape(-1), torch.float64 if x.dtype == torch.float64 else torch.float32
        first = _Shards(self.codec, flat.numel(), step.world_size, dtype)
        second = _Shards(self.second, flat.numel(), step.world_size, dtype)
        sent = SentShards(first, first.encode(flat.to(dtype), step.key(grain, "first")), step.key(grain, "first"))
        received = yield collective.AllToAll(sent.rows)
        y = torch.zeros(first.size_of(step.rank), device=flat.device, dtype=dtype)
        for rank, row in enumerate(collective.by_rank(received)):
            key = _of_shard(step.key(grain, "first", rank=rank), step.rank)
            self.codec.accumulate(first.payload(row, step.rank), y, key, alpha=1.0 / step.world_size)
        row, state = self._select(y, second, state, step.rank, step.key(grain, "second"))
        rows = yield collective.AllGather(row)
        mean = torch.empty(flat.numel(), dtype=x.dtype, device=flat.device)
        for rank, row in enumerate(collective.by_rank(rows)):
            key = step.key(grain, "second", rank=rank)
            self.second.decode_into(second.payload(row, rank), second.shard(mean, rank), key)
        return Reduced(mean.view(x.shape), sent, state)

    def _select(self, y: Tensor, second: _Shards, state: State, rank: int, key: Key) -> tuple[Tensor, State]:
        """The row of y + s, and the state with s' in it. `y` is used up."""
        owner = state.get("owner")
        if isinstance(owner, Leaf):
            y.add_(owner.tensor[: y.numel()])
        row = torch.zeros(second.nbytes, dtype=torch.uint8, device=y.device)
        payload = second.payload(row, rank)
        self.second.encode_into(y, key, payload)
        if isinstance(owner, Leaf):
            self.second.accumulate(payload, y, key, alpha=-1.0)
            residual = pad(y.float(), (0, owner.tensor.numel() - y.numel()))
            state = State(owner=Leaf(residual, "owned", owed=True))
        return row, state


class _Shards:
    """A tensor cut into `count` shards of one size, each coded by itself into a row of the same length."""

    def __init__(self, codec: Codec, numel: int, count: int, dtype: torch.dtype) -> None:
        self.codec, self.numel, self.count, self.dtype = codec, numel, count, dtype
        self.size = -(-numel // count)
        self.layouts = {size: codec.layout(size, dtype) for size in {self.size_of(rank) for rank in range(count)}}
        self.nbytes = max(layout.nbytes for layout in self.layouts.values())

    def size_of(self, rank: int) -> int:
        """Elements of a rank's shard: fewer, or none, behind the end of the tensor."""
        return min(max(self.numel - rank * self.size, 0), self.size)

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """The elements of a rank's shard, as a view."""
        return x[rank * self.size : (rank + 1) * self.size]

    def payload(self, row: Tensor, rank: int) -> Payload:
        """The fields in a rank's row."""
        layout = self.layouts[self.size_of(rank)]
        return layout.views(row[: layout.nbytes])

    def encode(self, x: Tensor, key: Key) -> Tensor:
        """Return one row a shard."""
        rows = torch.zeros(self.count, self.nbytes, dtype=torch.uint8, device=x.device)
        for rank, row in enumerate(collective.by_rank(rows)):
            self.codec.encode_into(self.shard(x, rank), _of_shard(key, rank), self.payload(row, rank))
        return rows


@dataclass(frozen=True, eq=False)
class SentShards:
    """One row a shard."""

    shards: _Shards
    rows: Tensor
    key: Key

    def subtract_from(self, x: Tensor) -> None:
        """x -= what the rows decode to."""
        flat = x.view(-1)
        for rank, row in enumerate(collective.by_rank(self.rows)):
            payload, key = self.shards.payload(row, rank), _of_shard(self.key, rank)
            self.shards.codec.accumulate(payload, self.shards.shard(flat, rank), key, alpha=-1.0)


def _of_shard(key: Key, rank: int) -> Key:
    """A shard's own key: a codec counts elements from the start of what it is given."""
    return key.with_(stage=f"{key.stage}/{rank}")


def two_shot(codec: Codec) -> Reducer:
    """Return the two-shot exchange that suits a codec: shards of one payload, or shards coded one by one.

    >>> from gradwire.codecs import BlockInt, TopK
    >>> type(two_shot(BlockInt(4))).__name__, type(two_shot(TopK(0.1))).__name__
    ('TwoShot', 'SparseTwoShot')
    """
    return TwoShot(codec) if codec.granularity else SparseTwoShot(codec)
