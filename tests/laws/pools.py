"""Pools of memory that laws put in the place of the process's own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.buffers import BufferPool


class PoisonedPool(BufferPool):
    """Overwrites what it is about to give with ones, which are NaN as floats."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in which all bits are set."""
        found = super().empty(shape, dtype)
        found.view(-1).view(torch.uint8).fill_(0xFF)
        return found


class FreshPool(BufferPool):
    """Keeps nothing, so that all that is asked for is seen to be allocated."""

    @torch.inference_mode(False)
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory."""
        return torch.empty(shape, dtype=dtype)


@contextmanager
def nothing_is_used_again() -> Generator[None]:
    """Have all memory that is asked for allocated, where it can be counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "POOL", FreshPool())
        yield
