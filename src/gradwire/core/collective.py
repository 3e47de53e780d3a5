"""What a program may ask for. A program yields one of these and is sent the result; a driver does the work.

Every collective but `Agree`, `Total` and `Once` takes an `axis`: the ranks that take part. None is all of them. All
ranks of a run yield the same kinds on the same axes in the same order, each for the sub-group it belongs to, so one
static order holds across all groups that a program uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.axis import SubGroups
from gradwire.core.errors import PayloadError


class Collective(ABC):
    """What ranks do together; a kind of collective says how several requests of it travel as one.

    A transport serves a kind by its method called `verb`, which takes the one request that carries all and returns what
    is under way. So a new kind is a class like these, anywhere, and a method in each transport that is to serve it.

    Attributes:
        verb: the name of that method.
        axis: the ranks that take part; None is all of them.
    """

    verb: ClassVar[str]
    axis: SubGroups | None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that this rank hands over."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """What must be equal for requests to travel as one."""

    @classmethod
    @abstractmethod
    def joined(cls, requests: Sequence[Any]) -> Collective:
        """Return one request that carries `requests`, all of one kind."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Elements of the last dimension of the result."""

    @abstractmethod
    def received(self, part: Tensor) -> Tensor:
        """Return what the program is sent, made of its part of the joined request's result."""

    @classmethod
    def parts(cls, requests: Sequence[Any], result: Tensor) -> Sequence[Tensor]:
        """Cut the result of the joined request into the part of each of `requests`: columns, end to end."""
        return result.split([request.length for request in requests], dim=-1)

    @abstractmethod
    def wire_bytes(self, ranks: int) -> int:
        """Bytes that this rank sends where `ranks` take part."""

    def without_content(self, device: torch.device) -> Collective:
        """Return what a rank asks for that takes no part: a request of this kind on the same axis, with nothing in it.

        Args:
            device: where the tensors of that rank lie; those of this request may have no data.

        Raises:
            PayloadError: a kind that has no such request.
        """
        kind = type(self).__name__
        raise PayloadError(f"{kind} cannot be asked for with nothing in it: nodes of unequal size cannot carry it")

    def on(self, axis: SubGroups) -> Self:
        """Return what a program that knows only a sub-group asks for, as a request to the whole world.

        >>> from gradwire.core.axis import Axis
        >>> inner = AllGather(torch.zeros(0), axis=Axis(2))
        >>> inner.on(Axis(4, 8)).axis
        Axis(size=2, stride=8)
        """
        request: Any = self  # a dataclass, as all kinds are
        return replace(request, axis=axis if self.axis is None else self.axis.within(axis))


def by_rank(rows: Tensor) -> tuple[Tensor, ...]:
    """Return the row of each rank, in rank order: what a program sums over.

    Of rows without data (`meta`) the first stands for all: a sum of one has the shape of a sum of thousands.

    >>> [row.tolist() for row in by_rank(torch.tensor([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    >>> len(by_rank(torch.empty(16_384, 2, device="meta")))
    1
    """
    return (rows[:1] if rows.is_meta else rows).unbind(0)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of a buffer of `nbytes`: 2 (n - 1)/n of them.

    >>> ring_bytes(1000, 4)
    1500
    """
    return 2 * nbytes * (ranks - 1) // ranks


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """Sum (or maximum) over ranks of `tensor`, elementwise.

    `consumable` says that the driver may overwrite `tensor`; else it must leave it as it is.
    """

    verb = "all_reduce"

    tensor: Tensor
    op: Literal["sum", "max"] = "sum"
    consumable: bool = False
    axis: SubGroups | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over."""
        return self.tensor.nbytes

    @property
    def kind(self) -> Hashable:
        """Dtype, operation and axis."""
        return AllReduce, self.tensor.dtype, self.op, self.axis

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> AllReduce:
        """One request for all tensors end to end, which may be overwritten."""
        first = requests[0]
        if len(requests) > 1:
            flat = buffers.joined([request.tensor.reshape(-1) for request in requests])
        else:
            flat = first.tensor.reshape(-1) if first.consumable else buffers.copied(first.tensor.reshape(-1))
        return AllReduce(flat, first.op, True, first.axis)

    @property
    @override
    def length(self) -> int:
        return self.tensor.numel()

    def received(self, part: Tensor) -> Tensor:
        """The sum in the tensor's shape."""
        return part.view(self.tensor.shape)

    def wire_bytes(self, ranks: int) -> int:
        """What a ring sends."""
        return ring_bytes(self.nbytes, ranks)

    @override
    def without_content(self, device: torch.device) -> AllReduce:
        return replace(self, tensor=self.tensor.new_empty(0, device=device))


@dataclass(frozen=True, eq=False)
class _Rows(Collective):
    """Bytes that come back as a row of each rank; of several requests each has its columns."""

    tensor: Tensor
    axis: SubGroups | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over, a row for itself included."""
        return self.tensor.nbytes

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.tensor.dtype, self.axis

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> Self:
        """One request for all buffers, end to end in each row."""
        tensors = [request.tensor for request in requests]
        return cls(buffers.joined(tensors, dim=-1) if len(tensors) > 1 else tensors[0], requests[0].axis)

    @property
    def length(self) -> int:
        """That of a row."""
        return self.tensor.shape[-1]

    def received(self, part: Tensor) -> Tensor:
        """A row a rank."""
        return buffers.contiguous(part)


@dataclass(frozen=True, eq=False)
class AllGather(_Rows):
    """Every rank's `tensor`, a 1-d uint8 buffer, stacked in rank order: shape `(world_size, bytes)`."""

    verb = "all_gather"

    def wire_bytes(self, ranks: int) -> int:
        """The buffer, to every other rank."""
        return (ranks - 1) * self.nbytes

    @override
    def without_content(self, device: torch.device) -> AllGather:
        return AllGather(self.tensor.new_empty(0, device=device), self.axis)


@dataclass(frozen=True, eq=False)
class AllToAll(_Rows):
    """Row j of `tensor` goes to rank j: shape `(world_size, bytes)` in, row i of the result is from rank i."""

    verb = "all_to_all"

    def wire_bytes(self, ranks: int) -> int:
        """All rows but this rank's own."""
        return self.nbytes * (ranks - 1) // ranks

    @override
    def without_content(self, device: torch.device) -> AllToAll:
        return AllToAll(self.tensor.new_empty((1, 0), device=device), self.axis)


@dataclass(frozen=True, eq=False)
class AllToAllV(Collective):
    """Row j of `tensor` goes to rank j, and rows may have any size, 0 too: what experts, and shards of any cut, need.

    `tensor` is a 1-d uint8 buffer of all rows, end to end. So is the result: row i of it is from rank i. Both ends know
    how long each row is, as in `torch.distributed.all_to_all_single`; ranks that do not know ask for the sizes first,
    by an `AllToAll`. Every rank yields it, even where it has nothing to send and nothing to receive.

    Args:
        tensor: the rows for all ranks that take part, the one for this rank included.
        sends: bytes of each row.
        receives: bytes of the row that comes from each rank.
        place: this rank's own number among those that take part.
        axis: the ranks that take part.

    Raises:
        PayloadError: sizes that are not those of the tensor, or not as many as ranks.

    >>> rows = AllToAllV(torch.tensor([1, 2, 3], dtype=torch.uint8), sends=(0, 3), receives=(0, 2), place=0)
    >>> rows.wire_bytes(2), rows.length
    (3, 2)
    """

    verb = "all_to_all_v"

    tensor: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    place: int
    axis: SubGroups | None = None

    def __post_init__(self) -> None:
        if self.tensor.dim() != 1 or self.tensor.dtype != torch.uint8 or self.tensor.numel() != sum(self.sends):
            shape, dtype = tuple(self.tensor.shape), self.tensor.dtype
            raise PayloadError(f"rows of {self.sends} bytes are no buffer of {shape} {dtype}: lay them end to end")
        if len(self.sends) != len(self.receives) or self.sends[self.place] != self.receives[self.place]:
            raise PayloadError(
                f"rank {self.place} of {len(self.sends)} sends rows of {self.sends} bytes and receives "
                f"{self.receives}: name a size for each rank, and one size for the row that stays"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over, a row for itself included."""
        return self.tensor.nbytes

    @property
    @override
    def kind(self) -> Hashable:
        return AllToAllV, self.axis

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> AllToAllV:
        """One request whose row for each rank is all requests' rows for it, end to end."""
        first, *others = requests
        if not others:
            return first
        of_ranks = zip(*(request.tensor.split(request.sends) for request in requests), strict=True)
        tensor = buffers.joined([row for rows in of_ranks for row in rows])
        sends = tuple(map(sum, zip(*(request.sends for request in requests), strict=True)))
        receives = tuple(map(sum, zip(*(request.receives for request in requests), strict=True)))
        return AllToAllV(tensor, sends, receives, first.place, first.axis)

    @classmethod
    def parts(cls, requests: Sequence[Self], result: Tensor) -> Sequence[Tensor]:
        """Of every rank's row, what belongs to each request."""
        sizes = [size for row in zip(*(request.receives for request in requests), strict=True) for size in row]
        pieces = result.split(sizes)
        return [buffers.joined(pieces[i :: len(requests)]) for i in range(len(requests))]

    @property
    def length(self) -> int:
        """Bytes that are received."""
        return sum(self.receives)

    def received(self, part: Tensor) -> Tensor:
        """What was received, end to end in rank order."""
        return part

    def wire_bytes(self, ranks: int) -> int:
        """All rows but this rank's own."""
        return self.nbytes - self.sends[self.place]

    @override
    def without_content(self, device: torch.device) -> AllToAllV:
        return AllToAllV(self.tensor.new_empty(0, device=device), (0,), (0,), 0, self.axis)
