"""The ranks of a group, who tell each other a few words at the same places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gradwire.session.meeting import Meeting, group_store

_made = 0
"""Objects of this kind that this process has made: each has a meeting of its own."""


class Together:
    """Ranks, each of which makes one of these and says the same number of words.

    Args:
        who: what makes it, for errors.
        group: the ranks; the default group where it is None.
        deadline_s: seconds to wait for a rank.

    Attributes:
        ranks: their numbers in the default group.
    """

    def __init__(self, who: str, group: dist.ProcessGroup | None, deadline_s: float) -> None:
        global _made
        _made += 1
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        name = f"{who}/{'-'.join(map(str, self.ranks))}/{_made}"
        self._meeting, self._who = Meeting(group_store(), name, dist.get_rank(group), self.ranks), who
        self._deadline_s = deadline_s

    def say(self, words: Any) -> list[Any]:
        """Return what all ranks say, in their order; words are what JSON can carry.

        Raises:
            CommunicationError: a rank that did not come.
        """
        return self._meeting.exchange(self._who, words, self._deadline_s)
