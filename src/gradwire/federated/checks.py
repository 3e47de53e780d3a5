"""What a server looks at before an update may count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from gradwire.core.errors import FederationError, PayloadError
from gradwire.federated.client import Terms, Update

MOST_STEPS = 1_000_000
"""Local steps beyond which a number is no number of steps."""


class DecodedUpdate(NamedTuple):
    """An update that was found good, decoded.

    Attributes:
        vectors: what the client sent, by name.
        buffers: how the model's buffers changed, float64.
        examples: n_k.
        steps: local steps.
        loss: its mean training loss.
        nbytes: bytes that it took.
    """

    vectors: dict[str, Tensor]
    buffers: Tensor
    examples: float
    steps: int
    loss: float
    nbytes: int


def rows_of(update: Update, terms: Terms, like: Mapping[str, Tensor], buffers: Tensor) -> DecodedUpdate:
    """Decode an update.

    Args:
        update: of a client that was drawn.
        terms: as the client had it.
        like: the server's vectors by name: those that a client sends changes of.
        buffers: of the server's model.

    Raises:
        FederationError: an update of another model, one that is damaged or not finite, or one without examples or
            steps.
    """
    client = update.client
    if update.fingerprint != terms.fingerprint:
        raise FederationError(
            f"client {client} sends an update of another model, with other names, shapes or dtypes: it is left out"
        )
    if not 0 < update.examples < math.inf:
        raise FederationError(f"client {client} claims {update.examples} examples: its update is left out")
    if not 1 <= update.steps <= MOST_STEPS:
        raise FederationError(f"client {client} claims {update.steps} local steps: its update is left out")
    vectors = _decoded(update, terms, like)
    if update.buffers.shape != buffers.shape or update.buffers.dtype != buffers.dtype:
        raise FederationError(f"client {client} sends buffers of another model: its update is left out")
    change = update.buffers.to(buffers.device) - buffers
    for vector in (*vectors.values(), change):
        if not bool(vector.isfinite().all()):
            raise FederationError(f"client {client} sends an update that is not finite: it is left out")
    return DecodedUpdate(vectors, change, update.examples, update.steps, update.loss, update.nbytes)


def _decoded(update: Update, terms: Terms, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if set(update.wires) != set(like):
        raise FederationError(
            f"client {update.client} sends {sorted(update.wires)} where {sorted(like)} is wanted: it trains by another "
            "method, and its update is left out"
        )
    vectors: dict[str, Tensor] = {}
    for name, vector in like.items():
        key = terms.key(update.client, update.round, name)
        try:
            vectors[name] = terms.update.receive(update.wires[name].to(vector.device), vector, key)
        except PayloadError as error:
            raise FederationError(f"client {update.client}'s update is left out as damaged: {error}") from error
    return vectors
