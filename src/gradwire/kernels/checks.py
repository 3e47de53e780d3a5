"""What the contracts of kernels refuse: tensors that a kernel would misread, or read and write out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core.errors import PayloadError


def require(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse what a kernel would misread.

    Raises:
        TypeError: another dtype.
        ValueError: not 1-d and contiguous.
    """
    if tensor.dtype != dtype:
        hint = "; convert float16, bfloat16 and float64 with .float() first" if dtype == torch.float32 else ""
        raise TypeError(f"{name} is {tensor.dtype}, and kernels take {dtype} only{hint}")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; kernels take 1-d "
            "contiguous tensors, so pass .contiguous().view(-1)"
        )


def require_size(name: str, tensor: Tensor, numel: int) -> None:
    """Refuse a wire of another size, which would be read or written out of bounds.

    Raises:
        PayloadError: naming both sizes.
    """
    if tensor.numel() != numel:
        raise PayloadError(f"{name} has {tensor.numel()} elements where {numel} are needed")


def require_range(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number out of range: ValueError."""
    if not low <= value <= high:
        raise ValueError(f"{name} {value} is outside {low} to {high}")
