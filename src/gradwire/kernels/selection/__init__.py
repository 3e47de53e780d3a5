"""Which elements are largest, or large enough, and whether all are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.checks import require, require_range, require_size
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.selection import reference

__all__ = [
    "all_finite",
    "at_least",
    "topk",
    "topk_encode_keeping",
    "topk_indices",
]

_all_finite = Kernel(reference.all_finite, "cpu", "cuda")
_topk_encode_keeping = Kernel(reference.topk_encode_keeping, "cpu", "cuda")
_at_least = Kernel(reference.at_least, "cpu")
_topk = Kernel(reference.topk, "cpu", "cuda")
_topk_indices = Kernel(reference.topk_indices, "cpu", "cuda")


def all_finite(x: Tensor) -> Tensor:
    """Whether no element is NaN or infinite, as a 0-d bool. Any shape, any floating dtype; one reading pass.

    >>> all_finite(torch.tensor([1.0, float("inf")]))
    tensor(False)
    """
    simple = x.dtype == torch.float32 and x.is_contiguous()
    chosen = _all_finite.on(x.device, x.numel()) if simple else reference.all_finite
    return chosen(x)


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices of the k elements of largest |x|, int32, increasing. Ties go to the lowest index; NaN is largest.

    Args:
        x: (numel,), numel < 2^31.
        k: 0 to numel.

    Raises:
        ValueError: k out of range.

    >>> topk_indices(torch.tensor([1.0, -3.0, 0.5, 3.0, 3.0]), 2)
    tensor([1, 3], dtype=torch.int32)
    """
    require("x", x, torch.float32)
    require_range("numel", x.numel(), 0, 2**31 - 1)
    require_range("k", k, 0, x.numel())
    return _topk_indices.on(x.device, x.numel())(x, k)


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`topk_indices(x, k)` and x there, (k,) float32; all NaN may come as one.

    Args:
        x: (numel,), numel < 2^31.
        k: 0 to numel.
        values: (k,) of any floating dtype: written, rounded, and returned, where it is given.

    Raises:
        ValueError: k out of range, or `values` of another size.

    >>> topk(torch.tensor([1.0, -3.0, 0.5, 3.0, 3.0]), 2)
    (tensor([1, 3], dtype=torch.int32), tensor([-3.,  3.]))
    """
    require("x", x, torch.float32)
    require_range("numel", x.numel(), 0, 2**31 - 1)
    require_range("k", k, 0, x.numel())
    if values is not None:
        require_size("values", values, k)
    return _topk.on(x.device, x.numel())(x, k, values)


def _check_sparse(x: Tensor, values: Tensor, indices: Tensor) -> None:
    """Refuse a payload that `x` does not fill.

    Raises:
        ValueError: more values than elements, or not as many as indices.
        TypeError: x is not float32, or indices are not int32.
    """
    require("x", x, torch.float32)
    require("indices", indices, torch.int32)
    require_size("values", values, indices.numel())
    require_range("k", indices.numel(), 0, x.numel())


def topk_encode_keeping(x: Tensor, values: Tensor, indices: Tensor) -> None:
    """indices = topk_indices(x, k), values = x[indices] rounded to their dtype, x[indices] -= values.

    Args:
        x: (numel,), numel < 2^31; loses what is sent.
        values: (k,) float32, bfloat16 or float16, written.
        indices: (k,) int32, written, increasing.

    Raises:
        ValueError: k above numel.
        TypeError: x is not float32, or indices are not int32.

    >>> x, values, indices = torch.tensor([1.0, -3.0, 0.5]), torch.empty(1), torch.empty(1, dtype=torch.int32)
    >>> topk_encode_keeping(x, values, indices)
    >>> x, values, indices
    (tensor([1.0000, 0.0000, 0.5000]), tensor([-3.]), tensor([1], dtype=torch.int32))
    """
    _check_sparse(x, values, indices)
    _topk_encode_keeping.on(x.device, x.numel())(x, values, indices)


def at_least(x: Tensor, tau: Tensor, values: Tensor) -> Tensor:
    """Indices of the elements with |x| >= tau, increasing; where there is no room for so many, of the largest of them.

    One reading pass where there is. Ties go to the lowest index; NaN is largest, and all NaN may come as one.

    Args:
        x: (numel,) float32.
        tau: 0-d float32, at least 0.
        values: (most,) float32, at most numel, written: these elements, and zeros.

    Returns:
        (m,) int32: on a CPU as many as there are; elsewhere, where nothing is read, `most`, and behind the last of them
        stands numel, which is none.

    Raises:
        ValueError: more room than elements.

    >>> values = torch.empty(4)
    >>> at_least(torch.tensor([1.0, -3.0, 0.5, 3.0]), torch.tensor(1.0), values)
    tensor([0, 1, 3], dtype=torch.int32)
    >>> values
    tensor([ 1., -3.,  3.,  0.])
    """
    require("x", x, torch.float32)
    require("values", values, torch.float32)
    if values.numel() > x.numel():
        raise ValueError(f"room for {values.numel()} values of {x.numel()} elements")
    return _at_least.on(x.device, x.numel())(x, tau, values)
