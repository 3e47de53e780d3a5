# pyright: basic
"""Selection on CPUs, in numba: candidates in one pass over memory, and a look at these."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, raw_bits_of
from gradwire.kernels.runtime.tiles import max_magnitude
from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN
from gradwire.kernels.selection.candidates import (
    SAMPLED,
    Words,
    candidates_from,
    counts_from,
    guessed_least,
    kth_largest,
    magnitudes_of,
    magnitudes_of_all,
    pieces_of,
    write_largest,
)
from gradwire.kernels.sparse.cpu import scatter_add_


@compiled("uint32(uint32[::1])")
def _largest_raw(raw):
    return max_magnitude(raw, 0, raw.size)


def all_finite(x: Tensor) -> Tensor:
    raw = raw_bits_of(x).reshape(-1)
    largest = pool.run([functools.partial(_largest_raw, piece) for piece in pieces_of(raw)])
    return torch.tensor(int(max(largest)) < 0x7F800000)


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    chosen = _chosen(raw_bits_of(x), k)
    values = buffers.empty((k,), torch.float32, x.device) if values is None else values
    direct = values.dtype == torch.float32 and values.is_contiguous()
    indices = buffers.empty((k,), torch.int32, x.device)
    found = values if direct else buffers.empty((k,), torch.float32, x.device)
    if k:
        _write(chosen, array_of(indices), raw_bits_of(found))
    if not direct:
        values.copy_(found)
    return indices, values


def topk_indices(x: Tensor, k: int) -> Tensor:
    return topk(x, k)[0]


_FEW = 8
"""Candidates that are no more than this part of a tensor are kept: they take less memory than the tensor."""


class _Chosen(NamedTuple):
    """Pieces of words that hold the largest, the least of these, and where each piece's words are in the tensor.

    Without `places` the pieces are the tensor itself.
    """

    pieces: list[Words]
    threshold: int
    places: list[Words] | None = None


def _chosen(raw: Words, k: int) -> _Chosen:
    """The k largest are among the candidates above a magnitude that is guessed; where these are few, they are kept.

    Where that guess was wrong, and where there is little to look through, all are candidates.
    """
    pieces = pieces_of(raw)
    if not 0 < k < raw.size:
        return _Chosen(pieces, 0)
    if raw.size >= SAMPLED and 2 * k <= raw.size:
        least = guessed_least(raw, k)
        counts = counts_from(pieces, least)
        if sum(counts) >= k:
            candidates = candidates_from(pieces, least, counts)
            words, places = [each for _, each in candidates], [each for each, _ in candidates]
            if sum(counts) <= raw.size // _FEW:
                return _Chosen(words, kth_largest(magnitudes_of_all(words), k), places)
            del candidates, places  # before there is a copy of the words
            return _Chosen(pieces, kth_largest(magnitudes_of_all(words), k))
        if least == 1:  # a sparse tensor, whose k-th largest is 0
            return _Chosen(pieces, 0)
    return _Chosen(pieces, kth_largest(magnitudes_of(raw), k))


def _write(chosen: _Chosen, indices: Words, values: Words) -> None:
    """Write as many of the largest as there is room for, and where they are."""
    shares = _write_those_from(chosen.pieces, chosen.threshold, indices, values, together=chosen.places is None)
    if chosen.places is not None:
        for places, share in zip(chosen.places, shares, strict=True):
            indices[share] = places[indices[share]]


def _write_those_from(
    pieces: list[Words], threshold: int, indices: Words, values: Words, together: bool
) -> list[slice]:
    """Write the largest, of which `threshold` is the least; return which of all each piece has written.

    Places count from the beginning of all pieces, or from that of each where these are not taken `together`.
    """
    above, at_least = counts_from(pieces, threshold + 1), counts_from(pieces, threshold)
    left, start, stop, shares, tasks = indices.size - sum(above), 0, 0, [], []
    for piece, more, n in zip(pieces, above, at_least, strict=True):
        quota = min(left, n - more)  # of those that equal the threshold: the first of all are kept
        share = slice(stop, stop + more + quota)
        tasks.append(functools.partial(write_largest, piece, start, threshold, quota, indices[share], values[share]))
        shares.append(share)
        left, stop, start = left - quota, share.stop, start + piece.size if together else 0
    pool.run(tasks, numel=sum(piece.size for piece in pieces))
    return shares


def at_least(x: Tensor, tau: Tensor, values: Tensor) -> Tensor:
    """Where there are too many, the largest of all are the largest of those above tau."""
    raw, most = raw_bits_of(x), values.numel()
    if not raw.size:
        return torch.empty(0, dtype=torch.int32)
    least = int(min(raw_bits_of(tau.reshape(1))[0] & 0x7FFFFFFF, CANONICAL_NAN))
    pieces = pieces_of(raw)
    counts = counts_from(pieces, least)
    if sum(counts) > most:
        return topk(x, most, values)[0]
    candidates = candidates_from(pieces, least, counts)
    indices = buffers.empty((sum(counts),), torch.int32, x.device)
    np.concatenate([places for places, _ in candidates], out=array_of(indices))
    np.concatenate([words for _, words in candidates], out=raw_bits_of(values)[: sum(counts)])
    values[sum(counts) :] = 0
    return indices


def topk_encode_keeping(x: Tensor, values: Tensor, indices: Tensor) -> None:
    indices.copy_(topk(x, indices.numel(), values)[0])
    scatter_add_(x, indices, values, -1.0, distinct=True)
