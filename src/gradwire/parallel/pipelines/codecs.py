"""Which codec codes the activations between two stages, and which their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import BF16, BlockInt, Codec, Identity
from gradwire.codecs.base import payload_share
from gradwire.composition import Composition
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.spoken import called

_FEW_BITS = 0.15
"""Payloads below this share of float32, about 5 bits an element, go with gradients of 8 bits."""

_HALF = 0.5
"""The share of a 16-bit payload."""


@dataclass(frozen=True)
class StageCodecs:
    """The codecs of what travels between the stages of a pipeline.

    Args:
        activations: from a stage to the next one.
        gradients: of these activations, from a stage to the one before. Gradients stand less than activations do, so
            they must not be sent in fewer bytes.

    Raises:
        CompositionError: gradients in fewer bytes than activations.

    References:
        Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Quantization with
        Guarantees" (AQ-SGD), whose experiments give gradients twice the bits of activations.

    >>> StageCodecs.of("int4")
    StageCodecs(activations=BlockInt(bits=4, block=256, stochastic=False), \
gradients=BlockInt(bits=8, block=256, stochastic=False))
    >>> StageCodecs.of("int8").gradients
    BF16()
    """

    activations: Codec
    gradients: Codec

    def __post_init__(self) -> None:
        if payload_share(self.gradients) < payload_share(self.activations):
            raise CompositionError(
                f"gradients by {self.gradients} and activations by {self.activations}: gradients between stages stand "
                "less than activations do, so give them a codec of at least as many bytes, or leave it out"
            )

    @classmethod
    def of(cls, activations: str | Codec, gradients: str | Codec | None = None) -> StageCodecs:
        """Return the codecs that two specs name.

        Args:
            activations: a spec such as "int8", or a codec.
            gradients: likewise; None takes `milder(activations)`.

        Raises:
            SpecError, CompositionError: as `stage_codec`, and as the class.
        """
        forward = stage_codec(activations)
        return cls(forward, milder(forward) if gradients is None else stage_codec(gradients))


def stage_codec(given: str | Codec) -> Codec:
    """Return the codec that a spec names, for one tensor that is sent once.

    Raises:
        SpecError: a method that is more than a codec, or an option that belongs to exchanges of gradients.

    >>> stage_codec("none"), stage_codec("fp8")
    (Identity(), FP8(format='e4m3', block=256))
    """
    if isinstance(given, Codec):
        return given
    composition = Composition.read(given)
    if "ef" in composition.common:
        raise SpecError(
            f"ef in {given!r}: between stages a residual is that of other samples, and so it is noise; leave it out, "
            "or pass memory=, which keeps what was sent of each sample"
        )
    if composition.common:
        raise SpecError(
            f"{next(iter(composition.common))} in {given!r} belongs to exchanges of gradients: leave it out"
        )
    return called(composition.codec(), given)


def milder(codec: Codec) -> Codec:
    """Return the codec for the gradients of what `codec` codes: about twice the bits, and at most 16.

    >>> milder(BlockInt(bits=2)), milder(BlockInt(bits=8)), milder(Identity())
    (BlockInt(bits=8, block=256, stochastic=False), BF16(), Identity())
    """
    if codec.lossless:
        return Identity()
    share = payload_share(codec)
    if share >= _HALF:
        return codec
    return BlockInt(bits=8) if share < _FEW_BITS else BF16()
