"""What a program may ask for. A program yields one of these and is sent the result; a driver does the work.

Every collective but `Agree` takes an `axis`: the ranks that take part. None is all of them. All ranks of a run yield
the same kinds on the same axes in the same order, each for the sub-group it belongs to, so one static order holds
across all groups that a program uses.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh of ranks: it cuts the world into sub-groups of `size` ranks that are `stride` apart.

    On a mesh of 2 nodes by 3 ranks in row-major order (rank = 3 * node + place) the ranks of a node are joined by
    `Axis(3)` and those of equal place by `Axis(2, 3)`.

    >>> Axis(3).members(4), Axis(2, 3).members(4)
    ((3, 4, 5), (1, 4))
    >>> Axis(2, 3).index(4)
    1
    """

    size: int
    stride: int = 1

    def index(self, rank: int) -> int:
        """Where `rank` stands in its sub-group."""
        return rank // self.stride % self.size

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of the sub-group of `rank`, in order."""
        first = rank - self.index(rank) * self.stride
        return tuple(first + i * self.stride for i in range(self.size))

    def within(self, outer: Axis | None) -> Axis:
        """The same axis of a mesh whose ranks are the places of a sub-group of `outer`."""
        return self if outer is None else Axis(self.size, self.stride * outer.stride)


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum (or maximum) over ranks of `tensor`, elementwise.

    `consumable` says that the driver may overwrite `tensor`; else it must leave it as it is.
    """

    tensor: Tensor
    op: Literal["sum", "max"] = "sum"
    consumable: bool = False
    axis: Axis | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over."""
        return self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class AllGather:
    """Every rank's `tensor`, a 1-d uint8 buffer, stacked in rank order: shape `(world_size, bytes)`."""

    tensor: Tensor
    axis: Axis | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over."""
        return self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Row j of `tensor` goes to rank j: shape `(world_size, bytes)` in, row i of the result is from rank i."""

    tensor: Tensor
    axis: Axis | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over, its row for itself included."""
        return self.tensor.nbytes


class Message(NamedTuple):
    """A 1-d tensor for rank `to`."""

    to: int
    tensor: Tensor


class Expected(NamedTuple):
    """`numel` elements from rank `source`."""

    source: int
    numel: int


@dataclass(frozen=True, eq=False)
class SendRecv:
    """One round of messages between pairs: send `sends`, receive `receives`, all at once; either may be empty.

    The result is 1-d, of the dtype and device of `like`: what was received, end to end in the order of `receives`.
    Every rank yields every round, if only with nothing to send, so that rounds stand at one place in the order of all
    ranks; a message is sent and received in the same round, and those of one pair keep their order. What is sent
    must not be changed before the round ends.
    """

    like: Tensor
    sends: tuple[Message, ...] = ()
    receives: tuple[Expected, ...] = ()
    axis: Axis | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends."""
        return sum(message.tensor.nbytes for message in self.sends)

    @property
    def received_numel(self) -> int:
        """Elements of the result."""
        return sum(expected.numel for expected in self.receives)


@dataclass(frozen=True, eq=False)
class Agree:
    """Whether `flag` (a 0-d bool tensor) is true on any rank; always of all ranks.

    All of a step's `Agree`s travel as one collective once every program of the step has reached its own, so
    they cost one latency a step; a program should yield it last.
    """

    flag: Tensor

    @property
    def axis(self) -> None:
        """None: all ranks."""
        return

    @property
    def nbytes(self) -> int:
        """One byte."""
        return torch.uint8.itemsize


@dataclass(frozen=True, eq=False)
class Total:
    """Sum of `tensor`, float64 and small, over all grains of the step whose programs give an equal `of`.

    What a rule must know of the whole gradient (its norm, the distances between ranks) while a program sees one grain
    of it. With `over` "grains" the sum is of this rank's grains alone and costs no bytes; with "ranks" it runs over all
    ranks' as well and is the same on each bit for bit: grains in planned order, then ranks in theirs. Like `Agree`, a
    program waits for it until all programs of the step have come so far, and those of a step travel as one collective.
    `of` is usually the reducer; a program that asks twice tells its stages apart by it.
    """

    tensor: Tensor
    of: Hashable
    over: Literal["grains", "ranks"] = "ranks"

    @property
    def axis(self) -> None:
        """None: all ranks."""
        return

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over, where the sum runs over ranks."""
        return self.tensor.nbytes


Collective = AllReduce | AllGather | AllToAll | SendRecv | Agree | Total

_C = TypeVar("_C", bound=Collective)


def on_axis(request: _C, axis: Axis) -> _C:
    """Return what a program that knows only a sub-group asks for, as a request to the whole world.

    >>> inner = SendRecv(torch.zeros(0), axis=Axis(2))
    >>> on_axis(inner, Axis(4, 8)).axis
    Axis(size=2, stride=8)
    """
    if isinstance(request, Agree | Total):
        return request
    return replace(request, axis=axis if request.axis is None else request.axis.within(axis))
