"""A sparsifier followed by a quantiser of the values it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec, Float32Codec
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@runtime_checkable
class Sparsifier(Protocol):
    """A codec that keeps some values and can place them again."""

    def split(self, x: Tensor, key: Key) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the kept values and the tensors that place them."""
        ...

    def position_fields(self, numel: int) -> tuple[Field, ...]:
        """Return the fields of the tensors that place the values."""
        ...

    def unused_position_bytes(self, positions: Payload, numel: int) -> int:
        """Return how many bytes at the end of what places the values are zero by format."""
        ...

    def scatter(self, values: Tensor, positions: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """into[positions] += alpha * values."""
        ...

    def place(self, values: Tensor, positions: Payload, out: Tensor, key: Key) -> None:
        """out = 0 but out[positions] = values."""
        ...


@dataclass(frozen=True)
class Chain(Float32Codec):
    """`second` applied to the values that `first` keeps; both savings.

    A product of contractions: delta = delta_first * delta_second, since the quantiser loses only a part of what was
    kept. Error feedback sees what the whole chain decodes to.

    Args:
        first: a sparsifier (`TopK`, `RandomK`).
        second: a quantiser of flat values (`BlockInt`, `QSGD`, `Sign`, a cast).

    Raises:
        CompositionError: where `first` is no sparsifier or `second` is one; a `second` that loses nothing, or a `first`
            that would send values in another precision: both would change nothing.

    >>> from gradwire.codecs import BlockInt, TopK
    >>> Chain(TopK(0.01), BlockInt(8)).payload_bytes(100_000)  # 1000 bytes, 4 scales, 1080 bytes of indices
    2096
    """

    first: Codec
    second: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.first, Sparsifier):
            raise CompositionError(
                f"{self.first} does not sparsify, so nothing can be chained after it; write the sparsifier first, "
                "e.g. topk:0.01+int8"
            )
        if isinstance(self.second, Sparsifier):
            raise CompositionError(f"{self.second} sparsifies again: multiply the densities instead")
        if self.second.lossless:
            raise CompositionError(
                f"{self.second} sends the kept values as they are: leave it out, which does the same"
            )
        values = getattr(self.first, "values", "fp32")
        if values != "fp32":
            raise CompositionError(
                f"values={values} of {self.first} changes nothing, since {self.second} sends the values: leave it out"
            )

    @property
    def shows_non_finite(self) -> bool:
        """Where both parts do."""
        return self.first.shows_non_finite and self.second.shows_non_finite

    @property
    def keyed(self) -> bool:
        """Where a part is."""
        return self.first.keyed or self.second.keyed

    @property
    def unbiased(self) -> bool:
        """Where both parts are."""
        return self.first.unbiased and self.second.unbiased

    @property
    def granularity(self) -> int:
        """0: as the sparsifier's."""
        return 0

    @property
    def order_free(self) -> bool:  # type: ignore[override]
        """Where both parts are."""
        return self.first.order_free and self.second.order_free

    def _kept(self, numel: int) -> int:
        return self.first.layout(numel).fields[0].numel

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """The quantiser's fields, then what places the values."""
        assert isinstance(self.first, Sparsifier)
        return Layout(self.second.layout(self._kept(numel)).fields + self.first.position_fields(numel))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        assert isinstance(self.first, Sparsifier)
        values, positions = self.first.split(x, key)
        quantised = len(out) - len(positions)
        self.second.encode_into(values, _second(key), out[:quantised])
        for target, source in zip(out[quantised:], positions, strict=True):
            target.copy_(source)

    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        """Dequantise the kept values, then place them."""
        assert isinstance(self.first, Sparsifier)
        values, positions = self._dequantised(payload, out, key)
        self.first.place(values, positions, out, key)

    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """Dequantise the kept values, then scatter-add them."""
        assert isinstance(self.first, Sparsifier)
        values, positions = self._dequantised(payload, into, key)
        self.first.scatter(values, positions, into, key, alpha)

    def _dequantised(self, payload: Payload, like: Tensor, key: Key) -> tuple[Tensor, Payload]:
        """The kept values, and what places them."""
        assert isinstance(self.first, Sparsifier)
        quantised = len(payload) - len(self.first.position_fields(like.numel()))
        values = buffers.empty((self._kept(like.numel()),), torch.float32, like.device)
        self.second.decode_into(payload[:quantised], values, _second(key))
        return values, payload[quantised:]

    def used_bytes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """All but what the sparsifier leaves unused at the end of its positions."""
        assert isinstance(self.first, Sparsifier)
        positions = payload[len(payload) - len(self.first.position_fields(numel)) :]
        layout = self.layout(numel, dtype)
        unused = self.first.unused_position_bytes(positions, numel)
        return layout.offsets[-1] + layout.fields[-1].nbytes - unused if unused else layout.nbytes

    def contraction(self, numel: int) -> float | None:
        """The product of the parts' deltas."""
        first = self.first.contraction(numel)
        second = self.second.contraction(self._kept(numel))
        return None if first is None or second is None else first * second


def _second(key: Key) -> Key:
    """The quantiser's own key: rounding must not be correlated with the choice of coordinates."""
    return key.with_(stage=key.stage + "+")
