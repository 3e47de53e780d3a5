"""The kernels of low-rank methods on tensors without data: they allocate what has the right shape and do nothing else.

The reference does the same on such tensors by thousands of operations a call, which is what pricing a step would take.
"""

from __future__ import annotations

import torch
from torch import Tensor


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    """Allocate nothing: the result is written to `out`."""


def subtract_low_rank_(x: Tensor, Pt: Tensor, Qt: Tensor, scale: float) -> None:
    """Allocate nothing: the result is written to `x`."""


def project_columns(M: Tensor, Qt: Tensor) -> Tensor:
    return M.new_empty(M.shape[0], Qt.shape[1], M.shape[1])


def project_rows(Pt: Tensor, M: Tensor) -> Tensor:
    return M.new_empty(M.shape[0], Pt.shape[1], M.shape[2])


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[:2], dtype=torch.float64)


def orthonormalise(vectors: Tensor) -> Tensor:
    return torch.empty_like(vectors)
