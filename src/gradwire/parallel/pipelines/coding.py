"""How the tensors of one micro-batch become what is sent between two stages, and back."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.codecs.base import SUPPORTED_DTYPES, layout_of
from gradwire.core.key import Key


class Coder(Protocol):
    """Turns one tensor of a micro-batch into one buffer of bytes and back. Both ends know what the size depends on."""

    def nbytes(self, like: Tensor) -> int:
        """Bytes of the buffer of a tensor like this one."""
        ...

    def encode(self, x: Tensor, key: Key) -> Tensor:
        """Return the buffer, uint8 and 1-d."""
        ...

    def decode_into(self, wire: Tensor, out: Tensor, key: Key) -> None:
        """Overwrite `out` with what the buffer says."""
        ...


class Stateless:
    """Each tensor for itself, by a codec.

    >>> from gradwire.codecs import BlockInt
    >>> coder, x = Stateless(BlockInt(bits=8, block=8)), torch.tensor([[1.0, -2.0, 127.0]])
    >>> wire, out = coder.encode(x, Key()), torch.empty(1, 3)
    >>> coder.decode_into(wire, out, Key())
    >>> out, wire.numel() == coder.nbytes(x)
    (tensor([[  1.,  -2., 127.]]), True)
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def nbytes(self, like: Tensor) -> int:
        """Those of the codec's layout."""
        return layout_of(self.codec, like.numel(), like.dtype).nbytes

    def encode(self, x: Tensor, key: Key) -> Tensor:
        """Return the codec's payload."""
        layout = layout_of(self.codec, x.numel(), x.dtype)
        wire = layout.empty(x.device)
        self.codec.encode_into(x.reshape(-1), key, layout.views(wire))
        return wire

    def decode_into(self, wire: Tensor, out: Tensor, key: Key) -> None:
        """Decode into `out`, or through a copy where its memory is not in order."""
        flat = out.view(-1) if out.is_contiguous() else out.new_empty(out.numel())
        self.codec.decode_into(layout_of(self.codec, out.numel(), out.dtype).views(wire), flat, key)
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))


def stateless(codec: Codec, like: Tensor) -> Stateless | None:
    """Return what codes a tensor like this one; None where it is sent as it is, as ids, masks and lossless codecs are.

    >>> from gradwire.codecs import FP16, Identity
    >>> stateless(FP16(), torch.empty(3, dtype=torch.long)), stateless(Identity(), torch.empty(3))
    (None, None)
    """
    return None if codec.lossless or like.dtype not in SUPPORTED_DTYPES else Stateless(codec)


def sent_bytes(coder: Coder | None, like: Tensor) -> int:
    """Bytes that a tensor takes between two stages.

    >>> from gradwire.codecs import FP16
    >>> x = torch.empty(3, 4)
    >>> sent_bytes(stateless(FP16(), x), x), sent_bytes(None, x)
    (24, 48)
    """
    return like.nbytes if coder is None else coder.nbytes(like)


def empty_wire(nbytes: int, device: torch.device) -> Tensor:
    """Return memory for a buffer that comes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
