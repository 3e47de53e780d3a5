"""Affine integers in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.kernels.runtime.torch_blocks import rows_of_blocks, write_or_add

AFFINE_LEVELS = 255
_AFFINE_PIECE = 1 << 14


def _affine_pieces(numel: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Cut a tensor into (its elements, their blocks), small enough that temporaries stay small."""
    size = block or max(1, numel)
    step = max(1, _AFFINE_PIECE // size) * size if block else _AFFINE_PIECE
    for start in range(0, numel, step):
        blocks = slice(start // size, -(-min(start + step, numel) // size)) if block else slice(0, 1)
        yield slice(start, min(start + step, numel)), blocks


def _affine_rows(piece: Tensor, block: int) -> Tensor:
    """One row a block, the last one padded with zeros, which change no extreme."""
    return rows_of_blocks(piece, block or max(1, piece.numel()))


def affine_encode(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    extremes = torch.zeros(2, scales.numel(), dtype=torch.float32, device=x.device)
    for part, blocks in _affine_pieces(x.numel(), block):
        rows = _affine_rows(x[part], block)
        low, high = extremes[0, blocks], extremes[1, blocks]
        low.copy_(torch.minimum(low, rows.amin(1)))
        high.copy_(torch.maximum(high, rows.amax(1)))
    count = torch.full_like(scales, AFFINE_LEVELS)
    scales.copy_(extremes[1] / count - extremes[0] / count)  # high - low could overflow
    scales.masked_fill_(~torch.isfinite(scales), float("nan"))
    usable = torch.isfinite(scales) & (scales != 0)
    divisor = torch.where(usable, scales, 1.0)
    zero = torch.where(usable, (-extremes[0] / divisor).round_().clamp_(0, AFFINE_LEVELS), 0.0)
    zeros.copy_(zero)
    for part, blocks in _affine_pieces(x.numel(), block):
        q = (_affine_rows(x[part], block) / divisor[blocks, None]).round_().add_(zero[blocks, None])
        q = torch.where(usable[blocks, None], q.clamp_(0, AFFINE_LEVELS), 0.0)
        levels[part].copy_(q.view(-1)[: part.stop - part.start])


def _affine_values(scales: Tensor, zeros: Tensor, levels: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    for part, blocks in _affine_pieces(levels.numel(), block):
        rows = _affine_rows(levels[part].float(), block)
        values = rows.sub_(zeros[blocks, None]).mul_(scales[blocks, None])
        yield part, values.view(-1)[: part.stop - part.start]


def affine_decode(
    scales: Tensor, zeros: Tensor, levels: Tensor, block: int, out: Tensor, weight: float | None = None
) -> None:
    for part, values in _affine_values(scales, zeros, levels, block):
        write_or_add(values, out[part], weight)
