"""Sizes of a transformer: what its memory, its arithmetic and its messages follow from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.core.errors import SpecError


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal layers, dense or with experts.

    Args:
        name: what it is called.
        layers: how many.
        hidden: width h of the residual stream.
        heads: query heads a; each is `head_size` wide.
        vocabulary: words V of the embedding and of the output layer.
        sequence: tokens s of one sample.
        key_heads: heads of keys and values; None: as many as query heads.
        head_size: None: hidden / heads.
        inner: width f of the feed-forward part, of one expert where there are experts; None: 4 h.
        gated: whether it has three matrices (SwiGLU) and not two.
        experts: of each layer; 0: a dense model.
        chosen: experts that each token goes to.
        shared_inner: width of an expert that all tokens go to; 0: none.
        dense_layers: how many of the layers have no experts in a model with experts.
        dense_inner: width of the feed-forward part of those; None: `inner`.
        tied: whether the output layer is the embedding.

    Raises:
        SpecError: sizes that are not positive or contradict each other.

    >>> f"{Transformer('gpt3-175b', 96, 12288, 96, 51200, 2048).parameters / 1e9:.1f}"
    '174.6'
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    key_heads: int | None = None
    head_size: int | None = None
    inner: int | None = None
    gated: bool = False
    experts: int = 0
    chosen: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    dense_inner: int | None = None
    tied: bool = True

    def __post_init__(self) -> None:
        for what in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            _require_positive(self.name, what, getattr(self, what))
        for what in ("key_heads", "head_size", "inner", "dense_inner"):
            if (size := getattr(self, what)) is not None:
                _require_positive(self.name, what, size)
        for what in ("experts", "chosen", "shared_inner", "dense_layers"):
            if (size := getattr(self, what)) < 0:
                raise SpecError(f"{self.name}: {what}={size} is below 0: write 0 where the model has none")
        if self.head_size is None and self.hidden % self.heads:
            raise SpecError(
                f"{self.name}: {self.heads} heads do not divide a hidden size of {self.hidden}: write head_size= too"
            )
        if self.heads % self.keys:
            raise SpecError(
                f"{self.name}: {self.keys} key heads do not divide {self.heads} heads: each key head serves "
                "equally many query heads"
            )
        if not 0 <= self.chosen <= self.experts or bool(self.experts) != bool(self.chosen):
            raise SpecError(
                f"{self.name}: a token cannot go to {self.chosen} of {self.experts} experts: write how many of them "
                "each token is sent to, and 0 for both in a dense model"
            )
        if self.dense_layers > self.layers:
            raise SpecError(f"{self.name}: {self.dense_layers} of {self.layers} layers cannot be dense")

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def width(self) -> int:
        """Width f of the feed-forward part, or of one expert."""
        return 4 * self.hidden if self.inner is None else self.inner

    @property
    def dense_width(self) -> int:
        """Width of the feed-forward part of layers without experts."""
        return self.width if self.dense_inner is None else self.dense_inner

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Of one layer's attention: queries, keys, values and the projection, h (2 a + 2 k) d."""
        return self.hidden * self.head * 2 * (self.heads + self.keys)

    @property
    def dense_parameters(self) -> int:
        """Of one layer's feed-forward part where it has no experts."""
        return self.matrices * self.hidden * (self.dense_width if self.experts else self.width)

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return self.matrices * self.hidden * self.width if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Of one layer's router and of the expert that all tokens go to."""
        return self.experts * self.hidden + self.matrices * self.hidden * self.shared_inner

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding; the output layer has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model; biases and norms are left out, which are below a thousandth."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Of what one token passes through."""
        return self._parameters(self.chosen)

    def _parameters(self, experts: int) -> int:
        dense = self.layers - self.expert_layers
        return (
            self.layers * self.attention_parameters
            + dense * self.dense_parameters
            + self.expert_layers * (experts * self.expert_parameters + self.shared_parameters)
            + (1 if self.tied else 2) * self.embedding_parameters
        )

    def with_sequence(self, tokens: int) -> Transformer:
        """The same model on samples of another length."""
        return replace(self, sequence=tokens)

    def model_flops(self, samples: int) -> float:
        """Operations of a step, forward and backward, without any recomputation.

        Three times those of the forward pass, 2 for each parameter that a token passes through and 4 s a d for
        attention over a whole sequence (Narayanan et al. 2021, Appendix, without recomputation; Korthikanti et al.
        2022, Equation 7 for two matrices of width 4 h).
        """
        tokens = samples * self.sequence
        products = self.active_parameters - (0 if self.tied else self.embedding_parameters)
        attention = 4 * self.layers * self.sequence * self.heads * self.head
        return 3.0 * tokens * (2 * products + attention)


def _require_positive(model: str, what: str, size: int) -> None:
    if isinstance(size, bool) or size < 1:
        raise SpecError(f"{model}: {what}={size} is below 1: write a positive number")
