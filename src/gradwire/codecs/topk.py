"""Top-k sparsification: the k entries of largest magnitude and where they stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.kernels import indices as index_coding

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


def check_indices_format(name: str) -> None:
    """Refuse a format of indices that there is none of.

    Raises:
        CompositionError: naming those there are.
    """
    if name not in index_coding.FORMATS:
        raise CompositionError(f"indices {name!r} is none of {', '.join(index_coding.FORMATS)}")


@dataclass(frozen=True)
class TopK(Float32Codec):
    """Keep the k = max(1, round(density * d)) entries of largest magnitude, exactly; ties go to the lowest index.

    A contraction with delta = k/d (Stich, Cordonnier & Jaggi 2018, "Sparsified SGD with memory", Lemma A.1). Biased, so
    it wants error feedback. Where it deviates from gradient dropping (Aji & Heafield 2017, Algorithm 1): they estimate
    a threshold from a sample of the gradient; here exactly k entries of each grain are sent. Payload: k values, then
    their k indices, coded as `gradwire.kernels.indices` says: 8.6 bits an index at a density of 1%, where the entropy
    of the positions is 8.1 bits and int32 takes 32. The payload's size depends on d alone; `used_bytes` says how much
    of it a channel must carry.

    Args:
        density: fraction of entries sent, in (0, 1].
        values: "fp32", "bf16" or "fp16", the precision of values on the wire.
        indices: "auto", "int32", "elias-fano", "rice" or "bitmap".

    Raises:
        CompositionError: density outside (0, 1], unknown values or indices.

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
    indices: index_coding.Format = "auto"

    def __post_init__(self) -> None:
        check_density(self.density)
        check_indices_format(self.indices)
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

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout((Field(VALUE_DTYPES[self.values], kept(self.density, numel)), *self.position_fields(numel)))

    def position_fields(self, numel: int) -> tuple[Field, ...]:
        """Fields of the tensors that place the values."""
        return (index_coding.field(self.indices, numel, kept(self.density, numel)),)

    def select(self, x32: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the entries kept, (k,) int32, increasing, and these entries, (k,) float32."""
        return kernels.topk(x32, kept(self.density, x32.numel()))

    def split(self, x: Tensor, key: Key) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the kept values in float32 and the tensors that place them: what `Chain` builds on."""
        x32 = as_float32(x)
        indices, values = self.select(x32)
        (field,) = self.position_fields(x.numel())
        positions = buffers.empty((field.numel,), field.dtype, x.device)
        index_coding.encode(indices, x.numel(), self.indices, positions)
        return values, (positions,)

    def scatter(self, values: Tensor, positions: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """into[positions] += alpha * values, after checking the indices.

        Raises:
            PayloadError: indices that are damaged, or an index outside the tensor.
        """
        kernels.scatter_add_(into, self._indices(positions, into.numel(), values.numel()), values, alpha, distinct=True)

    def place(self, values: Tensor, positions: Payload, out: Tensor, key: Key) -> None:
        """out = 0 but out[positions] = values. Raises as `scatter`."""
        kernels.scatter_(out, self._indices(positions, out.numel(), values.numel()), values)

    def _indices(self, positions: Payload, numel: int, count: int) -> Tensor:
        return index_coding.decode(positions[0], numel, count, self.indices)

    def unused_position_bytes(self, positions: Payload, numel: int) -> int:
        """What the indices leave unused of their capacity."""
        return positions[0].nbytes - index_coding.used_nbytes(
            positions[0], numel, kept(self.density, numel), self.indices
        )

    def used_bytes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Up to the end of the indices' used part."""
        unused = self.unused_position_bytes(payload[1:], numel)
        layout = self.layout(numel, dtype)
        return layout.offsets[1] + layout.fields[1].nbytes - unused if unused else layout.nbytes

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Select, gather, code the indices."""
        x32 = as_float32(x)
        indices, _ = kernels.topk(x32, out[0].numel(), out[0])
        index_coding.encode(indices, x.numel(), self.indices, out[1])

    def encode_keeping_into(self, x: Tensor, key: Key, out: Payload) -> None:
        """Select, then take what is sent out of `x`: the indices need not be decoded again."""
        if x.dtype != torch.float32:
            super().encode_keeping_into(x, key, out)
            return
        indices = buffers.empty(out[0].shape, torch.int32, x.device)
        kernels.topk_encode_keeping(x, out[0], indices)
        index_coding.encode(indices, x.numel(), self.indices, out[1])

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        self.place(buffers.as_dtype(payload[0], torch.float32), payload[1:], out, key)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        self.scatter(buffers.as_dtype(payload[0], torch.float32), payload[1:], into, key, alpha)

    def contraction(self, numel: int) -> float | None:
        """k / d; rounded values take their share."""
        share = kept(self.density, numel) / numel if numel else 1.0
        # A value in half precision may vanish (fp16 below 6e-8), so fp16 promises nothing.
        return {"fp32": share, "bf16": share * (1 - 2.0**-16), "fp16": None}[self.values]
