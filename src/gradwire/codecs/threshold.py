"""Hard-threshold sparsification: every entry of at least a given magnitude, as many as there is room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.codecs.topk import check_density, kept
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.kernels import indices as index_coding


@dataclass(frozen=True)
class Threshold(Float32Codec):
    """Keep the entries with |x| >= tau; where more than cap * d are that large, the cap * d largest of them.

    The number of these entries is not known beforehand, and both sides of a collective must know a payload's size. So
    it has room for k = max(1, round(cap * d)) entries: indices as a `rice` stream, which says how many it holds, then
    that many values, then zeros, which a channel may leave out (`used_bytes`). Entries that do not fit are left to
    error feedback, as those below tau are: what is left is below tau everywhere, or, where the payload is full, the
    whole was a contraction with delta = k/d. Finding the entries is one reading pass where they fit.

    Where it deviates: Strom 2015 sends +tau or -tau for an entry, in one word with its index, and keeps the rest of it;
    here its value is sent, as by the hard threshold of Sahu et al. 2021, who have no cap.

    Args:
        tau: the least magnitude sent, at least 0, in the units of what is reduced: under loss scaling, scaled ones.
        cap: the largest fraction of entries sent, in (0, 1].

    Raises:
        CompositionError: tau negative or not finite, cap outside (0, 1].

    References:
        Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing"; Sahu et al. 2021,
        "Rethinking gradient sparsification as total error minimization", on absolute compressors.

    >>> import torch
    >>> x = torch.tensor([1.0, -3.0, 0.5, 2.0])
    >>> codec = Threshold(1.5, cap=0.5)
    >>> codec.decode(codec.encode(x), x)
    tensor([ 0., -3.,  0.,  2.])
    """

    tau: float = 0.001
    cap: float = 0.05

    def __post_init__(self) -> None:
        check_density(self.cap)
        if not 0.0 <= self.tau < math.inf:
            raise CompositionError(f"tau {self.tau} is no magnitude: it must be 0 or more, and finite")

    @property
    def granularity(self) -> int:
        """0: the entries kept fall unevenly over shards."""
        return 0

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        k = kept(self.cap, numel)
        return Layout((index_coding.field("rice", numel, k), Field(torch.float32, k)))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        self.encode_above(x, torch.full((), self.tau, dtype=torch.float32, device=x.device), out)

    def encode_above(self, x: Tensor, tau: Tensor, out: Payload) -> None:
        """Write the entries of at least `tau`, a 0-d float32 tensor: for thresholds that change."""
        x32 = as_float32(x)
        indices = kernels.at_least(x32, tau, out[1])
        index_coding.encode(indices, x.numel(), "rice", out[0], room=out[1].numel())

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        indices = index_coding.decode(payload[0], out.numel(), payload[1].numel(), "rice", fewer=True)
        kernels.scatter_(out, indices, payload[1][: indices.numel()])

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        if not into.numel():
            return
        indices = index_coding.decode(payload[0], into.numel(), payload[1].numel(), "rice", fewer=True)
        values = payload[1][: indices.numel()]
        if into.device.type != "cpu":  # positions without an entry add zero to the last entry, and nothing is read
            values = values.masked_fill(indices == into.numel(), 0.0)
            indices.clamp_(max=into.numel() - 1)
        kernels.scatter_add_(into, indices, values, alpha, distinct=into.device.type == "cpu")

    @override
    def absolute_error(self, numel: int) -> float | None:
        return self.tau

    def used_bytes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Up to the last value that stands for an entry."""
        layout = self.layout(numel, dtype)
        if not numel:
            return layout.nbytes
        return min(layout.nbytes, layout.offsets[1] + 4 * index_coding.held(payload[0]))
