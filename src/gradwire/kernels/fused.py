# pyright: reportPrivateUsage=false
"""Several kernels in one pass: selection that leaves the residual behind, sums of payloads.

On a GPU each is one kernel, or a few; elsewhere they are what their equations say, made of the kernels of
`gradwire.kernels`, and on all devices the bits are the same but where sums are free.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import reference

__all__ = [
    "block_int_reduce",
    "scatter_add_rows_",
    "topk_encode_keeping",
    "topk_feedback",
]


def _fused(x: Tensor) -> ModuleType | None:
    """The kernels that do it in one pass, where `x` is on a GPU and they can be had."""
    if x.device.type != "cuda":
        return None
    found = kernels._kernels(x.device, x.numel())
    return None if found is reference else found


def _check_blocks(x: Tensor, packed: Tensor, scales: Tensor, bits: int, block: int) -> None:
    kernels._check_blocks(x, packed, scales, bits, block)


# Residuals --------------------------------------------------------------------------------------------------


def _check_sparse(x: Tensor, values: Tensor, indices: Tensor) -> None:
    """Refuse a payload that `x` does not fill.

    Raises:
        ValueError: more values than elements, or not as many as indices.
        TypeError: x is not float32, or indices are not int32.
    """
    kernels._require("x", x, torch.float32)
    kernels._require("indices", indices, torch.int32)
    kernels._require_size("values", values, indices.numel())
    kernels._require_range("k", indices.numel(), 0, x.numel())


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
    fused = _fused(x)
    if fused is not None:
        fused.topk_encode_keeping(x, values, indices)
        return
    indices.copy_(kernels.topk(x, indices.numel(), values)[0])
    kernels.scatter_add_(x, indices, values, -1.0, distinct=True)


def topk_feedback(x: Tensor, residual: Tensor, decay: float, values: Tensor, indices: Tensor) -> None:
    """residual = x + decay * residual, then `topk_encode_keeping(residual, values, indices)`.

    A step of error feedback over top-k: the sum is made in the first pass of the selection. Raises as that.

    >>> x, e = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.0])
    >>> values, indices = torch.empty(1), torch.empty(1, dtype=torch.int32)
    >>> topk_feedback(x, e, 1.0, values, indices)
    >>> e, values
    (tensor([0., 2.]), tensor([3.]))
    """
    _check_sparse(x, values, indices)
    _check_sparse(residual, values, indices)
    kernels._require_size("residual", residual, x.numel())
    fused = _fused(x)
    if fused is not None:
        fused.topk_feedback(x, residual, decay, values, indices)
        return
    residual.mul_(decay).add_(x)
    topk_encode_keeping(residual, values, indices)


# Sums of payloads -------------------------------------------------------------------------------------------


def scatter_add_rows_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> None:
    """into[indices[i]] += alpha * values[i] for one row i after the other, so the sum does not vary.

    Args:
        into: (numel,) float32, numel < 2^31.
        indices: (rows, k) int32, each row increasing and without repetition, as top-k gives them; any row stride.
        values: (rows, k) of any floating dtype, any row stride.
        alpha: rounded to float32.

    Raises:
        ValueError: shapes that differ.

    >>> x = torch.zeros(3)
    >>> scatter_add_rows_(x, torch.tensor([[0, 2], [1, 2]], dtype=torch.int32), torch.ones(2, 2), 0.5)
    >>> x
    tensor([0.5000, 0.5000, 1.0000])
    """
    kernels._require("into", into, torch.float32)
    if indices.ndim != 2 or indices.shape != values.shape:
        raise ValueError(f"indices of {tuple(indices.shape)} and values of {tuple(values.shape)}: pass (rows, k) both")
    fused = _fused(into)
    if fused is not None and indices.stride(1) == values.stride(1) == 1:
        fused.scatter_add_rows_(into, indices, values, alpha)
        return
    for row, numbers in zip(indices, values, strict=True):
        kernels.scatter_add_(into, row.contiguous(), numbers, alpha)


def block_int_reduce(
    received: Tensor,
    received_scales: Tensor,
    bits: int,
    block: int,
    owner: Tensor | None,
    out_bits: int,
    key: int | None,
    packed: Tensor,
    scales: Tensor,
    numel: int,
    alpha: float,
) -> None:
    """What the owner of a shard does in a quantised two-shot exchange:

        y = sum over rows, in order, of alpha * decode(row)  (+ owner)
        packed, scales = block_int_encode(y, out_bits, block, key);   owner = y - decode(packed, scales)

    Args:
        received: (rows, packed_nbytes(numel, bits)) uint8, any row stride.
        received_scales: (rows, ceil(numel / block)) float32, any row stride.
        bits: 2 to 8, of the rows.
        block: elements that share a scale, of the rows and of what is encoded; a multiple of 8.
        owner: (numel,) float32, the residual, changed in place; None where none is kept.
        out_bits: 2 to 8, of what is encoded.
        key: of stochastic rounding of what is encoded, or None.
        packed: (packed_nbytes(numel, out_bits),) uint8, written.
        scales: (ceil(numel / block),) float32, written.
        numel: elements of the shard.
        alpha: 1 / rows for a mean; rounded to float32.

    Raises:
        ValueError: bits, block or sizes that do not fit.
    """
    kernels._require_range("bits", bits, 2, 8)
    fused = _fused(received)
    if fused is not None and fused.two_shot.fits(block) and received.stride(1) == received_scales.stride(1) == 1:
        _check_reduce(received, received_scales, bits, block, owner, out_bits, packed, scales, numel)
        fused.block_int_reduce(
            *(received, received_scales, bits, block, owner, out_bits, key, packed, scales, numel, alpha)
        )
        return
    y = torch.zeros(numel, dtype=torch.float32, device=received.device)
    for row, row_scales in zip(received, received_scales, strict=True):
        kernels.block_int_accumulate(row, row_scales, bits, block, y, alpha)
    if owner is not None:
        y.add_(owner)
    kernels.block_int_encode(y, out_bits, block, key, packed, scales, keep=owner is not None)
    if owner is not None:
        owner.copy_(y)


def _check_reduce(
    received: Tensor,
    received_scales: Tensor,
    bits: int,
    block: int,
    owner: Tensor | None,
    out_bits: int,
    packed: Tensor,
    scales: Tensor,
    numel: int,
) -> None:
    kernels._require_range("out_bits", out_bits, 2, 8)
    y = torch.empty(numel, device="meta") if owner is None else owner
    kernels._require_size("owner", y, numel)
    _check_blocks(y, packed, scales, out_bits, block)
    for row, row_scales in zip(received, received_scales, strict=True):
        _check_blocks(y, row, row_scales, bits, block)
