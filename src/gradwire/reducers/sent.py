"""What the other side decodes of a rank's contribution, for exchanges: a payload's values, or all of the tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.core.key import Key
from gradwire.core.payload import Payload


@dataclass(frozen=True, eq=False)
class SentPayload:
    """A payload of the whole tensor, scaled."""

    codec: Codec
    payload: Payload
    key: Key
    scale: float = 1.0

    def subtract_from(self, x: Tensor) -> None:
        """x -= scale * decode(payload)."""
        self.codec.accumulate(self.payload, x.view(-1), self.key, alpha=-self.scale)


@dataclass(frozen=True, eq=False)
class SentAll:
    """A tensor that was sent without loss."""

    def subtract_from(self, x: Tensor) -> None:
        """Set x to zero: all of it was sent."""
        x.zero_()
