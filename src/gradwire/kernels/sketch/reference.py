"""Count sketches in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.random.reference import key_words, mix


def sketch_words(seed: int, rows: int) -> list[tuple[int, int]]:
    """Two 32-bit words for every row."""
    words = key_words(seed, 2 * rows)
    return list(zip(words[::2], words[1::2], strict=True))


def hashed(numel: int, columns: int, words: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Column and sign of every element in one row."""
    counter = torch.arange(numel, device=device, dtype=torch.int64)
    word = mix(mix(counter ^ words[0]) ^ words[1])
    sign = 1.0 - 2.0 * (word & 1).to(torch.float32)
    return ((word >> 1) * columns) >> 31, sign


def count_sketch(x: Tensor, seed: int, sketch: Tensor) -> None:
    """Add each element, with its sign, to its column of every row."""
    sketch.zero_()
    for row, words in zip(sketch, sketch_words(seed, sketch.shape[0]), strict=True):
        column, sign = hashed(x.numel(), row.numel(), words, x.device)
        row.index_add_(0, column, sign * x)


def count_unsketch(sketch: Tensor, seed: int, out: Tensor) -> None:
    """The median over rows of what the element's columns hold, in its sign."""
    rows, columns = sketch.shape
    estimates = torch.empty(rows, out.numel(), dtype=torch.float32, device=out.device)
    for j, words in enumerate(sketch_words(seed, rows)):
        column, sign = hashed(out.numel(), columns, words, out.device)
        torch.mul(sketch[j].index_select(0, column), sign, out=estimates[j])
    out.copy_(estimates.median(0).values)
