"""A tensor from one rank to another, with its gradient back: `send` and `recv` for a model's author."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.codecs import Codec, Identity
from gradwire.codecs.base import layout_of
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.key import Key
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.drivers.interpreter import ask
from gradwire.drivers.process_group import GroupTransport

_IDENTITY = Identity()


def send(
    x: Tensor,
    to: int,
    *,
    codec: Codec = _IDENTITY,
    gradients: Codec = _IDENTITY,
    key: Key | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send `x` to a rank, and return a zero whose backward pass receives the gradient of `x` from there.

    The receiver gets C(x), and the gradient of C(x), coded by D, is taken for that of x:

        y = C(x) on rank `to`,    dL/dx = D(dL/dy)

    Add the zero to a loss of this rank, or call its `backward()`. Both ranks must call `send` and `recv` in the same
    order, and run their backward passes so that the gradients come in one order too: the last one sent comes first.
    C(x) takes `codec.payload_bytes(x.numel(), x.dtype)` bytes, and the gradient `gradients.payload_bytes(...)`.

    Args:
        x: floating-point numbers, any shape.
        to: a rank of the group.
        codec: of x, C.
        gradients: of the gradient, D.
        key: what random bits are drawn from; alike on both ends.
        group: of both ranks; None for all ranks.

    Raises:
        SpecError: this rank itself, or none of the group.
        CompositionError: a tensor that no codec takes, such as ids.

    Example (rank 0 has `first`, rank 1 has `second`):
        if rank == 0:
            send(first(batch), to=1).backward()
        else:
            second(recv(torch.empty(32, 64), source=0)).sum().backward()
    """
    _require_numbers(x)
    return _Send.apply(x, _Way(group, to, codec, gradients, key or Key()))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def recv(
    like: Tensor,
    source: int,
    *,
    codec: Codec = _IDENTITY,
    gradients: Codec = _IDENTITY,
    key: Key | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return what a rank sends, a tensor like `like`; its backward pass sends the gradient back. See `send`.

    Args:
        like: of the shape, dtype and device of what comes; its values do not count.
        source: a rank of the group.
        codec, gradients, key, group: as the sender has them.

    Raises:
        SpecError, CompositionError: as `send`.
    """
    _require_numbers(like)
    # autograd calls the backward pass of what has an input with a gradient, and a message has none
    anchor = torch.empty(0, device=like.device, requires_grad=True)
    return _Recv.apply(anchor, like, _Way(group, source, codec, gradients, key or Key()))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _require_numbers(x: Tensor) -> None:
    if not x.is_floating_point():
        raise CompositionError(f"a tensor of {x.dtype} has no gradient: send it by torch.distributed.send")


class _Way:
    """The way between two ranks, which both directions take."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, codec: Codec, gradients: Codec, key: Key) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
        if peer == self.group.rank() or not 0 <= peer < self.group.size():
            raise SpecError(
                f"rank {self.group.rank()} cannot reach rank {peer} of {self.group.size()}: name another of its group"
            )
        self.peer, self._codecs, self._key = peer, (codec, gradients), key

    def carry(self, x: Tensor, backward: bool) -> None:
        """Send a payload there."""
        codec, key = self._of(backward)
        layout = layout_of(codec, x.numel(), x.dtype)
        wire = layout.empty(x.device)
        codec.encode_into(x.reshape(-1).contiguous(), key, layout.views(wire))
        ask(SendRecv(wire, (Message(self.peer, wire),)), GroupTransport(self.group))

    def fetch(self, like: Tensor, backward: bool) -> Tensor:
        """Return what comes from there."""
        codec, key = self._of(backward)
        layout = layout_of(codec, like.numel(), like.dtype)
        empty = torch.empty(0, dtype=torch.uint8, device=like.device)
        wire = ask(SendRecv(empty, receives=(Expected(self.peer, layout.nbytes),)), GroupTransport(self.group))
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        codec.decode_into(layout.views(wire), out.view(-1), key)
        return out

    def _of(self, backward: bool) -> tuple[Codec, Key]:
        return self._codecs[backward], self._key.with_(direction="backward" if backward else "forward")


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        way.carry(x.detach(), backward=False)
        ctx.way, ctx.like = way, torch.empty_like(x, device="meta")
        ctx.device = x.device
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        like: Tensor = ctx.like
        return ctx.way.fetch(torch.empty(like.shape, dtype=like.dtype, device=ctx.device), backward=True), None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.fetch(like, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.way.carry(gradients[0], backward=True)
        return None, None, None
