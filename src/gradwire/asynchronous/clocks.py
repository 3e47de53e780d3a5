"""Clocks of workers: who is alive, who computes, who waits, and who may go on."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from gradwire.asynchronous.pace import Pace
from gradwire.core.record import Count
from gradwire.core.saved_schema import list_of, part_of


class Phase(IntEnum):
    """What a server knows of a worker."""

    EXPECTED = 0
    """It has not come yet, and others wait for it."""
    WAITING = 1
    COMPUTING = 2
    DEAD = 3
    """Nobody waits for it."""
    PAUSED = 4
    """Nobody waits for it. It has left a grant unused, and gets another one when it comes back."""


class Clocks:
    """Completed steps of each worker, under a pace.

    Only living workers that are not paused count for the slowest. All are expected at first, so that nobody runs ahead
    of those that start late.

    >>> from gradwire.asynchronous.pace import Bounded
    >>> clocks = Clocks(2, Bounded(0))
    >>> clocks.join(0), clocks.join(1), clocks.freed()
    (None, None, [0, 1])
    >>> clocks.complete(0), clocks.freed()
    (None, [])
    >>> clocks.leave(1), clocks.freed()
    (None, [0])
    """

    def __init__(self, workers: int, pace: Pace) -> None:
        self.pace = pace
        self.completed = [0] * workers
        self.phases = [Phase.EXPECTED] * workers

    @property
    def slowest(self) -> int:
        """The fewest steps that any worker has completed that is here; 0 where none is."""
        return min((self.completed[worker] for worker in self.here), default=0)

    @property
    def here(self) -> list[int]:
        """Workers that count for the slowest: neither dead nor paused."""
        away = (Phase.DEAD, Phase.PAUSED)
        return [worker for worker, phase in enumerate(self.phases) if phase not in away]

    def expect(self, worker: int) -> int:
        """A worker is on its way, so others wait for it; return its clock.

        One that was dead goes on at the clock of the slowest, so that no one is held.
        """
        if self.phases[worker] is Phase.DEAD and self.here:
            self.completed[worker] = self.slowest
        self.phases[worker] = Phase.EXPECTED
        return self.completed[worker]

    def join(self, worker: int, clock: int | None = None) -> None:
        """A worker is here and waits.

        Args:
            worker: who.
            clock: steps that it has completed, where it knows that better.
        """
        self.expect(worker)
        if clock is not None:
            self.completed[worker] = clock
        self.phases[worker] = Phase.WAITING

    def complete(self, worker: int) -> None:
        """A step is done: the clock ticks, and the worker waits for its next one."""
        self.completed[worker] += 1
        self.phases[worker] = Phase.WAITING

    def leave(self, worker: int) -> None:
        """A worker is dead: it counts no more."""
        self.phases[worker] = Phase.DEAD

    def pause(self, worker: int) -> None:
        """A worker does not use its grant now: it counts no more until it is back, at the clock that it has."""
        self.phases[worker] = Phase.PAUSED

    def resume(self, worker: int) -> None:
        """A worker that was paused computes, whatever the pace says: it was let go before."""
        self.phases[worker] = Phase.COMPUTING

    def disconnect(self) -> None:
        """All that live must join again; until they do, others wait for them, also for those that were paused."""
        self.phases = [phase if phase is Phase.DEAD else Phase.EXPECTED for phase in self.phases]

    def freed(self) -> list[int]:
        """Let those who wait compute, where they may; return them in rising order."""
        slowest = self.slowest
        found = [
            worker
            for worker, phase in enumerate(self.phases)
            if phase is Phase.WAITING and self.pace.may_start(self.completed[worker], slowest)
        ]
        for worker in found:
            self.phases[worker] = Phase.COMPUTING
        return found

    def state_dict(self) -> dict[str, list[int]]:
        """Return numbers to save."""
        return {"completed": list(self.completed), "phases": [int(phase) for phase in self.phases]}

    def checked(self, saved: Mapping[str, Any]) -> tuple[list[int], list[Phase]]:
        """Return what `state_dict` said, for `take_up`.

        Raises:
            StateError: no such numbers, or those of another number of workers.
        """
        workers = len(self.completed)
        completed = part_of(saved, "completed", list_of(Count, workers), f"'completed' of {workers} workers")
        phases = f"'phases' of {workers} workers, or has one in a phase that there is not"
        return completed, part_of(saved, "phases", list_of(Phase, workers), phases)

    def take_up(self, found: tuple[list[int], list[Phase]]) -> None:
        """Go on with what `checked` returned."""
        self.completed, self.phases = found
