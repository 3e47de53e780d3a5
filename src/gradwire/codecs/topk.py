"""Top-k sparsification: the k entries of largest magnitude and where they stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.base import Codec, as_float32, decode_via_float32
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload

VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kept(density: float, numel: int) -> int:
    """k = min(d, max(1, round(density * d))), and 0 of an empty tensor.

    >>> kept(0.01, 1000), kept(0.01, 3), kept(0.5, 0)
    (10, 1, 0)
    """
    return min(numel, max(1, round(density * numel)))


def check_density(density: float) -> None:
    """Refuse a density outside (0, 1].

    Raises:
        CompositionError: naming the range.
    """
    if not 0.0 < density <= 1.0:
        raise CompositionError(
            f"density {density} is outside (0, 1]: it is the fraction of entries that are sent, e.g. 0.01 for 1%"
        )


@dataclass(frozen=True)
class TopK(Codec):
    """Keep the k = max(1, round(density * d)) entries of largest magnitude, exactly; ties go to the lowest index.

    A contraction with delta = k/d (Stich, Cordonnier & Jaggi 2018, "Sparsified SGD with memory", Lemma A.1).
    Biased, so it wants error feedback. Payload: k values, then k int32 indices in increasing order.

    Args:
        density: fraction of entries sent, in (0, 1].
        values: "fp32", "bf16" or "fp16", the precision of values on the wire.

    Raises:
        CompositionError: density outside (0, 1], or unknown values.

    References:
        Aji & Heafield 2017, "Sparse communication for distributed gradient descent"; Stich et al. 2018.

    >>> import torch
    >>> codec = TopK(0.5)
    >>> x = torch.tensor([1.0, -3.0, 0.5, 2.0])
    >>> codec.decode(codec.encode(x), x)
    tensor([ 0., -3.,  0.,  2.])
    """

    density: float = 0.01
    values: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.values not in VALUE_DTYPES:
            raise CompositionError(f"values {self.values!r} is none of {', '.join(VALUE_DTYPES)}")

    @property
    def shows_non_finite(self) -> bool:
        """True: NaN and infinity are the largest magnitudes of all, so one of them is kept."""
        return True

    @property
    def granularity(self) -> int:
        """0: the entries kept fall unevenly over shards."""
        return 0

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Values, then int32 indices."""
        k = kept(self.density, numel)
        return Layout((Field(VALUE_DTYPES[self.values], k), Field(torch.int32, k)))

    def split(self, x: Tensor, key: Key) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the kept values in float32 and the tensors that place them: what `Chain` builds on."""
        x32 = as_float32(x)
        indices = kernels.topk_indices(x32, kept(self.density, x.numel()))
        return kernels.gather(x32, indices), (indices,)

    def place_fields(self, numel: int) -> tuple[Field, ...]:
        """Fields of the tensors that place the values."""
        return (Field(torch.int32, kept(self.density, numel)),)

    def scatter(self, values: Tensor, place: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """into[place] += alpha * values, after checking the indices.

        Raises:
            PayloadError: an index outside the tensor.
        """
        kernels.check_indices(place[0], into.numel())
        kernels.scatter_add_(into, place[0], values, alpha)

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Select, then gather."""
        values, (indices,) = self.split(x, key)
        out[0].copy_(values)
        out[1].copy_(indices)

    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        """Zero but where the payload speaks."""
        out32 = decode_via_float32(out)
        self.accumulate(payload, out32.zero_(), key)
        if out32 is not out:
            out.copy_(out32)

    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        """Scatter-add: O(k)."""
        if into.dtype != torch.float32:
            super().accumulate(payload, into, key, alpha)
            return
        self.scatter(payload[0].float(), payload[1:], into, key, alpha)

    def contraction(self, numel: int) -> float | None:
        """k / d; rounded values take their share."""
        share = kept(self.density, numel) / numel if numel else 1.0
        # A value in half precision may vanish (fp16 below 6e-8), so fp16 promises nothing.
        return {"fp32": share, "bf16": share * (1 - 2.0**-16), "fp16": None}[self.values]

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"density": self.density, "values": self.values}
