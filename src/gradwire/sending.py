"""How a vector travels between a server and a client: by a codec, with memory of what it lost where that is due."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs import Identity
from gradwire.codecs.base import Codec, layout_of
from gradwire.codecs.error_memory import ErrorMemory, compress_into, require_decay
from gradwire.core.key import Key
from gradwire.spec import parse_codec

UNCOMPRESSED = Identity()


@dataclass(frozen=True)
class Sending:
    """What turns a vector into one buffer of bytes and back.

    Args:
        codec: any.
        decay: of the error memory at the sender (`gradwire.compress`), in (0, 1]; None for no memory, as for a codec
            that loses nothing or is unbiased.

    Raises:
        CompositionError: a decay out of range.

    >>> sending = Sending.of("topk:0.5")
    >>> wire, memory = sending.send(torch.tensor([4.0, 1.0, 3.0, 2.0]), None, Key())
    >>> sending.receive(wire, torch.empty(4), Key())
    tensor([4., 0., 3., 0.])
    >>> memory.owed
    tensor([0., 1., 0., 2.])
    """

    codec: Codec = UNCOMPRESSED
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None:
            require_decay(self.decay)

    @classmethod
    def of(cls, given: str | Sending) -> Sending:
        """Read a spec such as "topk:0.05" or "int8,ef=off".

        Raises:
            SpecError, CompositionError: as `gradwire.spec.parse_codec`.
        """
        return given if isinstance(given, Sending) else cls(*parse_codec(given))

    @property
    def exact(self) -> bool:
        """Whether what arrives is what was sent, bit for bit."""
        return self.codec.lossless

    def send(self, x: Tensor, memory: ErrorMemory | None, key: Key) -> tuple[Tensor, ErrorMemory | None]:
        """Return the bytes of x + decay * e and the memory of what they do not say; both arguments stay as they are.

        Args:
            x: 1-d, float32 or float64.
            memory: from the last call whose bytes were taken up, None before the first.
            key: names the sender, the round or push, and the vector; the receiver needs the same.
        """
        layout = layout_of(self.codec, x.numel(), self._dtype(x))
        wire = layout.empty(x.device)
        if self.decay is None:
            self.codec.encode_into(x, key, layout.views(wire))
            return wire, None
        before = memory or ErrorMemory.zeros(x.numel(), x.device)
        return wire, compress_into(self.codec, x, before, key, layout.views(wire), decay=self.decay)

    def receive(self, wire: Tensor, like: Tensor, key: Key) -> Tensor:
        """Return what the bytes say, in the size and dtype of `like`.

        Raises:
            PayloadError: bytes that were cut or were made otherwise.
        """
        dtype = self._dtype(like)
        out = torch.empty(like.numel(), dtype=dtype, device=like.device)
        self.codec.decode_into(layout_of(self.codec, like.numel(), dtype).views(wire), out, key)
        return out.to(like.dtype)

    def warm_up(self, likes: Iterable[Tensor]) -> None:
        """Send zeros from here to here, so that what coding vectors like these compiles is ready before the first step.

        >>> Sending.of("int4").warm_up([torch.zeros(100)])
        """
        for numel, dtype in {(like.numel(), like.dtype) for like in likes}:
            zeros = torch.zeros(numel, dtype=dtype)
            wire, _ = self.send(zeros, None, Key())
            self.receive(wire, zeros, Key())

    def nbytes(self, like: Tensor) -> int:
        """Bytes of a vector like `like`."""
        return layout_of(self.codec, like.numel(), self._dtype(like)).nbytes

    def _dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype if self.decay is None else torch.float32  # what has a memory is sent from it
