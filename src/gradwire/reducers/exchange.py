"""Exchanges: how payloads of a codec become a mean that is the same on every rank."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec, layout_of, payload_share
from gradwire.core import buffers, collective
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.payload import Payload
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.scatter_reduce import ShardwiseScatterReduce
from gradwire.reducers.sent import SentAll, SentPayload
from gradwire.reducers.sharding import Encode, sum_dtype
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class _OfCodec(Reducer):
    """An exchange of whole payloads of a codec."""

    codec: Codec

    @property
    @override
    def lossless(self) -> bool:
        return self.codec.lossless

    @property
    @override
    def payload_share(self) -> float:
        return payload_share(self.codec)

    @property
    @override
    def shows_non_finite(self) -> bool:
        return self.codec.shows_non_finite

    def scattered(self) -> Reducer:
        """The scatter-reduce of the same codec."""
        return ShardwiseScatterReduce(self.codec)

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    @override
    def contraction(self, grain: Grain) -> float | None:
        return self.codec.contraction(grain.numel)


@dataclass(frozen=True)
class AllReduceExchange(_OfCodec):
    """mean = decode(sum over ranks of encode(x / n)): payloads ride one all-reduce.

    For additive codecs. Dividing comes before encoding, so that half precision overflows only where the mean does.
    Bytes a rank sends: 2 (n - 1)/n payloads on a ring.

    Args:
        codec: an additive codec (`Identity`, `FP16`, `BF16`, `RandomK`).

    Raises:
        CompositionError: a codec whose payloads cannot be added.

    >>> from gradwire.codecs import Identity
    >>> AllReduceExchange(Identity())
    AllReduceExchange(codec=Identity())
    """

    def __post_init__(self) -> None:
        if not self.codec.additive:
            fit = "TwoShot" if self.codec.granularity else "SparseTwoShot"
            raise CompositionError(
                f"payloads of {self.codec} cannot be added, so they cannot ride an all-reduce: use exchange=twoshot "
                f"({fit}) or exchange=allgather (AllGatherExchange)"
            )

    @property
    def sums_in_16_bits(self) -> bool:
        """Where the codec's payload is of 16 bits."""
        fields = self.codec.layout(1).fields
        return any(field.dtype.is_floating_point and field.dtype.itemsize < 4 for field in fields)

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        key = step.key(grain)
        layout = layout_of(self.codec, x.numel(), x.dtype)
        payload = layout.views(layout.empty(x.device))
        self.codec.encode_divided_into(x.reshape(-1), step.world_size, key, payload)
        total = yield from self.total(payload[0], step)
        if self.lossless:
            return Reduced(total.view(x.shape), SentAll(), state)
        sent = SentPayload(self.codec, payload, key, scale=step.world_size)
        mean = step.empty(x.numel(), x)
        self.codec.decode_into((total,), mean, key)
        return Reduced(mean.view(x.shape), sent, state)

    def total(self, payload: Tensor, step: Step) -> Generator[Collective, Tensor, Tensor]:
        """The sum over ranks of a 1-d tensor, the same bits on every rank; `payload` is kept unless lossless."""
        return (yield collective.AllReduce(payload, consumable=self.lossless))


@dataclass(frozen=True)
class AllGatherExchange(_OfCodec):
    """mean = 1/n sum over ranks, in rank order, of decode(encode(x_rank)): every payload goes to every rank.

    For any codec. The sum runs in rank order on every rank, so the mean is the same bit for bit. Bytes a rank
    sends: n - 1 payloads, so it suits sparse payloads and few ranks.

    Args:
        codec: any codec.
    """

    @override
    def absolute_error(self, grain: Grain) -> float | None:
        return self.codec.absolute_error(grain.numel)

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return self._program(grain, x, state, step, self.codec.encode_into)

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """One all-gather, with the subtraction done by the encoder."""
        return self._program(grain, x, state, step, self.codec.encode_keeping_into)

    def _program(self, grain: Grain, x: Tensor, state: State, step: Step, encode: Encode) -> Program:
        flat, key, n = x.reshape(-1), step.key(grain), step.world_size
        layout = layout_of(self.codec, flat.numel(), flat.dtype)
        wire = layout.empty(flat.device)
        payload = layout.views(wire)
        encode(flat, key, payload)
        rows = yield from self._gathered(wire, payload, flat)
        mean = step.empty(flat.numel(), flat, sum_dtype(flat.dtype)).zero_()
        for rank, row in enumerate(collective.by_rank(rows)):
            self.codec.accumulate(layout.views(row), mean, step.key(grain, rank=rank), alpha=1.0 / n)
        sent = SentPayload(self.codec, payload, key)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, state)

    def _gathered(self, wire: Tensor, payload: Payload, x: Tensor) -> Generator[Collective, Tensor, Tensor]:
        """Every rank's wire; `x` is what its payload was made for."""
        return (yield collective.AllGather(wire))


@dataclass(frozen=True)
class AllGatherVExchange(AllGatherExchange):
    """`AllGatherExchange` of as many bytes as the fullest payload uses, for codecs whose payloads have room to spare.

    A `Threshold` reserves room for `cap` of the entries and fills it seldom; behind what is used all is zero
    (`Codec.used_bytes`). The ranks agree on the largest used size by an all-reduce of 8 bytes first, which is one
    latency more, and put the zeros back: the mean is `AllGatherExchange`'s bit for bit. On a GPU the host waits for the
    size. Bytes a rank sends: n - 1 times the largest used size; without data (`gradwire cost`) the whole payload's,
    which is the most it can be.

    >>> from gradwire.codecs import Threshold
    >>> AllGatherVExchange(Threshold(0.01))
    AllGatherVExchange(codec=Threshold(tau=0.01, cap=0.05))
    """

    def _gathered(self, wire: Tensor, payload: Payload, x: Tensor) -> Generator[Collective, Tensor, Tensor]:
        """The sizes, then the heads of all wires."""
        mine = wire.numel() if wire.is_meta else self.codec.used_bytes(payload, x.numel(), x.dtype)
        used = yield collective.AllReduce(torch.tensor([mine], device=wire.device), op="max", consumable=True)
        size = wire.numel() if wire.is_meta else int(used)
        rows = yield collective.AllGather(wire[:size])
        whole = buffers.zeros((len(rows), wire.numel()), rows.dtype, rows.device)
        whole[:, :size] = rows
        return whole
