"""Error memory: what a codec loses of one tensor is added to the next one. It knows no grain, no rank and no group.

    y = x + decay * e,    payload = C(y),    e' = y - decode(payload)

So a worker that pushes to a server, or a stage of a pipeline that sends activations, can have the same error feedback
as a reducer (Seide et al. 2014; Karimireddy et al. 2019, Algorithm 1). `ErrorFeedback` is a user of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, layout_of
from gradwire.core.errors import CompositionError, StateError
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.record import Record, Singles

PROBE_NUMEL = 1 << 20
"""Elements of the tensor whose contraction is asked for."""


class ErrorMemory(Record, frozen=True, eq=False):
    """What a sender still owes its receiver.

    Attributes:
        owed: e, one value an element, 1-d and float32 whatever the tensors' dtype.

    >>> ErrorMemory.zeros(3).owed
    tensor([0., 0., 0.])
    """

    owed: Singles

    @classmethod
    def zeros(cls, numel: int, device: str | torch.device = "cpu") -> Self:
        """Return the memory of a sender that has sent nothing yet."""
        return cls(torch.zeros(numel, dtype=torch.float32, device=device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what to save: tensors only, copies."""
        return {"owed": self.owed.clone()}

    @classmethod
    def from_state_dict(cls, saved: object) -> Self:
        """Return the memory that was saved.

        Raises:
            StateError: something that `state_dict` did not return.
        """
        owed = saved.get("owed") if isinstance(saved, Mapping) and len(saved) == 1 else None  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(owed, Tensor) or owed.dtype != torch.float32 or owed.dim() != 1:
            raise StateError("this is no saved ErrorMemory, which is {'owed': a 1-d float32 tensor}")
        return cls(owed.clone())


def compress(
    codec: Codec, x: Tensor, memory: ErrorMemory, key: Key, *, decay: float = 1.0
) -> tuple[Payload, ErrorMemory]:
    """Return the payload of y = x + decay * e, and the memory of its error: e' = y - decode(payload).

    `x` and `memory` are left as they are, so a payload that did not arrive is taken back by keeping the old memory. Do
    the same for a tensor that is not finite: its values would stay in the new memory for ever. One tensor of the size
    of `x` is allocated, the new memory.

    Args:
        codec: a contraction, e.g. `TopK(0.01)` or `BlockInt(4)`.
        x: any shape and floating dtype; the payload is that of a float32 tensor.
        memory: of this stream of tensors, one value an element of `x`.
        key: what random bits are drawn from; the receiver decodes with the same.
        decay: in (0, 1]; below 1 old errors fade.

    Raises:
        CompositionError: a codec whose error would grow without bound, or a decay out of range.
        StateError: a memory of another size.

    References:
        Karimireddy, Rebjock, Stich & Jaggi 2019, "Error feedback fixes SignSGD and other gradient compression
        schemes", Algorithm 1.

    >>> from gradwire.codecs import TopK
    >>> codec, memory = TopK(0.5), ErrorMemory.zeros(4)
    >>> for step in range(2):
    ...     payload, memory = compress(codec, torch.tensor([4.0, 1.0, 3.0, 2.0]), memory, Key(step=step))
    ...     print(codec.decode(payload, like=torch.empty(4), key=Key(step=step)), memory.owed)
    tensor([4., 0., 3., 0.]) tensor([0., 1., 0., 2.])
    tensor([4., 0., 0., 4.]) tensor([0., 2., 3., 0.])
    """
    layout = layout_of(codec, x.numel(), torch.float32)
    payload = layout.views(layout.empty(x.device))
    return payload, compress_into(codec, x, memory, key, payload, decay=decay)


def compress_into(
    codec: Codec, x: Tensor, memory: ErrorMemory, key: Key, out: Payload, *, decay: float = 1.0
) -> ErrorMemory:
    """Write the payload that `compress` returns into the tensors of `out`, and return the new memory.

    Where a buffer is sent as it is: `out` are the `views` of a buffer that the codec's `layout(x.numel())` made.

    Raises:
        CompositionError, StateError: as `compress`.
    """
    require_decay(decay)
    require_contraction(codec)
    if memory.owed.numel() != x.numel():
        raise StateError(f"a memory of {memory.owed.numel()} elements cannot go with a tensor of {x.numel()}")
    y = torch.add(x.reshape(-1).float(), memory.owed, alpha=decay)
    codec.encode_keeping_into(y, key, out)
    return ErrorMemory(y)


def add_owed_(x: Tensor, owed: Tensor, decay: float = 1.0) -> Tensor:
    """x += decay * e, in place: `x` becomes the new memory once an encoder has taken from it what it sends."""
    return x.add_(owed.view(x.shape), alpha=decay)


def require_decay(decay: float) -> None:
    """Refuse a decay under which errors would grow.

    Raises:
        CompositionError: outside (0, 1].
    """
    if not 0.0 < decay <= 1.0:
        raise CompositionError(f"decay {decay} is outside (0, 1]")


def require_bounded(contraction: float | None, absolute_error: float | None, what: str, instead: str) -> None:
    """Refuse memory of errors that would grow without bound.

    Args:
        contraction: of what the memory goes around.
        absolute_error: likewise, as `Codec.absolute_error`.
        what: what would grow, for the error.
        instead: what to do without memory.

    Raises:
        CompositionError: where there is neither.
    """
    if not contraction and absolute_error is None:
        raise CompositionError(
            f"{what} would grow without bound, since it is no contraction: {instead}, or take nearest rounding, topk "
            "or an unscaled randomk"
        )


@functools.lru_cache(maxsize=256)
def require_contraction(codec: Codec) -> None:
    """Refuse memory around a codec whose error would grow without bound.

    Raises:
        CompositionError: with what to take instead.
    """
    bounds = codec.contraction(PROBE_NUMEL), codec.absolute_error(PROBE_NUMEL)
    require_bounded(*bounds, f"the error memory of {codec}", "send payloads of `codec.encode`")
