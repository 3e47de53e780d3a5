"""What memories need: scaled additions that are never fused, and bfloat16 rounded at random."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.memory import reference

__all__ = [
    "add_bf16_",
    "add_scaled_",
    "round_bf16",
]

_add_scaled_ = Kernel(reference.add_scaled_, "cpu")
_add_bf16_ = Kernel(reference.add_bf16_, "cpu")
_round_bf16 = Kernel(reference.round_bf16, "cpu")


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
    _add_bf16_.on(x.device, x.numel())(x, r, alpha)


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
        into.add_(buffers.as_dtype(x, into.dtype), alpha=alpha)
        return
    simple = into.dtype == x.dtype == torch.float32 and into.is_contiguous() and x.is_contiguous()
    add = _add_scaled_.on(into.device, into.numel()) if simple else reference.add_scaled_
    add(into, x, alpha)


def round_bf16(x: Tensor, seed: int, out: Tensor) -> None:
    """Round stochastically to bfloat16: up, away from zero, with a chance of the part that is cut. Unbiased.

    With m_i the bits of x_i as an integer and u = `random.reference.uniform(seed)`: (m_i + floor(2^16 u_i)) >> 16. What
    would overflow is cut instead; infinity and NaN stay so.

    Args:
        x: (numel,) float32.
        seed: the key.
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
    _round_bf16.on(x.device, x.numel())(x, seed, out)


def _require_half(x: Tensor, half: Tensor) -> None:
    if (x.dtype, half.dtype) != (torch.float32, torch.bfloat16):
        raise TypeError(f"tensors of {x.dtype} and {half.dtype}: pass float32 and bfloat16")
    if x.ndim != 1 or x.shape != half.shape or not (x.is_contiguous() and half.is_contiguous()):
        raise ValueError(f"tensors of {tuple(x.shape)} and {tuple(half.shape)}: pass 1-d contiguous ones of one size")
