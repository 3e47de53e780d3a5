"""Exchanges: how payloads of a codec become a mean that is the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.codecs.base import Codec, layout_of
from gradwire.core import collective
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.state import Leaf, State
from gradwire.reducers.base import Program, Reduced, Reducer, Step

_Encode = Callable[[Tensor, Key, Payload], None]


def payload_share(codec: Codec) -> float:
    """Bytes of a payload for each byte of a float32 tensor of a million elements.

    >>> from gradwire.codecs import FP16, TopK
    >>> payload_share(FP16()), round(payload_share(TopK(0.01)), 3)
    (0.5, 0.013)
    """
    return layout_of(codec, 1 << 20, torch.float32).nbytes / (4 << 20)


@dataclass(frozen=True, eq=False)
class SentPayload:
    """A payload of the whole tensor, scaled."""

    codec: Codec
    payload: Payload
    key: Key
    scale: float = 1.0

    def subtract_from(self, x: Tensor) -> None:
        """x -= scale * decode(payload)."""
        self.codec.accumulate(self.payload, x.view(-1), self.key, alpha=-self.scale)


@dataclass(frozen=True, eq=False)
class SentAll:
    """A tensor that was sent without loss."""

    def subtract_from(self, x: Tensor) -> None:
        """x = 0."""
        x.zero_()


@dataclass(frozen=True)
class AllReduce(Reducer):
    """mean = decode(sum over ranks of encode(x / n)): payloads ride one all-reduce.

    For additive codecs. Dividing comes before encoding, so that half precision overflows only where the mean does.
    Bytes a rank sends: 2 (n - 1)/n payloads on a ring.

    Args:
        codec: an additive codec (`Identity`, `FP16`, `BF16`, `RandomK`).

    Raises:
        CompositionError: a codec whose payloads cannot be added.

    >>> from gradwire.codecs import Identity
    >>> AllReduce(Identity())
    AllReduce(codec=Identity())
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not self.codec.additive:
            fit = "TwoShot" if self.codec.granularity else "SparseTwoShot"
            raise CompositionError(
                f"payloads of {self.codec} cannot be added, so they cannot ride an all-reduce: use exchange=twoshot "
                f"({fit}) or exchange=allgather (AllGather)"
            )

    @property
    def lossless(self) -> bool:
        """The codec's."""
        return self.codec.lossless

    @property
    def sums_in_halves(self) -> bool:
        """Where the codec's payload is of 16 bits."""
        fields = self.codec.layout(1).fields
        return any(field.dtype.is_floating_point and field.dtype.itemsize < 4 for field in fields)

    @property
    def payload_share(self) -> float:
        """The codec's."""
        return payload_share(self.codec)

    @property
    def shows_non_finite(self) -> bool:
        """The codec's."""
        return self.codec.shows_non_finite

    def init(self, grain: Grain, step: Step) -> State:
        """Nothing to remember."""
        return State()

    def contraction(self, grain: Grain) -> float | None:
        """The codec's."""
        return self.codec.contraction(grain.numel)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """One all-reduce."""
        key = step.key(grain)
        layout = layout_of(self.codec, x.numel(), x.dtype)
        payload = layout.views(layout.empty(x.device))
        self.codec.encode_divided_into(x.reshape(-1), step.world_size, key, payload)
        total = yield from self.total(payload[0], step)
        if self.lossless:
            return Reduced(total.view(x.shape), SentAll(), state)
        sent = SentPayload(self.codec, payload, key, scale=step.world_size)
        return Reduced(self.codec.decode((total,), like=x, key=key), sent, state)

    def total(self, payload: Tensor, step: Step) -> Generator[Collective, Tensor, Tensor]:
        """The sum over ranks of a 1-d tensor, the same bits on every rank; `payload` is kept unless lossless."""
        return (yield collective.AllReduce(payload, consumable=self.lossless))


@dataclass(frozen=True)
class AllGather(Reducer):
    """mean = 1/n sum over ranks, in rank order, of decode(encode(x_rank)): every payload goes to every rank.

    For any codec. The sum runs in rank order on every rank, so the mean is the same bit for bit. Bytes a rank
    sends: n - 1 payloads, so it suits sparse payloads and few ranks.

    Args:
        codec: any codec.
    """

    codec: Codec

    @property
    def lossless(self) -> bool:
        """The codec's."""
        return self.codec.lossless

    @property
    def payload_share(self) -> float:
        """The codec's."""
        return payload_share(self.codec)

    @property
    def shows_non_finite(self) -> bool:
        """The codec's."""
        return self.codec.shows_non_finite

    def init(self, grain: Grain, step: Step) -> State:
        """Nothing to remember."""
        return State()

    def contraction(self, grain: Grain) -> float | None:
        """The codec's."""
        return self.codec.contraction(grain.numel)

    def absolute_error(self, grain: Grain) -> float | None:
        """The codec's."""
        return self.codec.absolute_error(grain.numel)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """One all-gather."""
        return self._program(grain, x, state, step, self.codec.encode_into)

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """One all-gather, with the subtraction done by the encoder."""
        return self._program(grain, x, state, step, self.codec.encode_keeping_into)

    def _program(self, grain: Grain, x: Tensor, state: State, step: Step, encode: _Encode) -> Program:
        flat, key, n = x.reshape(-1), step.key(grain), step.world_size
        layout = layout_of(self.codec, flat.numel(), flat.dtype)
        wire = layout.empty(flat.device)
        payload = layout.views(wire)
        encode(flat, key, payload)
        rows = yield from self._gathered(wire, payload, flat)
        mean = torch.zeros(flat.numel(), device=flat.device, dtype=_accumulator_dtype(flat.dtype))
        for rank, row in enumerate(collective.by_rank(rows)):
            self.codec.accumulate(layout.views(row), mean, step.key(grain, rank=rank), alpha=1.0 / n)
        return Reduced(mean.to(x.dtype).view(x.shape), SentPayload(self.codec, payload, key), state)

    def _gathered(self, wire: Tensor, payload: Payload, x: Tensor) -> Generator[Collective, Tensor, Tensor]:
        """Every rank's wire; `x` is what its payload was made for."""
        return (yield collective.AllGather(wire))


@dataclass(frozen=True)
class AllGatherV(AllGather):
    """`AllGather` of as many bytes as the fullest payload uses, for codecs whose payloads have room to spare.

    A `Threshold` reserves room for `cap` of the entries and fills it seldom; behind what is used all is zero
    (`Codec.used_bytes`). The ranks agree on the largest used size by an all-reduce of 8 bytes first, which is one
    latency more, and put the zeros back: the mean is `AllGather`'s bit for bit. On a GPU the host waits for the size.
    Bytes a rank sends: n - 1 times the largest used size; without data (`gradwire cost`) the whole payload's, which is
    the most it can be.

    >>> from gradwire.codecs import Threshold
    >>> AllGatherV(Threshold(0.01))
    AllGatherV(codec=Threshold(tau=0.01, cap=0.05))
    """

    def _gathered(self, wire: Tensor, payload: Payload, x: Tensor) -> Generator[Collective, Tensor, Tensor]:
        """The sizes, then the heads of all wires."""
        mine = wire.numel() if wire.is_meta else self.codec.used_bytes(payload, x.numel(), x.dtype)
        used = yield collective.AllReduce(torch.tensor([mine], device=wire.device), op="max", consumable=True)
        size = wire.numel() if wire.is_meta else int(used)
        rows = yield collective.AllGather(wire[:size])
        return pad(rows, (0, wire.numel() - size))


@dataclass(frozen=True)
class TwoShot(Reducer):
    """Scatter-reduce then gather: about 2 (n - 1)/n payloads a rank, whatever n is.

    Rank j owns shard j of the tensor. Each rank encodes every shard and sends it to its owner (all-to-all); the
    owner decodes them in rank order, averages, adds what it still owes, encodes the mean again and sends it to all
    (all-gather). The second encoding has an error of its own, which the owner keeps as its residual s and adds next
    time (the server error of 1-bit Adam, Tang et al. 2021, Algorithm 1), else the mean is biased for good:

        y = mean_i decode(C(x_i)) + s,    mean = decode(C2(y)),    s' = y - mean

    A second codec that is unbiased and no contraction keeps no residual, which would grow without bound: its error is
    gone, so the exchange conserves nothing. The second rounding draws from a key of its own.

    Shards are of one size, a multiple of the codecs' granularity, but a payload holds only those of its elements that
    exist: zeros behind the end would dilute the last block's scale.

    Args:
        codec: of the first shot; its tensor must be divisible into shards.
        second: of the second shot; by default the first codec's `of_means`: the same, but for clipping.

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
            object.__setattr__(self, "second", self.codec.of_means)
        for codec in (self.codec, self.second):
            if not codec.granularity:
                raise CompositionError(
                    f"payloads of {codec} cannot be cut into shards: use SparseTwoShot (exchange=twoshot), which codes "
                    "each shard by itself, or AllGather (exchange=allgather)"
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
    def shows_non_finite(self) -> bool:
        """Where both codecs do."""
        return self.codec.shows_non_finite and self.second.shows_non_finite

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """Where the second encoding loses nothing, or the owner keeps what it lost."""
        return self.second.lossless or self._owes()

    def shard_numel(self, numel: int, world_size: int) -> int:
        """Elements of a shard: the same for all, a multiple of both codecs' granularity."""
        unit = math.lcm(self.codec.granularity, self.second.granularity)
        return _ceil_div(_ceil_div(numel, world_size), unit) * unit

    def _owes(self) -> bool:
        return not self.second.lossless and self.second.contraction(1) is not None

    def init(self, grain: Grain, step: Step) -> State:
        """The owner's residual: zeros, one for each element of the shard."""
        if not self._owes():
            return State()
        shard = self.shard_numel(grain.numel, step.world_size)
        return State(owner=Leaf(torch.zeros(shard, dtype=torch.float32, device=grain.device), "owned", owed=True))

    def contraction(self, grain: Grain) -> float | None:
        """The first codec's: the second's error stays with the owner."""
        return self.codec.contraction(grain.numel)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, sum, all-gather."""
        return self._program(grain, x, state, step, self.codec.encode_into)

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-to-all, sum, all-gather, with the subtraction done by the encoder."""
        return self._program(grain, x, state, step, self.codec.encode_keeping_into)

    def _program(self, grain: Grain, x: Tensor, state: State, step: Step, encode: _Encode) -> Program:
        flat, n, dtype = x.reshape(-1), step.world_size, _accumulator_dtype(x.dtype)
        numel = flat.numel()
        shard = self.shard_numel(numel, n)
        first, second = _Cut(self.codec, numel, shard, n, dtype), _Cut(self.second, numel, shard, n, dtype)
        fields, payload = first.empty(flat.device)
        encode(flat.to(dtype), step.key(grain, "first"), payload)
        received = yield collective.AllToAll(first.rows(fields))
        y = self._sum(grain, received, first, step)
        wire, state = self._encode_mean(grain, y, second, state, step)
        gathered = yield collective.AllGather(wire)
        mean = torch.empty(numel, dtype=x.dtype, device=flat.device)
        self.second.decode_into(second.join(gathered), mean, step.key(grain, "second"))
        return Reduced(mean.view(x.shape), SentPayload(self.codec, payload, step.key(grain, "first")), state)

    def _sum(self, grain: Grain, received: Tensor, first: _Cut, step: Step) -> Tensor:
        """The mean, in rank order, of what all ranks sent of this rank's shard."""
        y = torch.zeros(first.size_of(step.rank), device=received.device, dtype=first.dtype)
        for rank, row in enumerate(collective.by_rank(received)):
            payload = first.of_shard(row, step.rank)
            self.codec.accumulate(payload, y, step.key(grain, "first", rank=rank), alpha=1.0 / step.world_size)
        return y

    def _encode_mean(self, grain: Grain, y: Tensor, second: _Cut, state: State, step: Step) -> tuple[Tensor, State]:
        """The row of y + s, and the state with s' in it. `y` is used up."""
        key = step.key(grain, "second")
        owner = state.get("owner")
        if isinstance(owner, Leaf):
            y.add_(owner.tensor[: y.numel()])
        wire = torch.zeros(second.row.nbytes, dtype=torch.uint8, device=y.device)
        payload = second.of_shard(wire, step.rank)
        if not isinstance(owner, Leaf):
            self.second.encode_into(y, key, payload)
            return wire, state
        self.second.encode_keeping_into(y, key, payload)
        residual = pad(y.float(), (0, second.shard - y.numel())) if y.numel() < second.shard else y.float()
        return wire, State(owner=Leaf(residual, "owned", owed=True))


class _Cut:
    """A payload of a whole tensor, cut into one row a shard.

    A codec of some granularity codes each unit by itself, so the fields of a whole tensor are its shards' fields end
    to end: one call codes all shards. Rows are of one size; of a field in the row of a short shard only the head is
    used, and the rest is zero.
    """

    def __init__(self, codec: Codec, numel: int, shard: int, count: int, dtype: torch.dtype) -> None:
        self.codec, self.numel, self.shard, self.count, self.dtype = codec, numel, shard, count, dtype
        self.row = codec.layout(shard, dtype)
        self.whole = codec.layout(numel, dtype).fields

    def size_of(self, rank: int) -> int:
        """Elements of a rank's shard: fewer, or none, behind the end of the tensor."""
        return min(max(self.numel - rank * self.shard, 0), self.shard)

    def empty(self, device: torch.device) -> tuple[tuple[Tensor, ...], Payload]:
        """Return a buffer for each field of all rows, and the payload of the whole tensor as views of them."""
        even = self.numel == self.shard * self.count
        make = torch.empty if even else torch.zeros
        fields = tuple(make(field.numel * self.count, dtype=field.dtype, device=device) for field in self.row.fields)
        return fields, tuple(buffer[: field.numel] for buffer, field in zip(fields, self.whole, strict=True))

    def rows(self, fields: tuple[Tensor, ...]) -> Tensor:
        """Lay the fields out as one row a shard."""
        rows = self.row.empty(fields[0].device, rows=self.count)
        for at, field, buffer in zip(self.row.offsets, self.row.fields, fields, strict=True):
            rows[:, at : at + field.nbytes].copy_(buffer.view(torch.uint8).view(self.count, field.nbytes))
        return rows

    def join(self, rows: Tensor) -> Payload:
        """Return the payload of the whole tensor that one row a shard make up."""
        payload: list[Tensor] = []
        for at, field, whole in zip(self.row.offsets, self.row.fields, self.whole, strict=True):
            joined = rows[:, at : at + field.nbytes].reshape(-1).contiguous()  # a column of single bytes is a view
            payload.append(joined[: whole.nbytes].view(field.dtype))
        return tuple(payload)

    def of_shard(self, row: Tensor, rank: int) -> Payload:
        """Return the fields of one row, as long as that rank's shard is."""
        fields = self.codec.layout(self.size_of(rank), self.dtype).fields
        return tuple(view[: field.numel] for view, field in zip(self.row.views(row), fields, strict=True))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of half-precision tensors are taken in float32."""
    return dtype if dtype == torch.float64 else torch.float32
