"""The ranks of a group without a session, who tell each other a few words at the same places."""

from __future__ import annotations

import itertools

import torch.distributed as dist

from gradwire.core.errors import AttachError
from gradwire.session.meeting import GroupMeeting, group_store
from gradwire.session.together import TimedMeeting, Together

_numbers = itertools.count(1)
"""Each call of this process has a meeting of its own."""


def together(who: str, group: dist.ProcessGroup | None, deadline_s: float) -> Together:
    """Return the ranks of a group, each of which makes the same calls of this.

    Args:
        who: what makes it, for errors.
        group: the ranks; the default group where it is None.
        deadline_s: seconds to wait for a rank.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = f"{who}/{'-'.join(map(str, ranks))}/{next(_numbers)}"
    meeting = GroupMeeting(group_store(), name, dist.get_rank(group), ranks)
    return Together(who, TimedMeeting(meeting, deadline_s), AttachError)
