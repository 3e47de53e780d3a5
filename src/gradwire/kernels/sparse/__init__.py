"""Values at given indices: read, added, or spread over zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import PayloadError
from gradwire.kernels.checks import require, require_size
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.sparse import reference

__all__ = [
    "check_indices",
    "gather",
    "scatter_",
    "scatter_add_",
]

_indices_within = Kernel(reference.indices_within, "cpu")
_gather = Kernel(reference.gather, "cpu", "cuda")
_scatter_ = Kernel(reference.scatter_, "cpu", "cuda")
_scatter_add_ = Kernel(reference.scatter_add_, "cpu", "cuda")


def gather(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """x[indices], (k,) float32, in `out` where that is given.

    That the int32 indices lie within `x` is the caller's duty: `check_indices`.

    >>> gather(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2, 0], dtype=torch.int32))
    tensor([7., 5.])
    """
    require("x", x, torch.float32)
    require("indices", indices, torch.int32)
    if out is None:
        out = buffers.empty((indices.numel(),), torch.float32, x.device)
    require("out", out, torch.float32)
    require_size("out", out, indices.numel())
    _gather.on(x.device, indices.numel())(x, indices, out)
    return out


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """into[indices] += alpha * values, in order of `indices`, which may repeat.

    Args:
        into: (numel,), changed in place.
        indices: (k,) int32; that they lie within `into` is the caller's duty: see `check_indices`.
        values: (k,) of any floating dtype, taken to float32.
        alpha: rounded to float32.
        distinct: no index repeats, whatever came over the wire, so that any order will do, and several at once.

    >>> x = torch.zeros(3)
    >>> scatter_add_(x, torch.tensor([2, 2], dtype=torch.int32), torch.tensor([1.0, 2.0]), alpha=0.5)
    >>> x
    tensor([0.0000, 0.0000, 1.5000])
    """
    require("into", into, torch.float32)
    require("indices", indices, torch.int32)
    require_size("values", values, indices.numel())
    _scatter_add_.on(into.device, indices.numel())(into, indices, values.contiguous(), alpha, distinct)


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out = 0, and out[indices] += values, in order of `indices`. One pass where these increase, and a CPU does it.

    Args:
        out: (numel,), overwritten.
        indices: (k,) int32 in [0, numel], where numel is none; that they are is the caller's duty: see `check_indices`.
        values: (k,) of any floating dtype, taken to float32; 0 for those that are none.

    >>> x = torch.ones(3)
    >>> scatter_(x, torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, 0.0]))
    >>> x
    tensor([0., 2., 0.])
    """
    require("out", out, torch.float32)
    require("indices", indices, torch.int32)
    require_size("values", values, indices.numel())
    _scatter_.on(out.device, out.numel())(out, indices, values.contiguous())


def check_indices(indices: Tensor, numel: int) -> None:
    """Refuse indices from the wire that point outside. On other devices than the CPU nothing is read.

    Raises:
        PayloadError: an index outside [0, numel).

    >>> check_indices(torch.tensor([0, 2], dtype=torch.int32), 3)
    """
    require("indices", indices, torch.int32)
    if indices.device.type != "cpu":
        return
    if not _indices_within.on(indices.device, indices.numel())(indices, numel):
        raise PayloadError(
            f"an index of the payload lies outside [0, {numel}): it was damaged, or is of another tensor"
        )
