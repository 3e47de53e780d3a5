"""What all ranks of a step find out together, whatever the axes of its exchanges: a flag, sums, what is asked once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.axis import SubGroups
from gradwire.core.collective import AllGather, AllReduce, Collective, by_rank, ring_bytes


@dataclass(frozen=True, eq=False)
class Agree(Collective):
    """Whether `flag` (a 0-d bool tensor) is true on any rank. It is always asked of all ranks.

    All of a step's `Agree`s travel as one collective once every program of the step has reached its own, so
    they cost one latency a step; a program should yield it last.
    """

    verb = "all_reduce"

    flag: Tensor
    axis: SubGroups | None = field(default=None, init=False)

    @property
    @override
    def nbytes(self) -> int:
        return torch.uint8.itemsize

    @property
    def kind(self) -> Hashable:
        """All travel as one."""
        return Agree

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> AllReduce:
        """The maximum of all flags as bytes."""
        return AllReduce(torch.cat([request.flag.view(1).to(torch.uint8) for request in requests]), "max", True)

    @property
    @override
    def length(self) -> int:
        return 1

    def received(self, part: Tensor) -> Tensor:
        """The flag of all ranks."""
        return part.view(()).bool()

    def wire_bytes(self, ranks: int) -> int:
        """What a ring sends."""
        return ring_bytes(self.nbytes, ranks)

    def on(self, axis: SubGroups) -> Agree:
        """The same: all ranks agree."""
        return self


@dataclass(frozen=True, eq=False)
class Total(Collective):
    """Sum of `tensor`, float64 and small, over all grains of the step whose programs give an equal `of`.

    A rule may need a number of the whole gradient (its norm, the distances between ranks), and its program sees only
    one grain: it asks for the number by this request. With `over` "grains" the sum is of this rank's grains alone and
    costs no bytes; with "ranks" it runs over all ranks' as well and is the same on each bit for bit: grains in planned
    order, then ranks in theirs. Like `Agree`, a program waits for it until all programs of the step have come so far,
    and those of a step travel as one collective. `of` is usually the reducer; a program that asks twice tells its
    stages apart by it.
    """

    verb = "all_gather"

    tensor: Tensor
    of: Hashable
    over: Literal["grains", "ranks"] = "ranks"
    axis: SubGroups | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over, where the sum runs over ranks."""
        return self.tensor.nbytes

    @property
    def kind(self) -> Hashable:
        """Identity of a sum, by its scope and its owner: totals of one kind are added up."""
        return self.over, self.of

    @classmethod
    def added(cls, totals: Sequence[Total]) -> Total:
        """The sum of one rank's totals of one kind, which stand in the order of its grains."""
        tensor = totals[0].tensor
        for total in totals[1:]:
            tensor = tensor + total.tensor
        return Total(tensor, totals[0].of, totals[0].over)

    def gathered(self) -> AllGather:
        """What all ranks need to add up theirs."""
        return AllGather(self.tensor.contiguous().view(-1).view(torch.uint8))

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> AllGather:
        """The sum over the requests, as bytes: what every rank needs of this one."""
        return cls.added(requests).gathered()

    @property
    def length(self) -> int:
        """Bytes of a row."""
        return self.tensor.nbytes

    def received(self, part: Tensor) -> Tensor:
        """The rows of all ranks, added in their order."""
        first, *others = by_rank(part.contiguous().view(self.tensor.dtype))
        for row in others:
            first = first + row
        return first.view(self.tensor.shape)

    def wire_bytes(self, ranks: int) -> int:
        """The sum, to every other rank, if it runs over ranks."""
        return (ranks - 1) * self.nbytes if self.over == "ranks" else 0

    def on(self, axis: SubGroups) -> Total:
        """The same: a sum over ranks is one over all of them."""
        return self


@dataclass(frozen=True, eq=False)
class Once(Collective):
    """What `request` says, asked of all ranks once a step: every program that gives an equal `of` is sent one result.

    The first program of a step that asks has it sent, so all of them must mean the same request. It is for a number
    that every grain needs and that is known before the first one is complete, such as the sum of all ranks' weights.
    Nobody may write to what is received.
    """

    verb = "once"

    request: Collective
    of: Hashable
    axis: SubGroups | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over, once a step."""
        return self.request.nbytes

    @property
    def kind(self) -> Hashable:
        """Identity of what is asked."""
        return Once, self.of

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> Collective:
        """The one request that all of them mean."""
        first = requests[0].request
        return type(first).joined([first])

    @property
    def length(self) -> int:
        """That of the request's result."""
        return self.request.length

    def received(self, part: Tensor) -> Tensor:
        """What the request makes of the result."""
        return self.request.received(part)

    @classmethod
    def parts(cls, requests: Sequence[Self], result: Tensor) -> Sequence[Tensor]:
        """All of it for each."""
        return [result] * len(requests)

    def wire_bytes(self, ranks: int) -> int:
        """What the request sends."""
        return self.request.wire_bytes(ranks)

    def on(self, axis: SubGroups) -> Once:
        """The same: all ranks are asked."""
        return self
