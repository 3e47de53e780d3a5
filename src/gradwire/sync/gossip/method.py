"""What gossip methods have in common: a program for a grain, in which each rank hears its neighbours alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.sent import SentAll
from gradwire.reducers.step import Program, Reduced, Step
from gradwire.sync.gossip.graphs import Graph, RoundLinks

Mixed = Generator[Collective, Tensor, tuple[Tensor, State]]
"""A program that returns what this rank has after a round, and what it remembers."""


class GossipMethod(ABC):
    """How a rank mixes its own parameters with those of its neighbours."""

    @abstractmethod
    def require(self, graph: Graph) -> None:
        """Refuse a graph on which ranks would not come together at the mean.

        Raises:
            CompositionError: with the rank that does not fit.
        """

    @abstractmethod
    def begin(self, grain: Grain, x: Tensor) -> State:
        """What a rank remembers where all ranks have the same `x`, and know it."""

    @abstractmethod
    def mix(self, links: RoundLinks, grain: Grain, x: Tensor, state: State, step: Step) -> Mixed:
        """Return the program of a round: `x`, 1-d, are this rank's parameters, and are left as they are."""

    def mass(self, x: Tensor, state: State) -> Tensor:
        """What is summed over ranks for an exact average."""
        return x

    def average(self, total: Tensor, ranks: int) -> Tensor:
        """The average that gossip converges to, given the sum of all ranks' `mass`; it may be made of its memory."""
        return total.mul_(1.0 / ranks)


@dataclass(frozen=True)
class OnGraph(Reducer):
    """A gossip method as a reducer: what is reduced are parameters, and each rank ends with a result of its own.

    So a session plans grains, keeps state, counts bytes and names ranks that fail as it does for any other, and
    `Lockstep` runs it on virtual ranks.

    Args:
        graph: of all ranks of the run.
        method: e.g. `DPSGD()`.

    Raises:
        CompositionError: a graph that is none for the method.

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> from gradwire.sync.gossip import DPSGD, Ring
    >>> ranks = Lockstep(OnGraph(Ring(4), DPSGD()), flat_grain(1), world_size=4)
    >>> torch.cat(ranks.step([torch.tensor([x]) for x in (0.0, 3.0, 6.0, 9.0)]))
    tensor([4., 3., 6., 5.])
    """

    conserves_sum: ClassVar[bool] = False

    graph: Graph
    method: GossipMethod

    def __post_init__(self) -> None:
        self.method.require(self.graph)

    @property
    def averages(self) -> bool:
        """No: a round brings ranks nearer to the mean."""
        return False

    @property
    def ends_alike(self) -> bool:
        """No: each rank with a model of its own."""
        return False

    def require_ranks(self, world_size: int) -> None:
        """Refuse a number of ranks that is not the graph's.

        Raises:
            CompositionError: with both numbers.
        """
        if world_size != self.graph.ranks:
            raise CompositionError(
                f"{self.graph} is a graph of {self.graph.ranks} ranks, and this run has {world_size}: make one of "
                f"{world_size}"
            )

    def init(self, grain: Grain, step: Step) -> State:
        """What is remembered where all ranks have zeros."""
        return self.method.begin(grain, torch.zeros(grain.numel, dtype=grain.dtype, device=grain.device))

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        links = self.graph.links(step.rank, step.index)
        result, new = yield from self.method.mix(links, grain, x.reshape(-1), state, step)
        return Reduced(result.view(x.shape), SentAll(), new)


def received(links: RoundLinks, own: Tensor) -> Generator[Collective, Tensor, Sequence[Tensor]]:
    """Send `own`, 1-d, to all targets; return what each source has sent, of the same size, for the caller to change."""
    sends = tuple(Message(to, own) for to, _ in links.targets)
    receives = tuple(Expected(source, own.numel()) for source, _ in links.sources)
    received = yield SendRecv(own, sends, receives)
    return received.split([own.numel()] * len(receives)) if receives else ()


def add_differences_(into: Tensor, own: Tensor, links: RoundLinks, theirs: Iterable[Tensor]) -> Tensor:
    """into += sum over sources j of W[i, j] (theirs_j - own), in their order; `theirs` are overwritten.

    Differences are summed and not the tensors, since weights are rounded: those of a third sum to a little more or less
    than 1, and by so much all ranks' models would grow or shrink in every round. So ranks that have the same keep it
    bit for bit.
    """
    for (_, weight), its in zip(links.sources, theirs, strict=True):
        into.add_(its.sub_(own).mul_(weight))
    return into
