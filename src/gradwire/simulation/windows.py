"""Ranks that meet: in every step, or once in a window of steps. All ranks of a step are one vector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Meetings:
    """When ranks meet, and what that takes.

    Attributes:
        messages_s: of all messages of a meeting; of each fragment where there are several.
        pieces: that the messages of a meeting are cut into.
        coding_s: of a meeting, on each rank before it sends.
        overlap: the share of a step's computing beside which messages may travel, where every step is a meeting.
        every: steps of a window.
        delay: steps that go on while messages are under way.
        fragments: parts of the model, each of which is averaged at a time of its own in the window.
    """

    messages_s: float
    pieces: int = 1
    coding_s: float = 0.0
    overlap: float = 0.0
    every: int = 1
    delay: int = 0
    fragments: int = 1

    def starting(self, step: int) -> list[int]:
        """The fragments whose messages start at the end of a step, as `gradwire.sync.Averaging` has it.

        >>> [Meetings(0.0, every=4, fragments=2).starting(step) for step in range(4)]
        [[], [0], [], [1]]
        """
        since = step % self.every + 1
        return [i for i in range(self.fragments) if -(-(i + 1) * self.every // self.fragments) == since]


class MeetingTimes(NamedTuple):
    """Messages of all ranks: when they began, when the last rank had come, and when they were there."""

    began_s: float
    last_came_s: float
    done_s: float


class StepOfAll(NamedTuple):
    """A step of all ranks, for a picture of it; vectors have one element a rank.

    Attributes:
        began_s, computed_s, ended_s: of each rank.
        meeting: whose messages started in it; None where none did.
    """

    began_s: Tensor
    computed_s: Tensor
    ended_s: Tensor
    meeting: MeetingTimes | None


@dataclass
class Timeline:
    """What the steps of all ranks took; vectors have one element a rank, times are seconds.

    Attributes:
        window_s: of each window, by the clock of the rank that is last.
        computed_s, coded_s, waited_s, exposed_s: sums of each rank: computing, coding, waiting for slower ranks, and
            for messages.
        shown: the first steps.
    """

    window_s: list[float]
    computed_s: Tensor
    coded_s: Tensor
    waited_s: Tensor
    exposed_s: Tensor
    shown: list[StepOfAll] = field(default_factory=list[StepOfAll])


def train_in_windows(times: Iterator[Tensor], ranks: int, meetings: Meetings, steps: int, shown: int = 0) -> Timeline:
    """Let ranks compute, meet and go on.

    A meeting's messages begin once the last rank has come, and one meeting's follow another's. A rank comes with the
    first piece of its gradients `overlap` of its computing before the end of it, and with the last piece at the end:

        begin = max over ranks of (ready - overlap * computing)
        done  = max(begin + messages_s, max over ranks of ready + messages_s / pieces)

    Args:
        times: of each step, one element a rank.
        ranks: how many.
        meetings: when, and what they take.
        steps: how many; whole windows.
        shown: steps to keep for a picture.

    >>> slow = iter(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    >>> train_in_windows(slow, 2, Meetings(0.5), steps=2).window_s
    [2.5, 2.5]
    """
    clock = torch.zeros(ranks, dtype=torch.float64)
    computed, coded, waited, exposed = torch.zeros(4, ranks, dtype=torch.float64)
    kept = Timeline([], computed, coded, waited, exposed)
    under_way = deque[tuple[int, int, MeetingTimes]]()
    link_free_s = window_began_s = 0.0
    for step in range(steps):
        began, computing = clock, next(times)
        clock = clock + computing
        ready, meeting = clock, None
        kept.computed_s += computing
        while under_way and under_way[0][0] <= step:
            clock = _end(clock, under_way.popleft()[2], kept)
        for fragment in meetings.starting(step):
            while any(other == fragment for _, other, _ in under_way):  # two averages of one tensor would mix
                clock = _end(clock, under_way.popleft()[2], kept)
            clock = clock + meetings.coding_s
            kept.coded_s += meetings.coding_s
            last_s = float(clock.max())
            first_s = float((clock - meetings.overlap * computing).max()) if meetings.overlap else last_s
            begin_s = max(first_s, link_free_s)
            link_free_s = max(begin_s + meetings.messages_s, last_s + meetings.messages_s / meetings.pieces)
            meeting = MeetingTimes(begin_s, last_s, link_free_s)
            if meetings.delay:
                under_way.append((step + meetings.delay, fragment, meeting))
            else:
                clock = _end(clock, meeting, kept)
        if step < shown:
            kept.shown.append(StepOfAll(began, ready, clock, meeting))
        if (step + 1) % meetings.every == 0:
            now_s = float(clock.max())
            kept.window_s.append(now_s - window_began_s)
            window_began_s = now_s
    return kept


def _end(clock: Tensor, meeting: MeetingTimes, kept: Timeline) -> Tensor:
    """Have each rank wait for messages, first for the rank that comes last and then for what travels."""
    waited = (meeting.last_came_s - clock).clamp(min=0.0)
    after = clock.clamp(min=meeting.done_s)
    kept.waited_s += waited
    kept.exposed_s += after - clock - waited
    return after
