"""The first factors of PowerSGD, as PyTorch's hook draws them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.core.grain import ParameterSpec


def initial_factors(
    specs: Sequence[ParameterSpec], generator: torch.Generator, rank: int, min_compression_rate: float, together: bool
) -> dict[str, Tensor]:
    """Q of every matrix of a bucket that PyTorch would compress, drawn as PyTorch draws: shape by shape.

    The generator starts where PyTorch's global one is after `manual_seed`, so the numbers are the same. They need not
    be orthonormal: P is made so, and depends on the span of Q alone.
    """
    by_shape: dict[tuple[int, int, int], list[ParameterSpec]] = {}
    for spec in specs:
        rows, columns = spec.matrix_shape
        r = min(rows, columns, rank)
        if (rows + columns) * r * min_compression_rate < rows * columns:
            by_shape.setdefault((rows, columns, r), []).append(spec)
    Q: dict[str, Tensor] = {}
    for (_, columns, r), group in by_shape.items():
        for drawn in [group] if together else [[spec] for spec in group]:
            factors = torch.randn((len(drawn), columns, r), generator=generator, dtype=group[0].dtype).float()
            Q.update(zip((spec.name for spec in drawn), factors, strict=True))
    return Q
