"""What FSDP2 is given in place of its own collectives. It asks for memory, then for the collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Reduce = Callable[[Tensor, Tensor, Any], None]
"""Writes the first tensor, this rank's shard, from the second, rows of all ranks; the third is the operation."""

Gather = Callable[[Tensor, Tensor, Any], None]
"""Writes the first tensor, all ranks' rows, from the second, this rank's; the third is the process group."""


class _Comm:
    """Buffers come from PyTorch's allocator."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class GradientScatter(_Comm):
    """A `ReduceScatter` of FSDP2. It ends inside the call, since FSDP2 does not look at what is returned."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce, and keep this rank's shard."""
        self._reduce(output_tensor, input_tensor, op)


class ParameterGather(_Comm):
    """An `AllGather` of FSDP2. It ends inside the call."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather all ranks' shards."""
        self._gather(output_tensor, input_tensor, group)
