"""The clock of simulations: time is computed and not waited for."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Generic, TypeVar

Event = TypeVar("Event")


class EventClock(Generic[Event]):
    """Hands out what was planned in the order of its times, and goes on to each of them.

    What happens at the same time happens in the order in which it was planned. `len` is the number of events to come.

    Attributes:
        now_s: simulated seconds.

    >>> clock = EventClock[str]()
    >>> clock.plan(2.0, "late"), clock.plan(1.0, "early"), clock.plan(1.0, "early too"), clock.plan(math.inf, "never")
    (None, None, None, None)
    >>> [clock.next_event() for _ in range(len(clock))], clock.now_s
    (['early', 'early too', 'late'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._events)

    def plan(self, at_s: float, event: Event) -> None:
        """Have something happen at a time; at infinity it never does."""
        if at_s < math.inf:
            heapq.heappush(self._events, (at_s, next(self._order), event))

    @property
    def next_s(self) -> float:
        """The time of the next event, infinity where none is to come."""
        return self._events[0][0] if self._events else math.inf

    def next_event(self) -> Event:
        """Go on to the next event and return it.

        Raises:
            IndexError: none is to come.
        """
        self.now_s, _, event = heapq.heappop(self._events)
        return event
