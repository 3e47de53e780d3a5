# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""Codes to packed streams and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.launch import TILE, ceil_div, codes_meta, launch
from gradwire.kernels.triton.tiles import load_codes, load_tile, store_codes, store_tile


@triton.jit
def _pack_bits(codes, packed, numel, TILE: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, SPAN: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(numel - start, TILE).to(tl.int32)
    full = left >= TILE
    group = tl.arange(0, TILE // 8)[None, :, None]
    local = group * 8 + tl.arange(0, 8)[None, None, :]
    tile = load_tile(codes + start, local, local < left, full).to(tl.int32)
    store_codes(packed + start // 8 * BITS, group, tile, left, group >= 0, full, BITS, BYTES)


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    numel = codes.numel()
    launch(_pack_bits, ceil_div(numel, TILE), codes.device, codes, out, numel, TILE=TILE, **codes_meta(bits))


@triton.jit
def _unpack_bits(packed, codes, numel, TILE: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, SPAN: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(numel - start, TILE).to(tl.int32)
    full = left >= TILE
    group = tl.arange(0, TILE // 8)[None, :, None]
    local = group * 8 + tl.arange(0, 8)[None, None, :]
    tile = load_codes(packed + start // 8 * BITS, group, local < left, full, BITS, SPAN)
    store_tile(codes + start, local, tile.to(codes.dtype.element_ty), local < left, full)


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    codes = torch.empty(numel, dtype=torch.uint8 if bits <= 8 else torch.int32, device=packed.device)
    launch(_unpack_bits, ceil_div(numel, TILE), packed.device, packed, codes, numel, TILE=TILE, **codes_meta(bits))
    return codes
