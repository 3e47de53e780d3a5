"""D-PSGD: every rank averages its parameters with those of its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.step import Step
from gradwire.sync.gossip.checks import require_averaging
from gradwire.sync.gossip.graphs import Graph, RoundLinks
from gradwire.sync.gossip.method import GossipMethod, Mixed, add_differences_, received


@dataclass(frozen=True)
class DPSGD(GossipMethod):
    """Decentralised parallel SGD (Lian et al. 2017, Algorithm 1).

    After a local step, rank i has

        x_i <- x_i + sum over neighbours j of W[i, j] (x_j - x_i)

    which is the row of W times all x, as rows sum to 1. The mean of all ranks stays as it is, and differences shrink
    by 1 - the graph's spectral gap in a round. Nothing is remembered; a rank sends its parameters to each neighbour.

    Where it deviates: the paper mixes what ranks had before the step, and then makes the step on the mixture, with the
    gradient at what the rank had. So sending may go on while the gradient is computed. Here the step is made first and
    its result is mixed, since the step belongs to an optimizer of any kind.

    The graph must be fixed, symmetric, doubly stochastic and connected.

    References:
        Lian, Zhang, Zhang, Hsieh, Zhang & Liu 2017, "Can decentralized algorithms outperform centralized algorithms? A
        case study for decentralized parallel stochastic gradient descent".
    """

    def require(self, graph: Graph) -> None:
        """Symmetric and doubly stochastic."""
        require_averaging(graph, "D-PSGD")

    @override
    def begin(self, grain: Grain, x: Tensor) -> State:
        return State()

    def mix(self, links: RoundLinks, grain: Grain, x: Tensor, state: State, step: Step) -> Mixed:
        """One round of parameters."""
        theirs = yield from received(links, x)
        return add_differences_(buffers.copied(x), x, links, theirs), state
