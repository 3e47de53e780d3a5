"""Where the entries of a sparse payload stand: increasing int32 indices in about as many bits as they are worth.

A set of k out of d positions is worth log2 C(d, k) bits: 8.1 an index at a density of 1%, where int32 spends 32.

| format | bits | length |
|---|---|---|
| `int32` | 32 k | fixed |
| `bitmap` | d | fixed |
| `elias-fano` | k b + k + floor((d - k) / 2^b) at most | fixed |
| `rice` | 64 + k b + k + sum of floor(gap / 2^b): never more than Elias-Fano's and its header | used part varies |
| `auto` | `rice`; where few indices make its header count, the smaller of `elias-fano` and `int32` | |

A stream is a row of bits in 64-bit words, lowest first: the low b bits of every value, side by side, then the high
parts in unary (each as that many zeros and a one). Elias-Fano (Elias 1974; Fano 1971) codes the values
index_i - i, which never fall, and writes the differences of their high parts; Rice (1979) codes the gaps
index_i - index_(i-1) - 1 themselves, whose high parts add up to no more, since floors of parts are no more than the
floor of their sum. So both fit in the same capacity, k b + k + floor((d - k) / 2^b) bits rounded up to words, and b is
chosen to make that least. A bitmap is Elias-Fano at b = 0.

What travels: a field's size depends on (d, k) alone, so both sides know it before anything is sent, as collectives
need. `rice` starts with a word that says what follows, so that a reader needs nothing else:

    bits 0 to 5: b;   6 to 31: words used after this one;   32 to 63: indices in the stream (k or fewer)

The b of this very payload is whichever of four near the best for (d, k) is shortest. Behind the used words all is zero:
a channel that can send less than a whole buffer may leave them out, and its receiver puts zeros back.

`indices` are 1-d, contiguous, int32, strictly increasing and below `numel`; where a format says "k or fewer", the last
of them may equal `numel`, which stands for none.

>>> import torch
>>> packed = torch.empty(nwords("elias-fano", 1000, 3), dtype=torch.int64)
>>> encode(torch.tensor([5, 500, 999], dtype=torch.int32), 1000, "elias-fano", packed)
>>> decode(packed, 1000, 3, "elias-fano")
tensor([  5, 500, 999], dtype=torch.int32)
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError, PayloadError
from gradwire.core.payload import Field
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.indices import reference
from gradwire.kernels.sparse import check_indices

__all__ = [
    "FORMATS",
    "HEADER_PAYS",
    "MAX_BITS",
    "REACH",
    "WORD",
    "Format",
    "decode",
    "encode",
    "field",
    "held",
    "low_bits",
    "nwords",
    "require_reach",
    "resolve",
    "stream_words",
    "used_nbytes",
]

_encode = Kernel(reference.encode, "cpu")
_encode_rice = Kernel(reference.encode_rice, "cpu")
_decode = Kernel(reference.decode, "cpu")
_decode_rice = Kernel(reference.decode_rice, "cpu")
Format = Literal["auto", "int32", "elias-fano", "rice", "bitmap"]
FORMATS: tuple[Format, ...] = ("auto", "int32", "elias-fano", "rice", "bitmap")
WORD = 64
MAX_BITS = 31
REACH = 2**31 - 1
"""The most elements of a tensor whose places are int32."""
HEADER_PAYS = 100
"""Words of a stream from which on a header costs 1% or less, where Rice can be 5% shorter."""

_NOT_INCREASING = "indices to encode must increase and lie in [0, {})"
_DAMAGED = "the indices of a payload are damaged, or of another tensor: they are not {} increasing ones below {}"


def stream_words(numel: int, count: int, bits: int) -> int:
    """Words that hold any `count` indices below `numel` with `bits` low bits each.

    >>> stream_words(1_000_000, 10_000, 6) * 64 / 10_000  # bits an index; log2 C(d, k) / k is 8.08
    8.5504
    """
    return -(-(count * bits + count + (numel - count >> bits)) // WORD)


@functools.lru_cache(maxsize=4096)
def low_bits(numel: int, count: int) -> int:
    """The b that makes `stream_words` least; of several the largest, which is the quickest to read."""
    if count == 0:
        return 0
    return min(range(MAX_BITS, -1, -1), key=lambda bits: stream_words(numel, count, bits))


@functools.lru_cache(maxsize=4096)
def resolve(format_: Format, numel: int, count: int) -> Format:
    """What `auto` stands for at this size.

    >>> resolve("auto", 1_000_000, 10_000), resolve("auto", 100_000, 100), resolve("auto", 100, 1)
    ('rice', 'elias-fano', 'int32')
    """
    if format_ != "auto":
        return format_
    stream = nwords("elias-fano", numel, count)
    if 4 * count <= 8 * stream:
        return "int32"
    return "rice" if stream >= HEADER_PAYS else "elias-fano"


@functools.lru_cache(maxsize=4096)
def nwords(format_: Format, numel: int, count: int) -> int:
    """Words of 64 bits (32 for `int32`) that a field of `count` indices below `numel` has."""
    resolved = resolve(format_, numel, count)
    if resolved == "int32" or count == 0:
        return count
    if resolved == "bitmap":
        return stream_words(numel, count, 0)
    stream = stream_words(numel, count, low_bits(numel, count))
    return stream + 1 if resolved == "rice" else stream


def require_reach(numel: int) -> None:
    """Refuse a tensor some of whose elements no index could name.

    Raises:
        CompositionError: more than 2^31 - 1 elements.
    """
    if numel > REACH:
        raise CompositionError(
            f"a tensor of {numel} elements cannot be sent by indices, which have 32 bits and reach {REACH} elements: "
            "cut it into parts, or use a codec without indices, such as int4"
        )


def field(format_: Format, numel: int, count: int) -> Field:
    """The field of a payload that holds `count` indices below `numel`.

    Raises:
        CompositionError: as `require_reach`.
    """
    require_reach(numel)
    resolved = resolve(format_, numel, count)
    return Field(torch.int32 if resolved == "int32" else torch.int64, nwords(resolved, numel, count))


def used_nbytes(packed: Tensor, numel: int, count: int, format_: Format) -> int:
    """Bytes of an encoded field that say something; what stands behind them is zero. Reads the tensor's header.

    >>> at = torch.arange(100, dtype=torch.int32)
    >>> packed = torch.empty(nwords("rice", 100_000, 100), dtype=torch.int64)
    >>> encode(at, 100_000, "rice", packed)
    >>> packed.nbytes, used_nbytes(packed, 100_000, 100, "rice")
    (160, 136)
    """
    if resolve(format_, numel, count) != "rice" or not packed.numel():
        return packed.numel() * packed.element_size()
    used = int(packed[0]) >> 6 & 0x3FFFFFF
    return 8 * min(1 + used, packed.numel())


def held(packed: Tensor) -> int:
    """How many indices a `rice` field says that it holds. Reads the tensor's header."""
    return int(packed[0]) >> 32 & 0xFFFFFFFF


def _require(name: str, tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous():
        raise TypeError(f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)}, and 1-d contiguous {dtype} is wanted")
    if tensor.numel() != numel:
        raise PayloadError(f"{name} has {tensor.numel()} elements where {numel} are needed")


def _fixed_bits(format_: Format, numel: int, count: int) -> int:
    return 0 if format_ == "bitmap" else low_bits(numel, count)


def encode(indices: Tensor, numel: int, format_: Format, out: Tensor, room: int | None = None) -> None:
    """Write increasing `indices` below `numel` to `out`, in full.

    Args:
        indices: (k,) int32; for `rice` the last ones may equal `numel`, which is none.
        numel: d, below 2^31.
        format_: one of `FORMATS`.
        out: of `field(format_, numel, k)`.
        room: for `rice`, the k of the field where fewer indices are given.

    Raises:
        ValueError: indices that do not increase, or are out of range (on a CPU; elsewhere nothing is read).
        PayloadError: an `out` of another size.
    """
    count = indices.numel() if room is None else room
    format_ = resolve(format_, numel, count)
    where = field(format_, numel, count)
    _require("indices", indices, torch.int32, indices.numel() if format_ == "rice" else count)
    _require("out", out, where.dtype, where.numel)
    chosen = (_encode_rice if format_ == "rice" else _encode).on(out.device, count)
    unchecked = format_ == "int32" or chosen in (reference.encode, reference.encode_rice)
    if unchecked and out.device.type == "cpu" and not _increase(indices, numel, format_):
        raise ValueError(_NOT_INCREASING.format(numel))
    if format_ == "int32":
        out.copy_(indices)
        return
    if count == 0:
        return
    bits = _fixed_bits(format_, numel, count)
    if not chosen(indices, numel, bits, out):
        raise ValueError(_NOT_INCREASING.format(numel))


def _increase(indices: Tensor, numel: int, format_: Format) -> bool:
    """Whether they increase and lie in [0, numel), but for the last ones of `rice`, which may be numel."""
    if format_ == "rice":
        some = int((indices < numel).sum())
        if bool((indices[some:] != numel).any()):
            return False
        indices = indices[:some]
    rises = bool((indices[1:] > indices[:-1]).all())
    return rises and (not indices.numel() or (int(indices[0]) >= 0 and int(indices[-1]) < numel))


def decode(packed: Tensor, numel: int, count: int, format_: Format, fewer: bool = False) -> Tensor:
    """Return the indices that `encode` was given.

    Args:
        packed: of `field(format_, numel, count)`.
        numel: d.
        count: k.
        format_: one of `FORMATS`.
        fewer: whether a `rice` field may hold fewer than `count`.

    Returns:
        (count,) int32. Where there are fewer: on a CPU these, and elsewhere, where nothing is read back, behind the
        last of them stands numel, which is none.

    Raises:
        PayloadError: a payload of another size, or one that holds something else than `count` increasing indices
            below `numel` (on a CPU: elsewhere indices are clamped into range).
    """
    format_ = resolve(format_, numel, count)
    where = field(format_, numel, count)
    _require("packed", packed, where.dtype, where.numel)
    if format_ == "int32":
        check_indices(packed, numel)
        return packed
    if count == 0:
        return packed.new_empty(0, dtype=torch.int32)
    chosen = (_decode_rice if format_ == "rice" else _decode).on(packed.device, count)
    indices, good = chosen(packed, numel, count, _fixed_bits(format_, numel, count))
    if packed.device.type == "cpu":
        some = held(packed) if format_ == "rice" else count
        if not bool(good) or (some < count and not fewer):
            raise PayloadError(_DAMAGED.format(count, numel))
        indices = indices[:some]
    return indices
