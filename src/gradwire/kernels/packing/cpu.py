# pyright: basic
"""Packing on CPUs, in numba: words of eight codes, and single bits as masks of vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import TILE
from gradwire.kernels.runtime.vectors import at_least_8, below_8, choose_8, load_word, store_word

# Packing ----------------------------------------------------------------------------------------------------


@inline
def pack_codes(codes, bits, out):
    """Pack uint8 codes, which may be changed: whole groups of eight with word arithmetic, the rest bit by bit."""
    whole = codes.size // 8 * 8
    if bits == 8:
        for j in range(whole):
            out[j] = codes[j]
    else:
        _pack_eights(codes[:whole].view(np.uint64), bits, out)
    pack_one_by_one(codes[whole:], bits, out[whole // 8 * bits :])


@inline
def _pack_eights(eights, bits, out):
    """Close the gaps between neighbours, then between pairs, then between fours.

    Words are closed in place, as vectors, and written whole: each overwrites what the one before has too much, and
    the last ones, which must not, are written byte by byte.
    """
    gap = np.uint64(8 - bits)
    for j in range(eights.size):
        w = eights[j]
        w = (w & np.uint64(0x00FF00FF00FF00FF)) | ((w & np.uint64(0xFF00FF00FF00FF00)) >> gap)
        w = (w & np.uint64(0x0000FFFF0000FFFF)) | ((w & np.uint64(0xFFFF0000FFFF0000)) >> (gap + gap))
        eights[j] = (w & np.uint64(0x00000000FFFFFFFF)) | ((w & np.uint64(0xFFFFFFFF00000000)) >> np.uint64(4 * gap))
    roomy = max(eights.size - 8, 0)
    for j in range(roomy):
        store_word(out, np.uintp(j * bits), eights[j])
    for j in range(roomy, eights.size):
        for byte in range(bits):
            out[j * bits + byte] = np.uint8(eights[j] >> np.uint64(8 * byte))


@inline
def pack_wide_eights(codes, bits, out):
    """Pack eight codes of 9 to 16 bits at a time, four to a word."""
    half, b = np.uint64(4 * bits), np.uint64(bits)
    for j in range(codes.size // 8):
        low = high = np.uint64(0)
        for lane in range(4):
            low |= np.uint64(np.uint32(codes[8 * j + lane])) << (b * np.uint64(lane))
            high |= np.uint64(np.uint32(codes[8 * j + 4 + lane])) << (b * np.uint64(lane))
        if bits < 16:
            low |= high << half
            high >>= np.uint64(64) - half
        for byte in range(8):
            out[j * bits + byte] = np.uint8(low >> np.uint64(8 * byte))
        for byte in range(8, bits):
            out[j * bits + byte] = np.uint8(high >> np.uint64(8 * byte - 64))
    whole = codes.size // 8 * 8
    pack_one_by_one(codes[whole:], bits, out[whole // 8 * bits :])


@inline
def pack_one_by_one(codes, bits, out):
    """Pack codes of any width, one after the other."""
    word, filled, at = np.uint64(0), 0, 0
    for i in range(codes.size):
        word |= np.uint64(codes[i]) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            out[at] = np.uint8(word & np.uint64(255))
            word >>= np.uint64(8)
            filled -= 8
            at += 1
    if filled > 0:
        out[at] = np.uint8(word)


@inline
def unpack_codes(packed, bits, codes):
    """Unpack into uint8 codes: the inverse of `pack_codes`."""
    whole = codes.size // 8 * 8
    if bits == 8:
        for j in range(whole):
            codes[j] = packed[j]
    else:
        _unpack_eights(packed, bits, codes[:whole].view(np.uint64))
    unpack_one_by_one(packed[whole // 8 * bits :], bits, codes[whole:])


@inline
def _unpack_eights(packed, bits, eights):
    gap = np.uint64(8 - bits)
    fours = np.uint64((1 << (4 * bits)) - 1)
    twos = np.uint64(((1 << (2 * bits)) - 1) * 0x0000000100000001)
    ones = np.uint64(((1 << bits) - 1) * 0x0001000100010001)
    roomy, whole = max(eights.size - 8, 0), np.uint64((1 << (8 * bits)) - 1)
    for j in range(roomy):
        eights[j] = load_word(packed, np.uintp(j * bits))
    for j in range(roomy, eights.size):
        w = np.uint64(0)
        for byte in range(bits):
            w |= np.uint64(packed[j * bits + byte]) << np.uint64(8 * byte)
        eights[j] = w
    for j in range(eights.size):
        w = eights[j] & whole
        w = (w & fours) | ((w & ~fours) << np.uint64(4 * gap))
        w = (w & twos) | ((w & ~twos) << (gap + gap))
        eights[j] = (w & ones) | ((w & ~ones) << gap)


@inline
def unpack_wide_eights(packed, bits, codes):
    """Unpack codes of 9 to 16 bits, eight at a time."""
    half, b, mask = np.uint64(4 * bits), np.uint64(bits), np.uint64((1 << bits) - 1)
    for j in range(codes.size // 8):
        low = high = np.uint64(0)
        for byte in range(8):
            low |= np.uint64(packed[j * bits + byte]) << np.uint64(8 * byte)
        for byte in range(8, bits):
            high |= np.uint64(packed[j * bits + byte]) << np.uint64(8 * byte - 64)
        if bits < 16:
            high = (high << (np.uint64(64) - half)) | (low >> half)
        for lane in range(4):
            codes[8 * j + lane] = np.int32((low >> (b * np.uint64(lane))) & mask)
            codes[8 * j + 4 + lane] = np.int32((high >> (b * np.uint64(lane))) & mask)
    whole = codes.size // 8 * 8
    unpack_one_by_one(packed[whole // 8 * bits :], bits, codes[whole:])


@inline
def unpack_one_by_one(packed, bits, codes):
    """Unpack codes of any width, one after the other."""
    word, filled, at = np.uint64(0), 0, 0
    mask = np.uint64((1 << bits) - 1)
    for i in range(codes.size):
        while filled < bits:
            word |= np.uint64(packed[at]) << np.uint64(filled)
            filled += 8
            at += 1
        codes[i] = word & mask
        word >>= np.uint64(bits)
        filled -= bits


@compiled("void(uint8[::1], int64, uint8[::1])")
def _pack_narrow(codes, bits, out):
    scratch = np.empty(min(TILE, codes.size), np.uint8)
    for start in range(0, codes.size, TILE):
        piece = codes[start : start + TILE]
        for i in range(piece.size):  # numba compiles a loop in a fraction of the time that it takes for slices
            scratch[i] = piece[i]
        pack_codes(scratch[: piece.size], bits, out[start // 8 * bits :])


@compiled("void(int32[::1], int64, uint8[::1])")
def _pack_wide(codes, bits, out):
    pack_wide_eights(codes, bits, out)


@compiled("void(uint8[::1], int64, uint8[::1])")
def _unpack_narrow(packed, bits, codes):
    unpack_codes(packed, bits, codes)


@compiled("void(uint8[::1], int64, int32[::1])")
def _unpack_wide(packed, bits, codes):
    unpack_wide_eights(packed, bits, codes)


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    kernel = _pack_narrow if codes.dtype == torch.uint8 else _pack_wide
    c, o = array_of(codes), array_of(out)
    pool.run([functools.partial(kernel, c[i:j], bits, o[i * bits // 8 :]) for i, j in pool.chunks(codes.numel(), 8)])


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    codes = buffers.empty((numel,), torch.uint8 if bits <= 8 else torch.int32, packed.device)
    kernel = _unpack_narrow if bits <= 8 else _unpack_wide
    p, c = array_of(packed), array_of(codes)
    pool.run([functools.partial(kernel, p[i * bits // 8 :], bits, c[i:j]) for i, j in pool.chunks(numel, 8)])
    return codes


def _packer(mask: Any, holds: Callable[..., Any]) -> Any:
    """A function f(x, bound, out): bit i of `out` is holds(x[i], bound), which `mask` says of eight at a time."""

    @inline
    def pack(x, bound, out):
        whole = x.size // 8
        for j in range(whole):
            out[j] = mask(x, np.uintp(8 * j), bound)
        if 8 * whole < x.size:
            last = np.uint8(0)
            for i in range(8 * whole, x.size):
                last |= np.uint8(np.uint8(holds(x[i], bound)) << np.uint8(i & 7))
            out[whole] = last

    return pack


pack_at_least = _packer(at_least_8, inline(lambda value, bound: value >= bound))
pack_below = _packer(below_8, inline(lambda value, bound: value < bound))


@inline
def choose_by_bits(bits, start, stop, up, down, out):
    """out[i] = up where bit i is 1, else down, for i in [start, stop); start is a multiple of 8."""
    whole = stop // 8 * 8
    for i in range(start, whole, 8):
        choose_8(out, np.uintp(i), bits[np.uintp(i >> 3)], up, down)
    for i in range(max(start, whole), stop):
        out[np.uintp(i)] = up if (bits[np.uintp(i >> 3)] >> np.uint8(i & 7)) & np.uint8(1) else down
