"""Transforms in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.random.reference import uniform
from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN, magnitude_bits


def topk_rows(x: Tensor, k: int, values: Tensor, codes: Tensor) -> None:
    """The k largest magnitudes of every row, in the order of their columns; ties go to the lowest."""
    magnitudes = magnitude_bits(x).clamp(max=CANONICAL_NAN)
    chosen = magnitudes.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    values.view(-1, k).copy_(x.gather(1, chosen))
    codes.view(-1, k).copy_(chosen)


def combine_rows(values: Tensor, codes: Tensor, basis: Tensor, out: Tensor) -> None:
    """Each row a sum of rows of the basis, term by term."""
    k = values.numel() // max(1, out.shape[0])
    v, c = values.view(out.shape[0], k), codes.view(out.shape[0], k).long()
    out.zero_()
    for j in range(k):
        out.add_(v[:, j : j + 1] * basis[c[:, j]])


def _signs(seed: int, numel: int, device: torch.device) -> Tensor:
    """1 where uniform(seed) is below a half, else -1."""
    return torch.where(uniform(seed, numel, device) < 0.5, 1.0, -1.0)


def _hadamard(x: Tensor) -> Tensor:
    """Each row times the Hadamard matrix of its size in Sylvester's order, not normalised."""
    rows, size = x.shape
    half = 1
    while half < size:
        a, b = x.view(rows, -1, 2, half).unbind(2)
        x = torch.stack([a + b, a - b], dim=2)
        half *= 2
    return x.view(rows, size)


def hadamard_encode(x: Tensor, block: int, seed: int, chosen: Tensor, out: Tensor) -> None:
    """Signs, transform, scale, select."""
    signed = pad(x * _signs(seed, x.numel(), x.device), (0, -x.numel() % block)).view(-1, block)
    out.view(signed.shape[0], chosen.numel()).copy_(_hadamard(signed)[:, chosen.long()] * block**-0.5)


def hadamard_accumulate(values: Tensor, block: int, seed: int, chosen: Tensor, into: Tensor, alpha: float) -> None:
    """Place, transform, scale, signs."""
    spread = torch.zeros(-(-into.numel() // block), block, dtype=torch.float32, device=into.device)
    spread[:, chosen.long()] = values.view(spread.shape[0], chosen.numel())
    signed = (_hadamard(spread) * block**-0.5).view(-1)[: into.numel()] * _signs(seed, into.numel(), into.device)
    into.add_(signed * alpha)
