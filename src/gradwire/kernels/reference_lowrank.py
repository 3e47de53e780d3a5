"""What the low-rank and sketching kernels do, in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.reference import uniform


def unit_rows_(Q: Tensor, bits: int) -> None:
    """Scale by the power of two that brings a row's largest magnitude to [1, 2); redraw rows of zeros."""
    largest = Q.abs().amax(1, keepdim=True)
    exponent = largest.view(torch.int32) >> 23
    scale = ((254 - exponent).clamp(1, 254) << 23).view(torch.float32)
    fresh = uniform(bits, Q.numel(), Q.device).view(Q.shape) * 2 - 1
    Q.copy_(torch.where(largest == 0, fresh, Q * scale))
