"""TernGrad as its authors exchange it: scales agreed on first, then ternary digits that add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs import TernGrad
from gradwire.codecs.base import Codec, as_float32
from gradwire.core import buffers, collective
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.sent import SentPayload
from gradwire.reducers.sharding import CutPayload, Shards
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True)
class TernarySum(Reducer):
    """mean = s/n sum over ranks of t, with t_i in {-1, 0, 1} and s the same for all (Wen et al. 2017, section 3).

    The largest scale of each block is agreed on (an all-reduce of maxima), so that digits add up as integers. Rank j
    sums shard j's digits (all-to-all, 1.6 bits an element) and sends the sums to all (all-gather,
    ceil(log2(2n + 1)) bits an element), exactly: unlike a two-shot `TernGrad`, nothing is rounded a second time.

    It is the paper's scaler sharing. Where it deviates: it is unbiased for gradients clipped to the largest of the
    ranks' bounds, where the paper clips each to its own; scales are of blocks and not of layers. Sums
    ride no all-reduce of bytes, which would send 8 bits where 3 are needed for three ranks.

    Args:
        clip: see `TernGrad`.
        block: see `TernGrad`.

    Raises:
        CompositionError: clip or block out of range.

    References:
        Wen, Xu, Yan, Wu, Wang, Chen & Li 2017, "TernGrad: ternary gradients to reduce communication in distributed
        deep learning".

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(TernarySum(), flat_grain(2), world_size=3)
    >>> ranks.step([torch.tensor([3.0, -3.0]), torch.tensor([3.0, 3.0]), torch.tensor([-3.0, -3.0])])[0]
    tensor([ 1., -1.])
    """

    clip: float = 2.5
    block: int = 6560

    def __post_init__(self) -> None:
        self._codec()

    def _codec(self) -> TernGrad:
        return TernGrad(self.clip, self.block)

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-reduce of scales, all-to-all of digits, all-gather of sums."""
        codec, key, n = self._codec(), step.key(grain), step.world_size
        flat = as_float32(x.reshape(-1))
        scales = yield collective.AllReduce(self._scales(flat), op="max", consumable=True)
        shards = Shards(flat.numel(), n, self.block)
        first, second = (CutPayload(c, shards, torch.float32) for c in (_Digits(codec), _Sums(n)))
        fields, (packed,) = first.empty(flat.device)
        kernels.ternary_encode(flat, scales, key.stream_seed, codec.block, codec.digits, packed)
        received = yield collective.AllToAll(first.rows(fields))
        gathered = yield collective.AllGather(_add(received, first, second, step))
        mean = step.empty(flat.numel(), flat, torch.float32)
        second.decode_into(gathered, mean, key)
        _scale(mean, scales / n, self.block)
        sent = SentPayload(codec, (scales, packed), key)
        return Reduced(buffers.as_dtype(mean, x.dtype).view(x.shape), sent, state)

    def _scales(self, flat: Tensor) -> Tensor:
        """Of each block; infinity where it is not finite, since a backend's maximum may pass over NaN."""
        scales = buffers.empty((-(-flat.numel() // self.block),), torch.float32, flat.device)
        kernels.ternary_scales(flat, self.clip or math.inf, self.block, scales)
        return torch.where(torch.isfinite(scales), scales, float("inf"))


@dataclass(frozen=True)
class _Digits(Codec):
    """Ternary digits without their scales, which everybody has."""

    inner: TernGrad

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(self.inner.layout(numel, dtype).fields[1:])

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.ternary_encode(x, self._ones(x), key.stream_seed, self.inner.block, self.inner.digits, out[0])

    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.ternary_decode(payload[0], self._ones(out), self.inner.block, self.inner.digits, out)

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        kernels.ternary_decode(payload[0], self._ones(into), self.inner.block, self.inner.digits, into, alpha)

    def _ones(self, x: Tensor) -> Tensor:
        return torch.ones(-(-x.numel() // self.inner.block), dtype=torch.float32, device=x.device)


@dataclass(frozen=True)
class _Sums(Codec):
    """Whole numbers from -n to n, in ceil(log2(2n + 1)) bits."""

    n: int

    @property
    def bits(self) -> int:
        return (2 * self.n).bit_length()

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout((Field(torch.uint8, kernels.packed_nbytes(numel, self.bits)),))

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        codes = buffers.copied(buffers.copied(x).add_(self.n), torch.uint8 if self.bits <= 8 else torch.int32)
        kernels.pack_bits(codes, self.bits, out[0])

    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        out.copy_(kernels.unpack_bits(payload[0], self.bits, out.numel())).sub_(self.n)


def _add(received: Tensor, first: CutPayload, second: CutPayload, step: Step) -> Tensor:
    """The row of the sums of this rank's shard."""
    total = buffers.zeros((first.shards.size_of(step.rank),), torch.float32, received.device)
    for row in collective.by_rank(received):
        first.accumulate(row, step.rank, total, Key(), alpha=1.0)
    wire = second.empty_row(received.device)
    second.codec.encode_into(total, Key(), second.payload(wire, step.rank))
    return wire


def _scale(x: Tensor, scales: Tensor, block: int) -> None:
    """Multiply each block, in place."""
    full = x.numel() // block * block
    x[:full].view(-1, block).mul_(scales[: full // block, None])
    x[full:].mul_(scales[full // block :])
