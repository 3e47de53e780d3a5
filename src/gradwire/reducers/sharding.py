"""How a tensor is cut into shards, one a rank, and how shards travel: the one place that knows.

Rows of bytes, one a shard, go to their owners by an all-to-all. Each owner reads what all ranks sent of its shard, and
makes a row of the result, which an all-gather brings to everybody. Rows are made in three ways:

    `Shards`          a row holds the shard's own values                      rules, and sums inside a node
    `CutPayload`      the tensor is coded at once, and its payload is cut     `ScatterReduce`, `TwoShot`, votes
    `ShardPayloads`   each shard is coded by itself, so any codec will do     `ShardwiseScatterReduce`, `SparseTwoShot`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec, layout_of
from gradwire.core import buffers, collective
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.reducers.sent import SentPayload
from gradwire.reducers.step import Sent

Encode = Callable[[Tensor, Key, Payload], None]
"""`Codec.encode_into` or `Codec.encode_keeping_into`."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are summed over ranks: float64 for float64, else float32.

    >>> sum_dtype(torch.bfloat16)
    torch.float32
    """
    return dtype if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Shards:
    """The cut of a tensor into shards of one size, end to end: rank j owns [j * size, (j + 1) * size).

    Behind the tensor's end there is nothing, so the last shards may be shorter, or empty.

    Args:
        numel: elements of the tensor.
        count: how many ranks.
        unit: the size is a multiple of this many elements.

    >>> shards = Shards(10, 3, unit=4)
    >>> shards.size, [shards.of(rank) for rank in range(3)]
    (4, [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)])
    """

    numel: int
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        """Elements of a shard, those behind the end included."""
        return -(-self.numel // (self.count * self.unit)) * self.unit

    def of(self, rank: int) -> slice:
        """The elements that a rank owns."""
        start = min(rank * self.size, self.numel)
        return slice(start, min(start + self.size, self.numel))

    def size_of(self, rank: int) -> int:
        """How many elements a rank owns."""
        owned = self.of(rank)
        return owned.stop - owned.start

    def padded(self, shard: Tensor) -> Tensor:
        """One rank's shard, filled up with zeros behind the end of the tensor; itself where it is full."""
        return buffers.padded(shard, self.size)

    def rows(self, x: Tensor) -> Tensor:
        """Return `x` as bytes, one row a shard; a view where shards come out even."""
        flat = buffers.padded(x.reshape(-1), self.count * self.size)
        return flat.view(torch.uint8).view(self.count, self.size * x.element_size())

    def values(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what all ranks sent of one shard: their values, one row a rank."""
        return received.reshape(-1).view(dtype).view(len(received), self.size)

    def joined(self, gathered: Tensor, like: Tensor) -> Tensor:
        """Return the tensor that all shards' rows make up, in the shape and dtype of `like`; a view of the rows."""
        return gathered.reshape(-1).view(like.dtype)[: self.numel].view(like.shape)


class ShardedPayload(ABC):
    """A tensor as payloads of a codec, one row of bytes a shard; all rows have one length.

    Args:
        codec: makes the payloads.
        shards: the cut of the tensor.
        dtype: of what is encoded.
    """

    def __init__(self, codec: Codec, shards: Shards, dtype: torch.dtype) -> None:
        self.codec, self.shards, self.dtype = codec, shards, dtype

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of a row."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key, encode: Encode) -> tuple[Tensor, Sent]:
        """Return the rows of `x`, 1-d, shape (count, nbytes), and what they decode to, for error feedback."""

    @abstractmethod
    def payload(self, row: Tensor, rank: int) -> Payload:
        """Return the fields of the row of a rank's shard, as views, as long as that shard is."""

    @abstractmethod
    def decode_into(self, rows: Tensor, out: Tensor, key: Key) -> None:
        """Overwrite `out`, 1-d, with the values of the rows of all owners, each encoded with its owner's `key`."""

    def shard_key(self, key: Key, rank: int) -> Key:
        """The key that `encode` codes a rank's shard with, given that of the whole tensor."""
        return key

    def accumulate(self, row: Tensor, rank: int, into: Tensor, key: Key, alpha: float) -> None:
        """into += alpha * the values of a row of `encode` for a rank's shard, which was encoded with `key`."""
        self.codec.accumulate(self.payload(row, rank), into, self.shard_key(key, rank), alpha=alpha)

    def empty_row(self, device: torch.device) -> Tensor:
        """Return a row of zeros, to be encoded into."""
        return buffers.zeros((self.nbytes,), torch.uint8, device)


class CutPayload(ShardedPayload):
    """A payload of a whole tensor, cut into one row a shard.

    A codec of some granularity codes each unit by itself, so the fields of a whole tensor are its shards' fields end
    to end: one call codes all shards. Of a field in the row of a short shard only the head is used, and the rest is
    zero. The shards must be cut at multiples of the codec's granularity.
    """

    def __init__(self, codec: Codec, shards: Shards, dtype: torch.dtype) -> None:
        super().__init__(codec, shards, dtype)
        self.row = layout_of(codec, shards.size, dtype)
        self.whole = layout_of(codec, shards.numel, dtype).fields

    @property
    def nbytes(self) -> int:
        """Of a full shard."""
        return self.row.nbytes

    def encode(self, x: Tensor, key: Key, encode: Encode) -> tuple[Tensor, Sent]:
        """All shards by one call."""
        fields, payload = self.empty(x.device)
        encode(x, key, payload)
        return self.rows(fields), SentPayload(self.codec, payload, key)

    def payload(self, row: Tensor, rank: int) -> Payload:
        """The head of each field."""
        fields = layout_of(self.codec, self.shards.size_of(rank), self.dtype).fields
        return tuple(view[: field.numel] for view, field in zip(self.row.views(row), fields, strict=True))

    def decode_into(self, rows: Tensor, out: Tensor, key: Key) -> None:
        """All shards by one call; a codec that can be cut needs no key to decode."""
        self.codec.decode_into(self.joined(rows), out, key)

    def empty(self, device: torch.device) -> tuple[tuple[Tensor, ...], Payload]:
        """Return a buffer for each field of all rows, and the payload of the whole tensor as views of them."""
        count = self.shards.count
        make = buffers.empty if self.shards.numel == self.shards.size * count else buffers.zeros
        fields = tuple(make((field.numel * count,), field.dtype, device) for field in self.row.fields)
        return fields, tuple(buffer[: field.numel] for buffer, field in zip(fields, self.whole, strict=True))

    def rows(self, fields: tuple[Tensor, ...]) -> Tensor:
        """Lay the fields out as one row a shard."""
        count = self.shards.count
        rows = self.row.empty(fields[0].device, rows=count)
        for at, field, buffer in zip(self.row.offsets, self.row.fields, fields, strict=True):
            rows[:, at : at + field.nbytes].copy_(buffer.view(torch.uint8).view(count, field.nbytes))
        return rows

    def joined(self, rows: Tensor) -> Payload:
        """Return the payload of the whole tensor that one row a shard make up."""
        payload: list[Tensor] = []
        for at, field, whole in zip(self.row.offsets, self.row.fields, self.whole, strict=True):
            joined = buffers.contiguous(rows[:, at : at + field.nbytes]).view(-1)
            payload.append(joined[: whole.nbytes].view(field.dtype))
        return tuple(payload)


class ShardPayloads(ShardedPayload):
    """Payloads of shards that are coded one by one, each in a row as long as the longest: for any codec and any cut."""

    def __init__(self, codec: Codec, shards: Shards, dtype: torch.dtype) -> None:
        super().__init__(codec, shards, dtype)
        sizes = {shards.size_of(rank) for rank in range(shards.count)}
        self._nbytes = max(layout_of(codec, size, dtype).nbytes for size in sizes)

    @property
    def nbytes(self) -> int:
        """Of the longest payload."""
        return self._nbytes

    def encode(self, x: Tensor, key: Key, encode: Encode) -> tuple[Tensor, Sent]:
        """Shard by shard, each with a key of its own: a codec counts elements from the start of what it is given."""
        rows = buffers.zeros((self.shards.count, self.nbytes), torch.uint8, x.device)
        for rank, row in enumerate(collective.by_rank(rows)):
            encode(x[self.shards.of(rank)], self.shard_key(key, rank), self.payload(row, rank))
        return rows, _SentShards(self, rows, key)

    def payload(self, row: Tensor, rank: int) -> Payload:
        """The head of the row."""
        layout = layout_of(self.codec, self.shards.size_of(rank), self.dtype)
        return layout.views(row[: layout.nbytes])

    @override
    def decode_into(self, rows: Tensor, out: Tensor, key: Key) -> None:
        for rank, row in enumerate(collective.by_rank(rows)):
            self.codec.decode_into(self.payload(row, rank), out[self.shards.of(rank)], key.with_(rank=rank))

    def shard_key(self, key: Key, rank: int) -> Key:
        """With the rank in its stage."""
        return key.with_(stage=f"{key.stage}/{rank}")


@dataclass(frozen=True, eq=False)
class _SentShards:
    """One row a shard."""

    sharded: ShardPayloads
    rows: Tensor
    key: Key

    def subtract_from(self, x: Tensor) -> None:
        """x -= what the rows say."""
        flat = x.view(-1)
        for rank, row in enumerate(collective.by_rank(self.rows)):
            self.sharded.accumulate(row, rank, flat[self.sharded.shards.of(rank)], self.key, alpha=-1.0)
