"""Feed-forward experts: those of one rank, stacked."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.moe.routers import normal

Activation = Literal["gelu", "swiglu"]


class Experts(nn.Module):
    """The experts of this rank: expert e of E belongs to rank e // (E / n) of the axis.

        y = f(x W_in) W_out,    f = gelu, or swiglu: f([a, b]) = silu(a) b

    Their initial weights depend on the number of the expert, and not on how many ranks there are.

    Args:
        hidden: elements of a token, H.
        inner: elements between the two matrices, F.
        experts: of all ranks, E.
        axis: the ranks.
        activation: "gelu" or "swiglu".
        grouped: whether the products of all experts are one call of `torch.nn.functional.grouped_mm`. None: where it
            serves the tensors: fp32 and bf16 with rows of a multiple of 16 bytes.
        seed: of the weights, the same on every rank.

    Attributes:
        w_in: (E / n, H, F), or (E / n, H, 2 F) for swiglu.
        w_out: (E / n, F, H).

    Raises:
        CompositionError: experts that the ranks do not divide; another activation.

    >>> experts = Experts(8, 16, 4, ExchangeAxis())
    >>> experts(torch.ones(5, 8), (2, 0, 3, 0)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        axis: ExchangeAxis,
        *,
        activation: Activation = "gelu",
        grouped: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if experts < 1 or experts % axis.size:
            raise CompositionError(f"{experts} experts do not divide among {axis.size} ranks: take a multiple of them")
        if activation not in ("gelu", "swiglu"):
            raise CompositionError(f"activation {activation!r} is unknown: use 'gelu' or 'swiglu'")
        self.experts, self.local = experts, experts // axis.size
        self.activation, self.grouped = activation, grouped
        wide = inner * (2 if activation == "swiglu" else 1)
        mine = range(axis.place * self.local, (axis.place + 1) * self.local)
        into = [normal((hidden, wide), hidden**-0.5, Key(seed, name=f"expert {e} in")) for e in mine]
        out = [normal((inner, hidden), inner**-0.5, Key(seed, name=f"expert {e} out")) for e in mine]
        self.w_in, self.w_out = nn.Parameter(torch.stack(into)), nn.Parameter(torch.stack(out))

    def forward(self, x: Tensor, counts: tuple[int, ...], first: int = 0) -> Tensor:
        """Apply experts to the rows that are theirs.

        Args:
            x: (rows, H), the rows of each expert end to end.
            counts: rows of each expert.
            first: the expert of this rank that the first count is of.
        """
        w_in, w_out = (w[first : first + len(counts)].to(x.dtype) for w in (self.w_in, self.w_out))
        if self.grouped or (self.grouped is None and _can_be_grouped(x, w_in, w_out)):
            ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
            return functional.grouped_mm(self._activated(functional.grouped_mm(x, w_in, offs=ends)), w_out, offs=ends)
        rows = zip(x.split(counts), w_in, w_out, strict=True)
        return torch.cat([self._activated(piece @ into) @ out for piece, into, out in rows])

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "gelu":
            return functional.gelu(x)
        a, b = x.chunk(2, dim=-1)
        return functional.silu(a) * b


def _can_be_grouped(*tensors: Tensor) -> bool:
    """What `grouped_mm` takes: it lacks fp64, and wants every row to begin at a multiple of 16 bytes."""
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.bfloat16) and all(t.shape[-1] * dtype.itemsize % 16 == 0 for t in tensors)
