"""Memory that is used again: what is fresh from the system is filled page by page, which takes as long as coding.

A page of 4 KiB costs about 2 us, so a mean in fresh memory costs 2 ns an element, where `powersgd:8` needs 2 ns for
the rest (`benchmarks/large_model.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 2
"""Buffers that are kept at most: each is as large as the largest grain, and one grain's mean is made at a time."""


class Spare:
    """Buffers on a CPU that nobody uses any more; on a GPU PyTorch keeps them itself.

    >>> spare = Spare()
    >>> mean = spare.empty(1000, torch.float32, torch.device("cpu"))
    >>> before = mean.data_ptr()
    >>> spare.give(mean)
    >>> spare.empty(500, torch.float32, torch.device("cpu")).data_ptr() == before
    True
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @torch.inference_mode(False)  # else no step outside of it could write there
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for so many elements, 1-d, whose values are not set.

        Args:
            numel: how many.
            dtype: of the tensor.
            device: where it is.
        """
        nbytes = numel * dtype.itemsize
        for place, buffer in enumerate(self._buffers):
            if buffer.numel() >= nbytes and device.type == "cpu":
                del self._buffers[place]
                return buffer[:nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    @torch.inference_mode(False)
    def give(self, memory: Tensor) -> None:
        """Take memory that nobody reads or writes any more.

        Args:
            memory: what `empty` returned, or any tensor whose whole storage is free.
        """
        if memory.device.type != "cpu" or not memory.numel():
            return
        storage = memory.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        self._buffers = sorted([*self._buffers, whole], key=Tensor.numel)[-KEPT:]
