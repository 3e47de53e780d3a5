"""What goes wrong, how often, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.errors import CompositionError


@dataclass(frozen=True)
class CarrierFaults:
    """What goes wrong, how often, and for how long. Times are drawn uniformly, from 0 to what is said here.

    Args:
        lost: share of the messages that nobody receives, and of which nobody is told.
        repeated: share that is received twice.
        late: share that takes up to `late_s`.
        cut: share that does not arrive since its connection is cut, and all that is under way there with it.
        kills, stops: of each process, on average.
        anew: share of the killed peers that are started anew; servers all are.
        latency_s: what messages take.
        late_s: what late ones take.
        down_s: until a killed process is started anew.
        stopped_s: until a stopped process is continued.
        silent_s: after so long (exactly) the others notice that a process is stopped.
        until_s: nothing goes wrong later, but for what has begun then.
        is_ordered: whether messages keep their order and end with their connection, as on sockets. Else each goes its
            own way, as calls of Ray do, and may come after its sender was killed or to a server that was started anew.
        is_packed: whether records travel as bytes.

    Raises:
        CompositionError: shares that are none, or times below 0.
    """

    lost: float = 0.01
    repeated: float = 0.01
    late: float = 0.05
    cut: float = 0.01
    kills: float = 0.5
    stops: float = 0.3
    anew: float = 0.8
    latency_s: float = 0.1
    late_s: float = 2.0
    down_s: float = 3.0
    stopped_s: float = 4.0
    silent_s: float = 1.0
    until_s: float = 15.0
    is_ordered: bool = True
    is_packed: bool = True

    def __post_init__(self) -> None:
        fates = (self.lost, self.repeated, self.cut)
        if min(*fates, self.late, self.anew) < 0 or max(sum(fates), self.late, self.anew) > 1:
            raise CompositionError(
                f"{self}: give shares from 0 to 1, of which lost, repeated and cut exclude each other"
            )
        times_s = (self.latency_s, self.late_s, self.down_s, self.stopped_s, self.silent_s, self.until_s)
        if min(*times_s, self.kills, self.stops) < 0:
            raise CompositionError(f"{self}: give times and averages of 0 or more")
