"""Coefficients of small transforms: the largest of each row, combinations of a basis, Hadamard transforms of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.transforms import reference

__all__ = [
    "combine_rows",
    "hadamard_accumulate",
    "hadamard_encode",
    "topk_rows",
]

_combine_rows = Kernel(reference.combine_rows, "cpu")
_hadamard_accumulate = Kernel(reference.hadamard_accumulate, "cpu")
_hadamard_encode = Kernel(reference.hadamard_encode, "cpu")
_topk_rows = Kernel(reference.topk_rows, "cpu")


def topk_rows(x: Tensor, k: int, values: Tensor, codes: Tensor) -> None:
    """For every row of x the k entries of largest magnitude, in the order of their columns; ties go to the lowest.

    Args:
        x: (rows, columns) float32, contiguous, at most 256 columns; NaN is largest.
        k: 1 to columns.
        values: (rows * k,) float32, written.
        codes: (rows * k,) uint8, written: the columns.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.

    >>> values, codes = torch.empty(2), torch.empty(2, dtype=torch.uint8)
    >>> topk_rows(torch.tensor([[1.0, -3.0, 3.0, 0.5]]), 2, values, codes)
    >>> values, codes
    (tensor([-3.,  3.]), tensor([1, 2], dtype=torch.uint8))
    """
    _require_rows(x, k, values, codes)
    _topk_rows.on(x.device, x.numel())(x, k, values, codes)


def combine_rows(values: Tensor, codes: Tensor, basis: Tensor, out: Tensor) -> None:
    """out[row] = sum over j, in order, of values[row k + j] * basis[codes[row k + j]]: each product and sum is rounded.

    Args:
        values: (rows * k,) float32.
        codes: (rows * k,) uint8, below the basis's rows: the caller's duty.
        basis: (at most 256, columns) float32, contiguous.
        out: (rows, columns) float32, contiguous, written.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.

    >>> out = torch.empty(1, 2)
    >>> combine_rows(torch.tensor([2.0, 1.0]), torch.tensor([0, 1], dtype=torch.uint8), torch.eye(2), out)
    >>> out
    tensor([[2., 1.]])
    """
    _require_rows(out, values.numel() // max(1, out.shape[0]), values, codes)
    if basis.dtype != torch.float32 or basis.ndim != 2 or basis.shape[1] != out.shape[1] or not basis.is_contiguous():
        raise ValueError(f"a basis of {tuple(basis.shape)} {basis.dtype} does not fit rows of {out.shape[1]} float32")
    _combine_rows.on(out.device, out.numel())(values, codes, basis, out)


def _require_rows(x: Tensor, k: int, values: Tensor, codes: Tensor) -> None:
    if (x.dtype, values.dtype, codes.dtype) != (torch.float32, torch.float32, torch.uint8):
        raise TypeError(
            f"rows, values and codes are {x.dtype}, {values.dtype}, {codes.dtype}; float32 and uint8 wanted"
        )
    if x.ndim != 2 or x.shape[1] > 256 or not x.is_contiguous():
        raise ValueError(f"rows of shape {tuple(x.shape)}: they must be contiguous, with at most 256 columns")
    fits = all(t.is_contiguous() and t.shape == (x.shape[0] * k,) for t in (values, codes))
    if not fits or (x.shape[0] and not 1 <= k <= x.shape[1]):
        raise ValueError(f"{k} of {x.shape[1]} columns of {x.shape[0]} rows: values and codes have another size")


def hadamard_encode(x: Tensor, block: int, seed: int, chosen: Tensor, out: Tensor) -> None:
    """For every block of x: out = (H D x)[chosen] / sqrt(block), H the Hadamard matrix in Sylvester's order, D signs.

    D_i is 1 where u_i < 1/2, u = `random.reference.uniform(seed)`, else -1. The last block is filled up with zeros.

    Args:
        x: (numel,) float32.
        block: a power of two.
        seed: the key of the signs.
        chosen: (k,) int32, rows of H that are kept: each below `block`, the caller's duty.
        out: (ceil(numel / block) * k,) float32, written.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or a block that is no power of two.

    >>> out = torch.empty(2)
    >>> hadamard_encode(torch.ones(2), 2, 3, torch.tensor([0, 1], dtype=torch.int32), out)
    >>> float(out.square().sum().round(decimals=4))
    2.0
    """
    _require_blocks(x, block, chosen, out)
    _hadamard_encode.on(x.device, x.numel())(x, block, seed, chosen, out)


def hadamard_accumulate(
    values: Tensor, block: int, seed: int, chosen: Tensor, into: Tensor, alpha: float = 1.0
) -> None:
    """For every block: into += alpha * D H z / sqrt(block), z the values at `chosen` and zero elsewhere.

    Args:
        values: what `hadamard_encode` writes.
        block: a power of two.
        seed: the key of the signs.
        chosen: (k,) int32, distinct.
        into: (numel,) float32, changed in place.
        alpha: rounded to float32.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or a block that is no power of two.

    >>> all_rows, y, x = torch.arange(4, dtype=torch.int32), torch.empty(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> hadamard_encode(x, 4, 3, all_rows, y)
    >>> hadamard_accumulate(y, 4, 3, all_rows, x, alpha=-1.0)
    >>> x
    tensor([0., 0., 0., 0.])
    """
    _require_blocks(into, block, chosen, values)
    _hadamard_accumulate.on(into.device, into.numel())(values, block, seed, chosen, into, alpha)


def _require_blocks(x: Tensor, block: int, chosen: Tensor, values: Tensor) -> None:
    if (x.dtype, values.dtype, chosen.dtype) != (torch.float32, torch.float32, torch.int32):
        raise TypeError(f"x, values and chosen are {x.dtype}, {values.dtype}, {chosen.dtype}: pass float32 and int32")
    if block < 1 or block & (block - 1):
        raise ValueError(f"block {block} is no power of two")
    sizes = (x.ndim, chosen.ndim, values.shape) == (1, 1, (-(-x.numel() // block) * chosen.numel(),))
    if not sizes or not all(t.is_contiguous() for t in (x, chosen, values)):
        raise ValueError(f"{tuple(values.shape)} values of {tuple(x.shape)}, {chosen.numel()} of each {block}")
