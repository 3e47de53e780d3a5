"""Packing in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Lay the bits of all codes in one row, then cut it into bytes."""
    lanes = torch.arange(bits, device=codes.device, dtype=torch.int32)
    stream = ((codes.to(torch.int32)[:, None] >> lanes) & 1).reshape(-1)
    stream = pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    out.copy_((stream << torch.arange(8, device=codes.device, dtype=torch.int32)).sum(1))


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Lay the bits of all bytes in one row, then cut it into codes."""
    lanes = torch.arange(8, device=packed.device, dtype=torch.int32)
    stream = ((packed.to(torch.int32)[:, None] >> lanes) & 1).reshape(-1)[: numel * bits].view(numel, bits)
    codes = (stream << torch.arange(bits, device=packed.device, dtype=torch.int32)).sum(1)
    return codes.to(torch.uint8 if bits <= 8 else torch.int32)
