"""Codes of 1 to 16 bits side by side in bytes. Streams are little-endian: code i begins at bit i * bits."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.checks import require, require_range, require_size
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.packing import reference

__all__ = [
    "pack_bits",
    "packed_nbytes",
    "unpack_bits",
]

_pack_bits = Kernel(reference.pack_bits, "cpu", "cuda")
_unpack_bits = Kernel(reference.unpack_bits, "cpu", "cuda")


def packed_nbytes(numel: int, bits: int) -> int:
    """Bytes that `numel` codes of `bits` bits take: ceil(numel * bits / 8).

    >>> packed_nbytes(3, 5)
    2
    """
    return -(-numel * bits // 8)


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes side by side, the first in the lowest bits of the first byte; bits to spare are zero.

    Args:
        codes: (numel,) below 2^bits; uint8, or int32 for more than 8 bits.
        bits: 1 to 16.
        out: (packed_nbytes(numel, bits),) uint8.

    Raises:
        ValueError: bits out of range, or an `out` of another size.
        TypeError: codes of another dtype.

    >>> out = torch.empty(2, dtype=torch.uint8)
    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4, out)
    >>> out.tolist() == [0x21, 0x03]
    True
    """
    require_range("bits", bits, 1, 16)
    require("codes", codes, torch.uint8 if bits <= 8 else torch.int32)
    require("out", out, torch.uint8)
    require_size("out", out, packed_nbytes(codes.numel(), bits))
    _pack_bits.on(codes.device, codes.numel())(codes, bits, out)


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes `pack_bits` was given: (numel,) uint8, or int32 for more than 8 bits.

    Raises:
        ValueError: bits out of range.
        PayloadError: `packed` of another size than packed_nbytes(numel, bits).

    >>> unpack_bits(torch.tensor([0x21, 0x03], dtype=torch.uint8), 4, 3)
    tensor([1, 2, 3], dtype=torch.uint8)
    """
    require_range("bits", bits, 1, 16)
    require("packed", packed, torch.uint8)
    require_size("packed", packed, packed_nbytes(numel, bits))
    return _unpack_bits.on(packed.device, numel)(packed, bits, numel)
