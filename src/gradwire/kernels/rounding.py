"""Functions that torch rounds by processor, as IEEE 754 rounds them: for what every rank computes alike."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.core import buffers


def square_root(x: Tensor) -> Tensor:
    """The square root of each element as IEEE 754 rounds it, a new tensor.

    On a CPU NumPy takes it: `torch.sqrt` is that of MKL, whose last bit depends on the processor (one element in 200 of
    float32, between AVX-512 and what IEEE 754 says; one in five without vector instructions).

    >>> import torch
    >>> square_root(torch.tensor([4.0, 2.0]))
    tensor([2.0000, 1.4142])
    """
    if x.device.type == "cpu":
        out = buffers.like(x)
        np.sqrt(x.numpy(), out=out.numpy())
        return out
    return x.sqrt()
