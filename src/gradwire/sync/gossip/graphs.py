"""Graphs of ranks, and the weights with which neighbours mix what they have.

W[i, j] is the weight that rank i gives to what rank j sends, so rank i hears rank j where W[i, j] > 0, and in a round

    x_i <- sum over j of W[i, j] x_j

Where every edge goes both ways the weights are those of Metropolis and Hastings (Xiao, Boyd & Kim 2007),
W[i, j] = 1 / (1 + max(d_i, d_j)) with d_i neighbours of rank i, so that W is symmetric and its rows and columns sum to
1. Elsewhere each rank deals what it has out evenly to those it sends to and itself, so that columns sum to 1.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError


class RoundLinks(NamedTuple):
    """What one rank does in a round.

    Attributes:
        targets: whom it sends to, each with the weight that it gives to what comes.
        sources: whom it hears, each with the weight that this rank gives to it.
    """

    targets: tuple[tuple[int, float], ...]
    sources: tuple[tuple[int, float], ...]


class Graph(ABC):
    """Who hears whom, with what weight. Some graphs change from round to round, and begin anew after `period` rounds.

    Attributes:
        ranks: how many there are.
    """

    ranks: int

    @property
    def period(self) -> int:
        """Rounds after which the graph is the same again."""
        return 1

    @abstractmethod
    def targets(self, rank: int, number: int) -> Collection[int]:
        """Whom `rank` sends to in round `number`, counted from 0 within the period; never itself."""

    def weights(self, number: int) -> Tensor:
        """W in round `number`, see the module's text."""
        targets = [frozenset(self.targets(rank, number)) for rank in range(self.ranks)]
        both_ways = all(rank in targets[to] for rank in range(self.ranks) for to in targets[rank])
        return _metropolis(targets) if both_ways else _pushed(targets)

    @functools.cached_property
    def matrices(self) -> tuple[Tensor, ...]:
        """W of each round of a period, float64 of shape (ranks, ranks).

        >>> Ring(4).matrices[0]
        tensor([[0.3333, 0.3333, 0.0000, 0.3333],
                [0.3333, 0.3333, 0.3333, 0.0000],
                [0.0000, 0.3333, 0.3333, 0.3333],
                [0.3333, 0.0000, 0.3333, 0.3333]], dtype=torch.float64)
        """
        return tuple(self.weights(number) for number in range(self.period))

    def links(self, rank: int, number: int) -> RoundLinks:
        """What `rank` does in round `number` of the run.

        >>> [to for to, weight in Ring(8).links(0, 5).targets]
        [1, 7]
        """
        return self._links[number % self.period][rank]

    @functools.cached_property
    def _links(self) -> list[list[RoundLinks]]:
        """Of each round of a period what each rank does."""
        return [[_links_of(matrix, rank) for rank in range(self.ranks)] for matrix in self.matrices]

    @functools.cached_property
    def spectral_gap(self) -> float:
        """1 - |lambda_2| of the product of a period's matrices, lambda_2 the second largest eigenvalue by magnitude.

        Differences between ranks shrink by |lambda_2| in a period. 1 means that a period averages exactly, and 0 that
        some differences never shrink.

        >>> round(Ring(8).spectral_gap, 4), round(Torus(2, 4).spectral_gap, 4), round(Ring(64).spectral_gap, 4)
        (0.1953, 0.5, 0.0032)
        >>> round(OnePeerExponential(8).spectral_gap, 4), round(Exponential(8).spectral_gap, 4)
        (1.0, 0.5)
        """
        product = functools.reduce(lambda before, matrix: matrix @ before, self.matrices)
        alike = torch.equal(product, product.mT)
        values = torch.linalg.eigvalsh(product) if alike else torch.linalg.eigvals(product)
        magnitudes = values.abs().sort(descending=True).values
        return 1.0 - float(magnitudes[1]) if self.ranks > 1 else 1.0


def _metropolis(targets: Sequence[Collection[int]]) -> Tensor:
    """Weights of Metropolis and Hastings for a graph whose edges go both ways."""
    matrix = torch.zeros(len(targets), len(targets), dtype=torch.float64)
    for rank, its in enumerate(targets):
        for other in its:
            matrix[rank, other] = 1.0 / (1 + max(len(its), len(targets[other])))
        matrix[rank, rank] = 1.0 - float(matrix[rank].sum())
    return matrix


def _pushed(targets: Sequence[Collection[int]]) -> Tensor:
    """Each rank deals what it has out evenly to those it sends to and itself."""
    matrix = torch.zeros(len(targets), len(targets), dtype=torch.float64)
    for rank, its in enumerate(targets):
        for other in (rank, *its):
            matrix[other, rank] = 1.0 / (1 + len(its))
    return matrix


def _links_of(matrix: Tensor, rank: int) -> RoundLinks:
    def filled(weights: Tensor) -> list[tuple[int, float]]:
        return [(other, float(weights[other])) for other in weights.nonzero().flatten().tolist() if other != rank]

    # Each rank begins with the next one, so that not all begin with the same.
    targets = sorted(filled(matrix[:, rank]), key=lambda target: (target[0] - rank) % len(matrix))
    return RoundLinks(tuple(targets), tuple(filled(matrix[rank])))


def _require_ranks(ranks: int) -> None:
    if ranks < 1:
        raise CompositionError(f"a graph of {ranks} ranks: there must be at least 1")


@dataclass(frozen=True)
class _OfRanks(Graph):
    """A graph that its number of ranks makes."""

    ranks: int

    def __post_init__(self) -> None:
        _require_ranks(self.ranks)


@dataclass(frozen=True)
class Ring(_OfRanks):
    """Every rank hears the one before it and the one after it: weights of a third, at any number of ranks.

    A rank sends what it has twice. The spectral gap is 2/3 (1 - cos(2 pi / n)), about 13 / n^2 for many ranks.

    Raises:
        CompositionError: less than one rank.
    """

    def targets(self, rank: int, number: int) -> Collection[int]:
        """The neighbours on both sides."""
        return {(rank - 1) % self.ranks, (rank + 1) % self.ranks} - {rank}


@dataclass(frozen=True)
class Torus(Graph):
    """Ranks in rows and columns, rank = columns * row + column, both closed to rings: every rank has four neighbours.

    With two rows or columns the neighbours on both sides are the same one, which counts once.

    Raises:
        CompositionError: less than two rows or columns, which is a ring.
    """

    rows: int
    columns: int
    ranks: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 2:
            raise CompositionError(f"a torus of {self.rows} x {self.columns} ranks is no more than a ring: take Ring")
        object.__setattr__(self, "ranks", self.rows * self.columns)

    def targets(self, rank: int, number: int) -> Collection[int]:
        """Those above, below, left and right."""
        row, column = divmod(rank, self.columns)
        beside = [(row, (column + 1) % self.columns), (row, (column - 1) % self.columns)]
        over = [((row + 1) % self.rows, column), ((row - 1) % self.rows, column)]
        return {self.columns * r + c for r, c in (*beside, *over)}


@dataclass(frozen=True)
class Complete(_OfRanks):
    """Every rank hears every other: a round is an exact average, for n - 1 times what a rank has.

    Raises:
        CompositionError: less than one rank.
    """

    @override
    def targets(self, rank: int, number: int) -> Collection[int]:
        return set(range(self.ranks)) - {rank}


@dataclass(frozen=True)
class Exponential(_OfRanks):
    """Every rank sends to those 1, 2, 4, 8, ... after it (Assran et al. 2019), all in every round.

    A rank sends what it has about log2(n) times, and the spectral gap falls as 1 / log2(n) only. Edges go one way, so
    this is a graph for `SGP`.

    Raises:
        CompositionError: less than one rank.
    """

    def targets(self, rank: int, number: int) -> Collection[int]:
        """Those at distances of powers of two."""
        return {(rank + distance) % self.ranks for distance in _powers(self.ranks)}


@dataclass(frozen=True)
class OnePeerExponential(_OfRanks):
    """Every rank sends to one other, 1, 2, 4, 8, ... after it in turn (Assran et al. 2019).

    A rank sends what it has once a round. Where n is a power of two, log2(n) rounds average exactly. Edges go one way,
    so this is a graph for `SGP`.

    Raises:
        CompositionError: less than one rank.
    """

    @property
    def period(self) -> int:
        """As many rounds as there are distances."""
        return max(1, len(_powers(self.ranks)))

    def targets(self, rank: int, number: int) -> Collection[int]:
        """The one whose turn it is."""
        return {(rank + distance) % self.ranks for distance in _powers(self.ranks)[number : number + 1]}


def _powers(ranks: int) -> list[int]:
    """The powers of two below a number of ranks."""
    return [1 << k for k in range((ranks - 1).bit_length())]


@dataclass(frozen=True)
class Neighbours(Graph):
    """A graph of one's own, by the ranks that each rank sends to; weights are those of the module's text.

    Args:
        of: for each rank whom it sends to, any sequences of numbers.

    Raises:
        CompositionError: no ranks, or a neighbour that is no other rank.

    >>> Neighbours([[1], [0, 2], [1]]).matrices[0]
    tensor([[0.6667, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.3333, 0.6667]], dtype=torch.float64)
    """

    of: Sequence[Sequence[int]]
    ranks: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        of = tuple(tuple(map(int, its)) for its in self.of)
        _require_ranks(len(of))
        for rank, its in enumerate(of):
            for other in its:
                if other == rank or not 0 <= other < len(of):
                    raise CompositionError(
                        f"rank {rank} is said to send to rank {other}: name other ranks, from 0 to {len(of) - 1}"
                    )
        object.__setattr__(self, "of", of)
        object.__setattr__(self, "ranks", len(of))

    def targets(self, rank: int, number: int) -> Collection[int]:
        """Those that were given."""
        return self.of[rank]


@dataclass(frozen=True)
class Weighted(Graph):
    """A graph of one's own, by its matrix: `matrix[i][j]` is the weight that rank i gives to what rank j sends.

    What else must hold depends on the method, which looks at it: rows, columns, symmetry, and whether news of every
    rank reach every other.

    Args:
        matrix: numbers of 0 or more, a row a rank; nested sequences, or a tensor.

    Raises:
        CompositionError: a matrix that is not square, or a weight that is negative or not finite.

    >>> Weighted([[0.75, 0.25], [0.25, 0.75]]).spectral_gap
    0.5
    """

    matrix: Sequence[Sequence[float]] | Tensor
    ranks: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = cast("Sequence[Any]", self.matrix.tolist() if isinstance(self.matrix, Tensor) else self.matrix)
        rows = tuple(tuple(map(float, row)) for row in given)
        _require_ranks(len(rows))
        for rank, row in enumerate(rows):
            if len(row) != len(rows):
                raise CompositionError(f"row {rank} of the matrix has {len(row)} weights: give {len(rows)}, one a rank")
            if not all(0 <= weight < float("inf") for weight in row):
                raise CompositionError(f"row {rank} of the matrix has a weight that is negative or not finite: {row}")
        object.__setattr__(self, "matrix", rows)
        object.__setattr__(self, "ranks", len(rows))

    def targets(self, rank: int, number: int) -> Collection[int]:
        """Those that give weight to it."""
        return [to for to, _ in self.links(rank, number).targets]

    @override
    def weights(self, number: int) -> Tensor:
        return torch.tensor(self.matrix, dtype=torch.float64)
