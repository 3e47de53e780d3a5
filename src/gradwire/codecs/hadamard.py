"""A subsampled randomised Hadamard transform: random projections of a flat tensor without a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.codecs.topk import check_density, kept
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class Hadamard(Float32Codec):
    """Project each block of N elements on k random rows of an orthonormal basis: y = (H D x)[rows] / sqrt(N).

    H is the Hadamard matrix, D random signs, and rows k of N drawn without replacement, all from a key that ranks share
    and that changes each step; every block has signs of its own. Decodes to D H^T y / sqrt(N): a projection, hence a
    contraction with delta = k / N in expectation. Linear, so payloads ride an all-reduce and carry numbers only.

    Where it deviates: Tropp's transform is scaled up by sqrt(N / k), which makes it unbiased, and this one is not,
    which makes it a projection. Random-k keeps as much in expectation, but all or nothing of each entry. Here each
    entry is seen a little in every step, and one large entry cannot be missed: the error of a block hardly depends on
    the draw. It costs log2(N) additions an element, and never a matrix.

    Args:
        density: fraction of numbers sent, in (0, 1].
        block: N, a power of two from 8 to 65536; smaller tensors are one block of the power of two that holds them.

    Raises:
        CompositionError: density or block out of range.

    References:
        Ailon & Chazelle 2009, "The fast Johnson-Lindenstrauss transform"; Tropp 2011, "Improved analysis of the
        subsampled randomized Hadamard transform", equation 1.1, here without the factor that makes it unbiased.

    >>> Hadamard(0.125).payload_bytes(8192)
    4096
    """

    density: float = 0.1
    block: int = 1024

    additive: ClassVar[bool] = True
    mixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 8 <= self.block <= 65536 or self.block & (self.block - 1):
            raise CompositionError(f"block {self.block} is no power of two from 8 to 65536")

    @property
    def keyed(self) -> bool:
        """True: signs and rows are drawn."""
        return True

    @property
    def granularity(self) -> int:
        """0: signs depend on where a block stands."""
        return 0

    def _block(self, numel: int) -> int:
        return min(self.block, 1 << max(0, numel - 1).bit_length())

    def _rows(self, numel: int, key: Key, device: torch.device) -> Tensor:
        block = self._block(numel)
        return kernels.permuted_indices(key.shared.stream_seed, block, kept(self.density, block), device)

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """k float32 numbers a block."""
        block = self._block(numel)
        return Layout((Field(torch.float32, -(-numel // block) * kept(self.density, block)),))

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Transform block by block."""
        numel = x.numel()
        rows = self._rows(numel, key, x.device)
        kernels.hadamard_encode(as_float32(x), self._block(numel), key.shared.stream_seed, rows, out[0])

    def encode_divided_into(self, x: Tensor, divisor: int, key: Key, out: Payload) -> None:
        """Divide only what is kept."""
        self.encode_into(x, key, out)
        out[0].div_(divisor)

    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """Transform back and add."""
        numel = into.numel()
        rows = self._rows(numel, key, into.device)
        kernels.hadamard_accumulate(payload[0], self._block(numel), key.shared.stream_seed, rows, into, alpha)

    def contraction(self, numel: int) -> float | None:
        """k / N, less what the transforms round away."""
        block = self._block(numel)
        return kept(self.density, block) / block * (1 - 2.0**-16)
