"""What ranks do together or not at all, agreed upon through the store and not by collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire.core.errors import GradwireError
from gradwire.session.lane import Lane
from gradwire.session.meeting import GroupMeeting


class TimedMeeting(NamedTuple):
    """A meeting of ranks that have no lane, and the seconds that a rank is waited for."""

    meeting: GroupMeeting
    deadline_s: float


class Outcome(NamedTuple):
    """What an action gave here, and what every rank says of it."""

    own: Any
    words: list[Any]


class Together:
    """Ranks, of which each makes the same call.

    Args:
        call: what they do, for errors.
        place: the lane or the meeting whose ranks they are.
        failure: what is raised on the others where one rank fails.
    """

    def __init__(self, call: str, place: Lane | TimedMeeting, failure: type[GradwireError]) -> None:
        self.call, self._place, self._failure = call, place, failure
        self.rank, self.ranks = place.meeting.rank, place.meeting.ranks

    def during(self, call: str, failure: type[GradwireError]) -> Together:
        """The same ranks, who meet at the same place for another call."""
        return Together(call, self._place, failure)

    @property
    def world_size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def gather(self, words: Any) -> list[Any]:
        """What all ranks say.

        Raises:
            CommunicationError: a rank that did not come, or called something else.
        """
        return self._place.meeting.exchange(self.call, words, self._place.deadline_s)

    def attempt(
        self,
        act: Callable[[], Any],
        undo: Callable[[], None] = lambda: None,
        words: Callable[[Any], Any] = lambda _: None,
    ) -> Outcome:
        """Do something on every rank; where one fails all undo it and raise, the others with its rank and reason.

        Args:
            act: what is done.
            undo: done on every rank where one has failed.
            words: what a rank tells the others of what `act` gave it.
        """
        own, error = None, None
        try:
            own = act()
        except Exception as caught:
            error = caught
        said = self.gather({"error": f"{error}" if error else None, "words": None if error else words(own)})
        failed = [(rank, one["error"]) for rank, one in zip(self.ranks, said, strict=True) if one["error"] is not None]
        if failed:
            undo()
            if error is not None and not isinstance(error, OSError):
                raise error
            rank, reason = failed[0] if error is None else (self.ranks[self.rank], error)
            text = f"{self.call} failed on rank {rank}, and changed nothing on any: {reason}"
            raise self._failure(text) from error
        return Outcome(own, [one["words"] for one in said])
