"""Random-k sparsification with coordinates all ranks draw alike: no indices travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32
from gradwire.codecs.topk import check_density, kept
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.kernels.indices import require_reach


@dataclass(frozen=True)
class RandomK(Float32Codec):
    """Keep k = max(1, round(density * d)) coordinates drawn with a shared key: one of each of k runs of neighbours.

    All ranks draw the same coordinates, so payloads are additive and carry values only, in the order of coordinates.
    Where it deviates: the paper's rand_k draws all sets of k alike, and each rank draws for itself. Here each
    coordinate is drawn with probability k/d, which is all that is asked for by the proof that it is, unscaled, a
    contraction with delta = k/d in expectation (Stich et al. 2018, Lemma A.1); with `scaled=True` values are scaled by
    d/k, which is unbiased with variance d/k - 1 and must not be wrapped in error feedback. Runs
    (`gradwire.kernels.stratified_indices`) make choosing and placing one pass over memory each.

    Args:
        density: fraction of entries sent, in (0, 1].
        scaled: whether to multiply by d/k, which makes it unbiased.

    Raises:
        CompositionError: density outside (0, 1].

    References:
        Stich, Cordonnier & Jaggi 2018, "Sparsified SGD with memory".

    >>> RandomK(0.1).payload_bytes(1000)
    400
    """

    density: float = 0.1
    scaled: bool = False

    additive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def keyed(self) -> bool:
        """True: the coordinates are drawn."""
        return True

    @property
    def unbiased(self) -> bool:
        """Only where scaled by d/k."""
        return self.scaled

    @property
    def granularity(self) -> int:
        """0: coordinates fall unevenly over shards."""
        return 0

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        require_reach(numel)
        return Layout((Field(torch.float32, kept(self.density, numel)),))

    def _indices(self, numel: int, key: Key, device: torch.device) -> Tensor:
        return kernels.stratified_indices(key.shared.stream_seed, numel, kept(self.density, numel), device)

    def split(self, x: Tensor, key: Key) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the kept values in float32; nothing is needed to place them but the key."""
        values = kernels.gather(as_float32(x), self._indices(x.numel(), key, x.device))
        return values.mul_(self._scale(x.numel())) if self.scaled else values, ()

    def _scale(self, numel: int) -> float:
        return numel / kept(self.density, numel) if numel else 1.0

    def position_fields(self, numel: int) -> tuple[Field, ...]:
        """None: the key says where."""
        return ()

    def unused_position_bytes(self, positions: Payload, numel: int) -> int:
        """Nothing: no bytes place the values."""
        return 0

    def scatter(self, values: Tensor, positions: Payload, into: Tensor, key: Key, alpha: float) -> None:
        """into[coordinates of the key] += alpha * values."""
        kernels.scatter_add_(into, self._indices(into.numel(), key, into.device), values, alpha, distinct=True)

    def place(self, values: Tensor, positions: Payload, out: Tensor, key: Key) -> None:
        """out = 0 but out[coordinates of the key] = values."""
        kernels.scatter_(out, self._indices(out.numel(), key, out.device), values)

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.gather(as_float32(x), self._indices(x.numel(), key, x.device), out[0])
        if self.scaled:
            out[0].mul_(self._scale(x.numel()))

    def encode_divided_into(self, x: Tensor, divisor: int, key: Key, out: Payload) -> None:
        """Divide only what is kept."""
        self.encode_into(x, key, out)
        out[0].div_(divisor)

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        self.place(payload[0], (), out, key)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        self.scatter(payload[0], (), into, key, alpha)

    def contraction(self, numel: int) -> float | None:
        """k / d, unless scaled."""
        if self.scaled:
            return None
        return kept(self.density, numel) / numel if numel else 1.0
