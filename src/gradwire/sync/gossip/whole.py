"""What gossip asks of all ranks now and then: an exact average, and how far apart ranks are."""

from __future__ import annotations

from torch import Tensor

from gradwire.core.agreement import Total
from gradwire.core.collective import AllReduce
from gradwire.core.program import Program
from gradwire.core.state import State
from gradwire.sync.gossip.method import GossipMethod


def averaged(method: GossipMethod, x: Tensor, state: State, ranks: int) -> Program[Tensor]:
    """The average of all ranks' `x`, 1-d, that gossip converges to: the same bits on every rank."""
    total = yield AllReduce(method.mass(x, state))
    return method.average(total, ranks)


def apart(x: Tensor, ranks: int) -> Program[Tensor]:
    """The mean over ranks of |x_i - mean x|^2, summed over all grains of the step: float64, the same on every rank.

    Means are summed in 64 bits: in 32 the rounding of the mean alone would be a distance.
    """
    mean = (yield AllReduce(x.double())).mul_(1.0 / ranks)
    square = (x.double() - mean).square().sum().view(1)
    return (yield Total(square, of="consensus distance")) / ranks
