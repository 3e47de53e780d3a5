"""Index coding in plain torch: what it means, on any device. `gradwire.kernels.indices` documents the format.

No shape depends on data and nothing is read back to the host, so what varies from payload to payload (the number of
low bits, the number of indices) is a 0-d tensor here. Streams are spelled out bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 64
LANES = 32
CANDIDATES = (-1, 0, 1, 2)
"""Low bits that `rice` tries, as differences from the best for any payload of that size."""


def candidates(bits: int) -> list[int]:
    """The numbers of low bits to try.

    >>> candidates(0), candidates(6)
    ([0, 1, 2], [5, 6, 7, 8])
    """
    return [bits + more for more in CANDIDATES if 0 <= bits + more < LANES]


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _scalar(value: int, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.int64, device=like.device)


def _before(values: Tensor) -> Tensor:
    """Each value's predecessor, -1 before the first."""
    return torch.cat([torch.full_like(values[:1], -1), values[:-1]])


def _to_words(stream: Tensor) -> Tensor:
    return (stream.view(-1, WORD) << _arange(WORD, stream)).sum(1)


def _write(values: Tensor, positions: Tensor, valid: Tensor, bits: Tensor, words: int) -> Tensor:
    """Return the words of a stream: low bits of `values`, then ones at `positions` of the unary part."""
    lanes, i, nowhere = _arange(LANES, values), _arange(values.numel(), values), WORD * words
    stream = torch.zeros(WORD * words + 1, dtype=torch.int64, device=values.device)
    where = torch.where((lanes < bits) & valid[:, None], i[:, None] * bits + lanes, nowhere)
    stream.scatter_(0, where.view(-1), ((values[:, None] >> lanes) & 1).view(-1))
    start = valid.sum() * bits
    stream.scatter_(0, torch.where(valid, start + positions, nowhere), 1)
    return _to_words(stream[:nowhere])


def _read(words: Tensor, count: int, some: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return low bits and unary positions of `some` values, padded to `count`, and whether there are as many."""
    stream = ((words[:, None] >> _arange(WORD, words)) & 1).view(-1)
    at, i, lanes = _arange(stream.numel(), words), _arange(count, words), _arange(LANES, words)
    start = some * bits
    ones = (stream == 1) & (at >= start)
    rank = ones.cumsum(0) - 1
    slot = torch.where(ones & (rank < some), rank, count)
    positions = torch.zeros(count + 1, dtype=torch.int64, device=words.device).scatter_(0, slot, at - start)
    low_at = (i[:, None] * bits + lanes).clamp(max=stream.numel() - 1)
    lows = torch.where(lanes < bits, stream[low_at] << lanes, 0).sum(1)
    return lows, positions[:count], ones.sum() >= some


def _finish(indices: Tensor, numel: int, some: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first `some` indices in int32, the others as `numel`, and whether all is well."""
    counted = _arange(indices.numel(), indices) < some
    sound = (indices > _before(indices)) & (indices < numel)
    good = enough & torch.where(counted, sound, True).all()
    return torch.where(counted, indices.clamp(0, numel), numel).to(torch.int32), good


def encode(indices: Tensor, numel: int, bits: int, out: Tensor) -> bool:
    """Elias-Fano: values index_i - i, high parts at position (high + i). True: nothing is read to check."""
    i = _arange(indices.numel(), indices)
    values = indices.to(torch.int64) - i
    everything = torch.ones_like(values, dtype=torch.bool)
    out.copy_(_write(values, (values >> bits) + i, everything, _scalar(bits, out), out.numel()))
    return True


def decode(packed: Tensor, numel: int, count: int, bits: int) -> tuple[Tensor, Tensor]:
    """Elias-Fano; returns indices and whether they are sound."""
    some, i = _scalar(count, packed), _arange(count, packed)
    lows, positions, enough = _read(packed, count, some, _scalar(bits, packed))
    return _finish((((positions - i) << bits) | lows) + i, numel, some, enough)


def encode_rice(indices: Tensor, numel: int, bits: int, out: Tensor) -> bool:
    """Rice: values are gaps; low bits as short as this payload can be. True, as of `encode`."""
    wide = indices.to(torch.int64)
    valid = wide < numel
    gaps = torch.where(valid, wide - _before(wide) - 1, 0)
    some = valid.sum()
    tried = torch.tensor(candidates(bits), device=out.device)
    high = torch.where(valid[:, None], gaps[:, None] >> tried, 0).sum(0)
    words = (some * tried + some + high + (WORD - 1)) // WORD
    # Of equals the first: a multiple tells them apart.
    best = (words * len(CANDIDATES) + _arange(tried.numel(), tried)).argmin().view(1)
    chosen, used = tried.gather(0, best).view(()), words.gather(0, best).view(())
    positions = (torch.where(valid, gaps >> chosen, 0) + 1).cumsum(0) - 1
    out[1:].copy_(_write(gaps, positions, valid, chosen, out.numel() - 1))
    out[:1].copy_((chosen | used << 6 | some << 32).view(1))
    return True


def decode_rice(packed: Tensor, numel: int, count: int, bits: int) -> tuple[Tensor, Tensor]:
    """Rice; returns indices and whether they are sound."""
    header = packed[0]
    chosen, used, some = header & 63, (header >> 6) & 0x3FFFFFF, (header >> 32) & 0xFFFFFFFF
    lawful = (chosen < LANES) & (used < packed.numel()) & (some <= count)
    chosen, some = chosen.clamp(max=LANES - 1), some.clamp(max=count)
    lows, positions, enough = _read(packed[1:], count, some, chosen)
    gaps = ((positions - _before(positions) - 1) << chosen) | lows
    return _finish((gaps + 1).cumsum(0) - 1, numel, some, enough & lawful)
