"""The route that is fastest for a size, by times measured once on the group at hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import layout_of
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.link import Curve
from gradwire.core.state import State
from gradwire.reducers.exchange import AllReduceExchange
from gradwire.reducers.routes import Direct, RecursiveHalvingDoubling, Ring, Route
from gradwire.reducers.step import Program, Step
from gradwire.reducers.tree_route import Tree

WORTHWHILE = 0.95
"""Share of the backend's time that a route must stay below to be chosen: between nearer times noise would decide."""


@dataclass(frozen=True)
class Auto(AllReduceExchange):
    """Whichever of the backend's all-reduce and the routes takes the least time for the size of the payload.

    `gradwire.attach` measures every candidate once on its own group and the ranks agree on the slowest rank's times, so
    all choose alike; where nothing was measured (lockstep, the cost driver) it is the backend's all-reduce. Another
    run may measure otherwise and so add in another order: a resume is then equal to rounding. It is equal bit for bit
    where it reads the times from a link profile (`GRADWIRE_LINKS`, see `gradwire.drivers.link_profiler`).

    Args:
        codec: an additive codec.
        curves: measured times, one for each of `candidates`, or none.

    Raises:
        CompositionError: a codec whose payloads cannot be added, or a number of curves that fits no candidates.

    >>> from gradwire.codecs import Identity
    >>> from gradwire.core.link import TimedSize
    >>> flat, steep = Curve((TimedSize(0, 2.0), TimedSize(10, 2.1))), Curve((TimedSize(0, 1.0), TimedSize(10, 9.0)))
    >>> auto = Auto(Identity(), (flat, steep, flat, flat, flat))
    >>> auto.choose(1), auto.choose(1000)
    (Direct(codec=Identity()), AllReduceExchange(codec=Identity()))
    """

    curves: tuple[Curve, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curves and len(self.curves) != len(self.candidates):
            raise CompositionError(f"{len(self.curves)} curves for {len(self.candidates)} candidates: measure them all")

    @property
    def candidates(self) -> tuple[AllReduceExchange, ...]:
        """What is chosen from, the backend's own first."""
        routes: tuple[type[Route], ...] = (Direct, Ring, RecursiveHalvingDoubling, Tree)
        return (AllReduceExchange(self.codec), *(route(self.codec) for route in routes))

    def choose(self, nbytes: int) -> AllReduceExchange:
        """The fastest route for a payload of `nbytes`, where it is a twentieth faster than the backend's own."""
        if not self.curves:
            return self.candidates[0]
        times = [curve.seconds(nbytes) for curve in self.curves]
        times[0] *= WORTHWHILE
        return self.candidates[times.index(min(times))]

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """As the chosen candidate does. Ranks that have parts of unequal size choose by the largest."""
        nbytes = layout_of(self.codec, step.largest_of(x.numel()), x.dtype).nbytes
        return self.choose(nbytes).reduce(grain, x, state, step)
