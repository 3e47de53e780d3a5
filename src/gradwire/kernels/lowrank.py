"""Kernels of low-rank methods and sketches; see the package's text for what all kernels share."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import reference_lowrank

__all__ = ["unit_rows_"]


def _module(device: torch.device) -> ModuleType:
    if device.type != "cpu" or kernels._cpu_kernels() is None:  # pyright: ignore[reportPrivateUsage]
        return reference_lowrank
    from gradwire.kernels import cpu_lowrank

    return cpu_lowrank


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
