"""An unbiased codec made a contraction, so that error feedback may go around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.core.payload import Layout, Payload


@dataclass(frozen=True)
class Scaled(Codec):
    """C(x) / (1 + omega), for an unbiased C with E||C(x) - x||^2 <= omega ||x||^2.

    Unbiased C lets a residual grow without bound once omega >= 1. Scaled down it is a contraction:

        E||C(x)/(1 + omega) - x||^2 = E||C(x)||^2 / (1 + omega)^2 - 2 ||x||^2 / (1 + omega) + ||x||^2
                                   <= (1 - 1/(1 + omega)) ||x||^2,     so delta = 1 / (1 + omega)

    (Beznosikov et al. 2020, "On biased compression for distributed learning"). The wire is the codec's: what
    arrives is multiplied. Written `ef=on` behind the codec, as in `qsgd:15,ef=on`.

    Args:
        codec: an unbiased codec that declares `omega`.

    Raises:
        CompositionError: a codec that does not.

    >>> from gradwire.codecs import QSGD
    >>> round(Scaled(QSGD(15)).contraction(10_000), 2)  # omega = sqrt(512) / 15
    0.4
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not self.codec.unbiased or self.codec.omega() is None:
            raise CompositionError(
                f"{self.codec} is not unbiased with a bounded variance: there is nothing to scale by"
            )

    @property
    def factor(self) -> float:
        """1 / (1 + omega)."""
        omega = self.codec.omega()
        assert omega is not None
        return 1.0 / (1.0 + omega)

    @property
    @override
    def keyed(self) -> bool:
        return self.codec.keyed

    @property
    @override
    def granularity(self) -> int:
        return self.codec.granularity

    @property
    def order_free(self) -> bool:  # type: ignore[override]
        """Whether the inner codec is."""
        return self.codec.order_free

    @override
    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        return self.codec.layout(numel, dtype)

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        self.codec.encode_into(x, key, out)

    @override
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        self.codec.decode_into(payload, out, key)
        out.mul_(self.factor)

    @override
    def accumulate(self, payload: Payload, into: Tensor, key: Key, alpha: float = 1.0) -> None:
        self.codec.accumulate(payload, into, key, alpha * self.factor)

    def contraction(self, numel: int) -> float | None:
        """1 / (1 + omega)."""
        return self.factor


def contracting(codec: Codec) -> Codec:
    """An unbiased codec that is no contraction, scaled to one; any other codec as it is.

    >>> from gradwire.codecs import QSGD, TopK
    >>> contracting(QSGD(15)), contracting(TopK(0.5))
    (Scaled(codec=QSGD(levels=15, block=512)), TopK(density=0.5, values='fp32', indices='auto'))
    """
    return Scaled(codec) if codec.contraction(1) is None and codec.omega() is not None else codec
