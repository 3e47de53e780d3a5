"""Partitions: which client has which examples. Each example goes to one client, and each client gets one at least.

A partition is a frozen dataclass of settings; `split` draws from a key. Sizes are exact: nothing is left over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.federated.sampling import generator

Indices = NDArray[np.int64]


class DataPartition(ABC):
    """How examples are dealt out."""

    needs_labels: bool = False

    def split(self, labels: Tensor | int, clients: int, key: Key) -> list[Tensor]:
        """Return the examples of each client: tensors of indices, in ascending order.

        Args:
            labels: of the examples, (n,) whole numbers; or n, where they have none.
            clients: N.
            key: what is drawn is drawn from it.

        Raises:
            CompositionError: fewer examples than clients, or none of the labels that are needed.
        """
        count = labels if isinstance(labels, int) else labels.numel()
        if not 1 <= clients <= count:
            raise CompositionError(f"{count} examples for {clients} clients: each of them needs one at least")
        if self.needs_labels and isinstance(labels, int):
            raise CompositionError(
                f"{self} divides examples by their labels, and these have none: take even or quantity"
            )
        known = np.zeros(count, dtype=np.int64) if isinstance(labels, int) else labels.cpu().numpy().astype(np.int64)
        parts = _with_one_each(self._parts(known, clients, generator(key)))
        return [torch.from_numpy(np.sort(part)) for part in parts]

    @abstractmethod
    def _parts(self, labels: Indices, clients: int, draw: np.random.Generator) -> list[Indices]:
        """Indices of each client; some may have none."""


def _with_one_each(parts: list[Indices]) -> list[Indices]:
    """Give those without an example one of whoever has most."""
    for empty in [i for i, part in enumerate(parts) if not part.size]:
        largest = max(range(len(parts)), key=lambda i: parts[i].size)
        parts[empty], parts[largest] = parts[largest][-1:], parts[largest][:-1]
    return parts


def _cut(indices: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Cut at the rounded cumulative shares."""
    return np.split(indices, np.rint(shares.cumsum()[:-1] * indices.size).astype(np.int64))


def _require_alpha(partition: object, alpha: float) -> None:
    if not 0 < alpha < float("inf"):
        raise CompositionError(f"alpha={alpha} of {type(partition).__name__}: a concentration is above 0 and finite")


@dataclass(frozen=True)
class Even(DataPartition):
    """Every client gets as many examples, drawn from all alike: the IID case.

    >>> [part.tolist() for part in Even().split(5, 2, Key(seed=1))]
    [[1, 3, 4], [0, 2]]
    """

    def _parts(self, labels: Indices, clients: int, draw: np.random.Generator) -> list[Indices]:
        return list(np.array_split(draw.permutation(labels.size), clients))


@dataclass(frozen=True)
class Dirichlet(DataPartition):
    """Of each label, client i gets a share q_i, with q ~ Dirichlet(alpha, ..., alpha) (Yurochkin et al. 2019).

    Args:
        alpha: 100 is nearly even; at 0.1 most clients have few labels, and sizes differ much.

    Raises:
        CompositionError: an alpha that is not positive.
    """

    alpha: float = 0.5
    needs_labels = True

    def __post_init__(self) -> None:
        _require_alpha(self, self.alpha)

    def _parts(self, labels: Indices, clients: int, draw: np.random.Generator) -> list[Indices]:
        dealt: list[list[Indices]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            theirs = draw.permutation(np.flatnonzero(labels == label))
            for own, part in zip(dealt, _cut(theirs, _shares(draw, self.alpha, clients)), strict=True):
                own.append(part)
        return [np.concatenate(own) for own in dealt]


def _shares(draw: np.random.Generator, alpha: float, count: int) -> NDArray[np.float64]:
    """Dirichlet shares; where all gamma variates of a tiny alpha are 0, everything goes to one."""
    shares = draw.dirichlet(np.full(count, alpha))
    return shares if np.isfinite(shares).all() else np.eye(count)[draw.integers(count)]


@dataclass(frozen=True)
class LabelShards(DataPartition):
    """Examples are sorted by label and cut into `per_client` times N shards; each client gets so many of them.

    The pathological split of McMahan et al. 2017, section 3: with 2 most clients know two labels.

    Args:
        per_client: shards of a client, 1 or more.

    Raises:
        CompositionError: no shards, or more shards than examples.
    """

    per_client: int = 2
    needs_labels = True

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise CompositionError(f"{self.per_client} shards a client: deal out one at least")

    def _parts(self, labels: Indices, clients: int, draw: np.random.Generator) -> list[Indices]:
        count = clients * self.per_client
        if count > labels.size:
            raise CompositionError(f"{labels.size} examples make no {count} shards: deal out fewer a client")
        mixed = draw.permutation(labels.size)
        shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], count)
        dealt = draw.permutation(count).reshape(clients, self.per_client)
        return [np.concatenate([shards[i] for i in own]) for own in dealt]


Shards = LabelShards  # its name before


@dataclass(frozen=True)
class Quantity(DataPartition):
    """Clients differ in how much they have and not in what: sizes ~ n Dirichlet(alpha, ..., alpha).

    Args:
        alpha: as in `Dirichlet`.

    Raises:
        CompositionError: an alpha that is not positive.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        _require_alpha(self, self.alpha)

    def _parts(self, labels: Indices, clients: int, draw: np.random.Generator) -> list[Indices]:
        return _cut(draw.permutation(labels.size), _shares(draw, self.alpha, clients))
