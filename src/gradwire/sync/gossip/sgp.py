"""Stochastic gradient push: gossip along edges that go one way, with weights that undo their bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.grain import Grain
from gradwire.core.state import Leaf, State
from gradwire.reducers.step import Step
from gradwire.sync.gossip.checks import require_pushing
from gradwire.sync.gossip.graphs import Graph, RoundLinks
from gradwire.sync.gossip.method import GossipMethod, Mixed, received


@dataclass(frozen=True)
class SGP(GossipMethod):
    """Stochastic gradient push (Assran et al. 2019, Algorithm 1).

    Rank i keeps x_i and a weight w_i, 1 at first, and trains the model z_i = x_i / w_i. A local step that moved the
    model by u_i moves x_i by as much, and then

        x_i <- sum over j of P[i, j] (x_j + u_j),    w_i <- sum over j of P[i, j] w_j,    z_i = x_i / w_i

    Columns of P sum to 1, so sums over ranks stay as they are, and all z_i come together at sum(x) / sum(w), the mean.
    Without weights ranks would not come together: rank i would end at w_i times the mean, with the w_i that weights
    come to, more than 1 where a rank is sent more than it gives away.

    What is kept is b_i = x_i - z_i, since x_i + u_i is then the parameters plus b_i, whatever optimizer has moved them.
    The weight travels as one more element of the parameters. Where it deviates: what a rank keeps is what it has less
    what it sends, each part rounded as its receiver rounds it, and not P[i, i] times what it has: rounded columns of P
    do not quite sum to 1, and by so much all ranks' models would grow or shrink in every round.

    The columns of the graph's matrix must sum to 1, every rank must keep a part, and the edges of all rounds together
    must connect all ranks.

    References:
        Assran, Loizou, Ballas & Rabbat 2019, "Stochastic gradient push for distributed deep learning".
    """

    @override
    def require(self, graph: Graph) -> None:
        require_pushing(graph, "SGP")

    def begin(self, grain: Grain, x: Tensor) -> State:
        """No bias, and a weight of 1, kept once a segment."""
        weight = torch.ones(len(grain.segments), dtype=x.dtype, device=x.device)
        return _state(torch.zeros_like(x), weight)

    def mix(self, links: RoundLinks, grain: Grain, x: Tensor, state: State, step: Step) -> Mixed:
        """One round of numerators and weights."""
        own = self.mass(x, state)
        theirs = yield from received(links, own)
        gained = buffers.like(own).zero_()
        for (_, weight), its in zip(links.sources, theirs, strict=True):
            gained.add_(its.mul_(weight))
        for _, weight in links.targets:
            gained.sub_(buffers.times(own, weight))
        total = gained.add_(own)
        numerator, w = total[:-1], total[-1]
        z = torch.div(numerator, w, out=buffers.like(numerator))
        return z, _state(numerator.sub_(z), w.expand(len(grain.segments)).clone())

    def mass(self, x: Tensor, state: State) -> Tensor:
        """x_i, with w_i behind it."""
        own = buffers.empty((x.numel() + 1,), x.dtype, x.device)
        torch.add(x, state.tensor("bias"), out=own[:-1])
        own[-1:] = state.tensor("weight")[:1]
        return own

    @override
    def average(self, total: Tensor, ranks: int) -> Tensor:
        # Times the reciprocal, since a division by a number is that on a GPU and a division on a CPU.
        return total[:-1].mul_(1.0 / float(total[-1]))


def _state(bias: Tensor, weight: Tensor) -> State:
    return State(bias=Leaf(bias, "element"), weight=Leaf(weight, "segment"))
