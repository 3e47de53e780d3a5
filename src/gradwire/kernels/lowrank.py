"""Kernels of low-rank methods and sketches; see the package's text for what all kernels share."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import reference_lowrank

__all__ = [
    "add_bf16_",
    "add_scaled_",
    "combine_rows",
    "count_sketch",
    "count_unsketch",
    "hadamard_accumulate",
    "hadamard_encode",
    "round_bf16",
    "topk_rows",
    "unit_rows_",
    "warm_up",
]


def _module(device: torch.device) -> ModuleType:
    if device.type != "cpu" or kernels._cpu_kernels() is None:  # pyright: ignore[reportPrivateUsage]
        return reference_lowrank
    from gradwire.kernels import cpu_lowrank

    return cpu_lowrank


def warm_up() -> None:
    """Call every kernel of this module once; see `kernels.warm_up`."""
    x, values, codes = (
        torch.ones(8, dtype=torch.float32),
        torch.empty(8, dtype=torch.float32),
        torch.empty(8, dtype=torch.uint8),
    )
    sketch, rows, half = (
        torch.empty(1, 8, dtype=torch.float32),
        torch.arange(8, dtype=torch.int32),
        torch.empty(8, dtype=torch.bfloat16),
    )
    unit_rows_(x.view(1, 8), 1)
    count_sketch(x, 1, sketch)
    count_unsketch(sketch, 1, values)
    topk_rows(x.view(1, 8), 8, values, codes)
    combine_rows(values, codes, torch.eye(8), x.view(1, 8))
    hadamard_encode(x, 8, 1, rows, values)
    hadamard_accumulate(values, 8, 1, rows, x)
    round_bf16(x, 1, half)
    add_bf16_(x, half)
    add_scaled_(x, values, 0.5)


def unit_rows_(Q: Tensor, bits: int) -> None:
    """Scale each row to a largest magnitude in [1, 2) by a power of two, which rounds nothing, in place.

    A row of zeros is redrawn: element i of the matrix, counted row by row, becomes 2 u_i - 1 with u =
    `kernels.uniform(bits)`. Rows that are not finite stay so.

    Args:
        Q: (rows, columns) float32, contiguous, changed in place.
        bits: the key.

    Raises:
        TypeError: not float32.
        ValueError: not 2-d and contiguous.

    >>> Q = torch.tensor([[0.0, -6.0], [0.0, 0.0]])
    >>> unit_rows_(Q, bits=1)
    >>> Q[0], bool((Q[1] != 0).any())
    (tensor([ 0.0000, -1.5000]), True)
    """
    if Q.dtype != torch.float32:
        raise TypeError(f"Q is {Q.dtype}, and kernels take torch.float32 only")
    if Q.ndim != 2 or not Q.is_contiguous():
        raise ValueError(f"Q has shape {tuple(Q.shape)} and strides {Q.stride()}; pass a contiguous matrix")
    _module(Q.device).unit_rows_(Q, bits)


def count_sketch(x: Tensor, bits: int, sketch: Tensor) -> None:
    """sketch[j, h_j(i)] = sum over i, in order, of s_j(i) * x[i] (Charikar, Chen & Farach-Colton 2002).

    Column and sign of element i in row j are computed on the fly from one word, with `mix` as in `kernels.uniform` and
    k the words of splitmix64 from seed `bits`, two a row:

        w = mix(mix(i ^ k_2j) ^ k_2j+1)
        s_j(i) = -1 where w is odd, else 1;   h_j(i) = floor((w >> 1) * columns / 2^31)

    Args:
        x: (numel,), numel below 2^31.
        bits: the key.
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
    _module(x.device).count_sketch(x, bits, sketch)


def count_unsketch(sketch: Tensor, bits: int, out: Tensor) -> None:
    """out[i] = median over rows j of s_j(i) * sketch[j, h_j(i)], NaN where one of them is.

    The error of an estimate is beyond |x| sqrt(8 / columns) with a chance that falls exponentially in the number of
    rows (Charikar, Chen & Farach-Colton 2002, Lemma 3), so what is larger than that is found.

    Args:
        sketch: (rows, columns) float32, rows odd.
        bits: the key that sketched it.
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
    _module(out.device).count_unsketch(sketch, bits, out)


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
    _module(x.device).topk_rows(x, k, values, codes)


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
    _module(out.device).combine_rows(values, codes, basis, out)


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


def hadamard_encode(x: Tensor, block: int, bits: int, chosen: Tensor, out: Tensor) -> None:
    """For every block of x: out = (H D x)[chosen] / sqrt(block), H the Hadamard matrix in Sylvester's order, D signs.

    D_i is 1 where u_i < 1/2, u = `kernels.uniform(bits)`, else -1. The last block is filled up with zeros.

    Args:
        x: (numel,) float32.
        block: a power of two.
        bits: the key of the signs.
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
    _module(x.device).hadamard_encode(x, block, bits, chosen, out)


def hadamard_accumulate(
    values: Tensor, block: int, bits: int, chosen: Tensor, into: Tensor, alpha: float = 1.0
) -> None:
    """For every block: into += alpha * D H z / sqrt(block), z the values at `chosen` and zero elsewhere.

    Args:
        values: what `hadamard_encode` writes.
        block: a power of two.
        bits: the key of the signs.
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
    _module(into.device).hadamard_accumulate(values, block, bits, chosen, into, alpha)


def _require_blocks(x: Tensor, block: int, chosen: Tensor, values: Tensor) -> None:
    if (x.dtype, values.dtype, chosen.dtype) != (torch.float32, torch.float32, torch.int32):
        raise TypeError(f"x, values and chosen are {x.dtype}, {values.dtype}, {chosen.dtype}: pass float32 and int32")
    if block < 1 or block & (block - 1):
        raise ValueError(f"block {block} is no power of two")
    sizes = (x.ndim, chosen.ndim, values.shape) == (1, 1, (-(-x.numel() // block) * chosen.numel(),))
    if not sizes or not all(t.is_contiguous() for t in (x, chosen, values)):
        raise ValueError(f"{tuple(values.shape)} values of {tuple(x.shape)}, {chosen.numel()} of each {block}")


def add_bf16_(x: Tensor, r: Tensor, alpha: float = 1.0) -> None:
    """x += alpha * r, in place and without a copy of r in float32: the product is rounded, then the sum.

    Args:
        x: (numel,) float32.
        r: (numel,) bfloat16.
        alpha: rounded to float32.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.

    >>> x = torch.ones(2)
    >>> add_bf16_(x, torch.ones(2, dtype=torch.bfloat16), 0.5)
    >>> x
    tensor([1.5000, 1.5000])
    """
    _require_half(x, r)
    _module(x.device).add_bf16_(x, r, alpha)


def add_scaled_(into: Tensor, x: Tensor, alpha: float = 1.0) -> None:
    """into += alpha * x, in place: the product is rounded, then the sum, on every processor.

    `torch.add` with `alpha` fuses the two where a processor can, so ranks on different processors would get different
    means of what all of them received.

    Args:
        into: (numel,) of any floating dtype.
        x: (numel,) of any floating dtype, taken to that of `into`.
        alpha: rounded to the dtype of `into`.

    >>> x = torch.ones(2)
    >>> add_scaled_(x, torch.tensor([1.0, 2.0]), 0.5)
    >>> x
    tensor([1.5000, 2.0000])
    """
    if abs(alpha) == 1.0:  # an exact product
        into.add_(x.to(into.dtype), alpha=alpha)
        return
    simple = into.dtype == x.dtype == torch.float32 and into.is_contiguous() and x.is_contiguous()
    (_module(into.device) if simple else reference_lowrank).add_scaled_(into, x, alpha)


def round_bf16(x: Tensor, bits: int, out: Tensor) -> None:
    """Round stochastically to bfloat16: up, away from zero, with a chance of the part that is cut. Unbiased.

    With m_i the bits of x_i as an integer and u = `kernels.uniform(bits)`: (m_i + floor(2^16 u_i)) >> 16. What would
    overflow is cut instead; infinity and NaN stay so.

    Args:
        x: (numel,) float32.
        bits: the key.
        out: (numel,) bfloat16, written.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.

    >>> out = torch.empty(2, dtype=torch.bfloat16)
    >>> round_bf16(torch.tensor([1.0, -2.5]), 1, out)
    >>> out
    tensor([ 1.0000, -2.5000], dtype=torch.bfloat16)
    """
    _require_half(x, out)
    _module(x.device).round_bf16(x, bits, out)


def _require_half(x: Tensor, half: Tensor) -> None:
    if (x.dtype, half.dtype) != (torch.float32, torch.bfloat16):
        raise TypeError(f"tensors of {x.dtype} and {half.dtype}: pass float32 and bfloat16")
    if x.ndim != 1 or x.shape != half.shape or not (x.is_contiguous() and half.is_contiguous()):
        raise ValueError(f"tensors of {tuple(x.shape)} and {tuple(half.shape)}: pass 1-d contiguous ones of one size")
