"""Messages between pairs of ranks, as a collective."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.axis import SubGroups
from gradwire.core.collective import Collective


class Message(NamedTuple):
    """A 1-d tensor for rank `to`."""

    to: int
    tensor: Tensor


class Expected(NamedTuple):
    """`numel` elements from rank `source`."""

    source: int
    numel: int


@dataclass(frozen=True, eq=False)
class SendRecv(Collective):
    """One round of messages between pairs: send `sends`, receive `receives`, all at once; either may be empty.

    The result is 1-d, of the dtype and device of `like`: what was received, end to end in the order of `receives`.
    Every rank yields every round, even with nothing to send, so that a round has the same place in the order of all
    ranks; a message is sent and received in the same round, and those of one pair keep their order. What is sent
    must not be changed before the round ends.
    """

    verb = "send_recv"

    like: Tensor
    sends: tuple[Message, ...] = ()
    receives: tuple[Expected, ...] = ()
    axis: SubGroups | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends."""
        return sum(message.tensor.nbytes for message in self.sends)

    @property
    @override
    def kind(self) -> Hashable:
        return SendRecv, self.like.dtype, self.axis

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> SendRecv:
        """One round of all messages, each for itself: two for one rank need not be joined where they arrive."""
        sends = tuple(message for request in requests for message in request.sends)
        receives = tuple(expected for request in requests for expected in request.receives)
        return SendRecv(requests[0].like, sends, receives, requests[0].axis)

    @property
    def length(self) -> int:
        """Elements that are received."""
        return sum(expected.numel for expected in self.receives)

    def received(self, part: Tensor) -> Tensor:
        """What was received, end to end."""
        return part

    @override
    def wire_bytes(self, ranks: int) -> int:
        return self.nbytes

    @override
    def without_content(self, device: torch.device) -> SendRecv:
        return SendRecv(self.like.new_empty(0, device=device), axis=self.axis)
