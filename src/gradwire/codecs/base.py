"""The contract of a codec.

A codec turns one tensor into a payload and back. It is a frozen dataclass: configuration only, no state, no
group, no hidden randomness. It declares what it is, so that nonsense is refused when parts are composed:

- `additive`: decode(sum of payloads) = sum of the tensors' own decodings, so payloads may ride an all-reduce.
- `unbiased`: E[decode(encode(x))] = x over keys.
- `contraction(numel)`: a delta > 0 with E||decode(encode(x)) - x||^2 <= (1 - delta) ||x||^2 for every x, or None.
- `omega()`: of an unbiased codec, a bound with E||decode(encode(x)) - x||^2 <= omega ||x||^2 for every x, or None.
- `lossless`: decode(encode(x)) = x.
- `order_free`: payload bits do not depend on an order of summation, so every device and kernel gives the same.
- `keyed`: whether the payload depends on the key. A key names the rank that encodes; what all ranks must draw
  alike is drawn from `key.shared`, so whoever decodes needs the encoder's rank.
- `mixes`: each decoded element depends on all of its unit, as in a transform: rounding is then relative to the unit.
- `granularity`: elements that are coded together, whatever stands beside them: each field of a payload is the same
  field of its units end to end, and decoding needs no key, so payloads are cut at multiples of it. 0 means that a
  tensor cannot be cut into shards of equal payloads (top-k).
- `layout(numel, dtype)`: the exact wire format, so `payload_bytes` is a fact and no estimate.
- `shows_non_finite`: a NaN or an infinity in the tensor always makes the decoded tensor non-finite somewhere.
- `absolute_error(numel)`: of a codec that is no contraction, a bound on the error of each element, or None.

Four members may be overridden besides: `second_shot_codec` (what a mean is encoded with, where that is another codec),
`encode_divided_into`, `accumulate` (by default it decodes into a tensor of its own), and `used_bytes`.

`encode_into` must not change its input; `encode_keeping_into` leaves in it what was not sent. Inputs are 1-d and
contiguous; reducers flatten.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import CompositionError, PayloadError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.core.spoken import Spoken

SUPPORTED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Codec(Spoken, ABC):
    """One tensor to one payload and back. See the module's text for the contract."""

    additive: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    order_free: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    @property
    def shows_non_finite(self) -> bool:
        """Whether a NaN or an infinity that goes in always comes out as one, so that no other check is needed."""
        return self.lossless

    @property
    def keyed(self) -> bool:
        """Whether the payload depends on the key."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the mean of decodings over keys is the input."""
        return False

    @property
    def granularity(self) -> int:
        """Elements coded together, or 0 where a tensor cannot be cut into shards."""
        return 1

    @property
    def second_shot_codec(self) -> Codec:
        """The codec with which the second half of a two-shot encodes the mean: mostly this one itself."""
        return self

    @abstractmethod
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Return the wire format of a tensor of `numel` elements."""

    @abstractmethod
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Write the payload of `x`, 1-d, into the tensors of `out`."""

    @abstractmethod
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        """Overwrite `out`, 1-d, with what `payload` says."""

    def encode_divided_into(self, x: Tensor, divisor: int, key: Key, out: Payload) -> None:
        """Write the payload of x / divisor: dividing first, half precision overflows only where the mean does."""
        self.encode_into(x / divisor, key, out)

    def encode_keeping_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Write the payload of `x` into `out` and leave the error of the payload in `x`: x -= decode(payload).

        Error feedback does this with every gradient, so codecs do it in the same pass where they can: `x` is 1-d,
        contiguous and float32 or float64.
        """
        self.encode_into(x, key, out)
        self.accumulate(out, x, key, alpha=-1.0)

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        """into += alpha * decode(payload). `into` is 1-d and is changed in place."""
        decoded = buffers.like(into)
        self.decode_into(payload, decoded, key)
        kernels.add_scaled_(into, decoded, alpha)

    def contraction(self, numel: int) -> float | None:
        """Return delta in E||C(x) - x||^2 <= (1 - delta)||x||^2, or None where there is no such bound."""
        return 1.0 if self.lossless else None

    def omega(self) -> float | None:
        """Return omega in E||C(x) - x||^2 <= omega ||x||^2 of an unbiased codec, or None where no bound is known."""
        return 0.0 if self.lossless else None

    def absolute_error(self, numel: int) -> float | None:
        """Largest absolute error of an element, for codecs without a relative bound; None where there is no such bound.

        A payload that has no room for all elements is a contraction instead, with delta the share of elements that fit:
        ||C(x) - x||^2 <= max(numel a^2, (1 - delta) ||x||^2) for the returned a. A contraction needs no such bound.
        """
        return None

    def payload_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes on the wire of one payload."""
        return self.layout(numel, dtype).nbytes

    def used_bytes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Number of leading bytes of the wire that are used: all bytes behind them are zero.

        Collectives move whole buffers, whose sizes both sides know beforehand. A channel that can send less may cut the
        wire here, if its receiver puts the zeros back. Reads the payload's tensors.
        """
        return self.payload_bytes(numel, dtype)

    def encode(self, x: Tensor, key: Key | None = None) -> Payload:
        """Return the payload of `x` (any shape)."""
        check_dtype(x.dtype)
        flat = x.reshape(-1)
        layout = layout_of(self, flat.numel(), flat.dtype)
        payload = layout.views(layout.empty(flat.device))
        self.encode_into(flat, key or Key(), payload)
        return payload

    def decode(self, payload: Payload, like: Tensor, key: Key | None = None) -> Tensor:
        """Return the tensor that `payload` decodes to, in the shape and dtype of `like`.

        Raises:
            PayloadError: a payload that this codec did not make for a tensor of that size.
        """
        layout = layout_of(self, like.numel(), like.dtype)
        got = tuple(Field(field.dtype, field.numel()) for field in payload)
        if got != layout.fields:
            raise PayloadError(f"payload of {got}, where {self} makes {layout.fields} of {like.numel()} elements")
        out = buffers.empty((like.numel(),), like.dtype, like.device)
        self.decode_into(payload, out, key or Key())
        return out.view(like.shape)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments: `type(codec)(**codec.config())` equals the codec."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def layout_of(codec: Codec, numel: int, dtype: torch.dtype) -> Layout:
    """Cached `codec.layout(numel, dtype)`: every step asks for the same few layouts."""
    return codec.layout(numel, dtype)


def payload_share(codec: Codec) -> float:
    """Bytes of a payload for each byte of a float32 tensor of a million elements.

    >>> from gradwire.codecs import FP16, TopK
    >>> payload_share(FP16()), round(payload_share(TopK(0.01)), 3)
    (0.5, 0.013)
    """
    return layout_of(codec, 1 << 20, torch.float32).nbytes / (4 << 20)


class Float32Codec(Codec):
    """A codec whose kernels work in float32: tensors of another dtype are decoded to float32 first."""

    @abstractmethod
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """into += alpha * decode(payload), `into` float32."""

    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        """Overwrite `out`, float32. This default suits sparse payloads: it fills with zeros and accumulates."""
        self.accumulate32(payload, out.zero_(), key, 1.0)

    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        """One pass, and a copy where `out` is not float32."""
        if out.dtype == torch.float32:
            self.decode32(payload, out, key)
            return
        out32 = buffers.like(out, torch.float32)
        self.decode32(payload, out32, key)
        out.copy_(out32)

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        """One pass, and a scratch where `into` is not float32."""
        if into.dtype == torch.float32:
            self.accumulate32(payload, into, key, alpha)
        else:
            super().accumulate(payload, into, key, alpha)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse what cannot be coded.

    Raises:
        CompositionError: naming the dtypes that can.
    """
    if dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise CompositionError(f"gradients of {dtype} cannot be coded; supported are {names}")


def check_block(block: int) -> None:
    """Refuse a block that is not a positive multiple of 8.

    Raises:
        CompositionError: naming what is allowed.
    """
    if block < 8 or block % 8:
        raise CompositionError(f"block {block} is not a positive multiple of 8, so bits would not fill whole bytes")


def as_float32(x: Tensor) -> Tensor:
    """Return `x` itself where it is contiguous float32, else a float32 copy: what the kernels take."""
    return buffers.contiguous(buffers.as_dtype(x, torch.float32))
