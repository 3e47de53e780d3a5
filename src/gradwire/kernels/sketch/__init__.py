"""Count sketches: sums of signed elements, from which each element can be estimated."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.sketch import reference

__all__ = [
    "count_sketch",
    "count_unsketch",
]

_count_sketch = Kernel(reference.count_sketch, "cpu")
_count_unsketch = Kernel(reference.count_unsketch, "cpu")


def count_sketch(x: Tensor, seed: int, sketch: Tensor) -> None:
    """sketch[j, h_j(i)] = sum over i, in order, of s_j(i) * x[i] (Charikar, Chen & Farach-Colton 2002).

    Column and sign of element i in row j are computed on the fly from one word, with `mix` as in
    `random.reference.uniform` and k the words of splitmix64 from seed `seed`, two a row:

        w = mix(mix(i ^ k_2j) ^ k_2j+1)
        s_j(i) = -1 where w is odd, else 1;   h_j(i) = floor((w >> 1) * columns / 2^31)

    Args:
        x: (numel,), numel below 2^31.
        seed: the key.
        sketch: (rows, columns) float32, contiguous, written; at least one column unless `x` is empty.

    Raises:
        TypeError: not float32.
        ValueError: a tensor of another shape, or an even number of rows, whose median is no entry.

    >>> sketch = torch.empty(3, 8)
    >>> count_sketch(torch.tensor([0.0, 5.0, 0.0]), 1, sketch)
    >>> sketch.abs().sum(1)
    tensor([5., 5., 5.])
    """
    _require_sketch(x, sketch)
    _count_sketch.on(x.device, x.numel())(x, seed, sketch)


def count_unsketch(sketch: Tensor, seed: int, out: Tensor) -> None:
    """out[i] = median over rows j of s_j(i) * sketch[j, h_j(i)], NaN where one of them is.

    The error of an estimate is beyond |x| sqrt(8 / columns) with a chance that falls exponentially in the number of
    rows (Charikar, Chen & Farach-Colton 2002, Lemma 3), so what is larger than that is found.

    Args:
        sketch: (rows, columns) float32, rows odd.
        seed: the key that sketched it.
        out: (numel,) float32, written.

    Raises:
        TypeError: not float32.
        ValueError: as `count_sketch`.

    >>> sketch, out = torch.empty(3, 8), torch.empty(3)
    >>> count_sketch(torch.tensor([0.0, 5.0, 0.0]), 1, sketch)
    >>> count_unsketch(sketch, 1, out)
    >>> out[1]
    tensor(5.)
    """
    _require_sketch(out, sketch)
    _count_unsketch.on(out.device, out.numel())(sketch, seed, out)


def _require_sketch(x: Tensor, sketch: Tensor) -> None:
    for name, tensor, ndim in (("the tensor", x, 1), ("the sketch", sketch, 2)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}, and kernels take torch.float32 only")
        if tensor.ndim != ndim or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {ndim}-d and contiguous")
    rows, columns = sketch.shape
    if rows % 2 == 0 or (x.numel() and not 0 < columns < 2**31) or x.numel() >= 2**31:
        raise ValueError(
            f"a sketch of {rows} by {columns} for {x.numel()} elements: rows must be odd, columns positive"
        )
