"""Where all ranks of a group tell each other a few words, whatever their collectives are doing.

Words travel through the store that the ranks met at, so a rank that does not come can be named, and nothing that one
rank says can be taken for another rank's gradients. They are JSON texts: nothing in them is executed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.flight.recorder import LaneLog
from gradwire.session.records import tell_death

_GRACE_S = 5.0
"""What the others wait longer than the lead, so that they hear from it who is missing."""

_LONGEST_PAUSE_S = 0.05


class GroupMeeting:
    """All ranks of a group, who meet as often as `exchange` is called.

    Args:
        store: of the process group that the ranks belong to.
        name: of this meeting, the same on all ranks and used for no other.
        rank: of this process in the group.
        ranks: the numbers that errors call the members of the group by, in its order.
        log: is told when this rank waits for the others.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int], log: LaneLog | None = None) -> None:
        self.rank, self.ranks, self._log = rank, ranks, log
        self._store = PrefixStore(f"gradwire/meeting/{name}", store)
        self._number = 0  # of the last meeting: the lead counts them, and the others follow

    def exchange(self, call: str, words: Any, deadline_s: float) -> list[Any]:
        """Return what every rank says, in rank order.

        Args:
            call: what this rank is doing, such as "gradwire.save"; ranks that do different things are told so.
            words: anything that JSON can carry.
            deadline_s: seconds after which a rank that has not come is an error.

        Raises:
            CommunicationError: a rank that did not come in time, that called something else, or a store that is gone.
        """
        if self._log is not None:
            self._log.meet(call)
        try:
            lead = self._lead if self.rank == 0 else self._follow
            answer = lead(call, json.dumps([call, words]), deadline_s)
        except (dist.DistError, RuntimeError) as error:
            raise CommunicationError(f"{call} cannot reach the store that the ranks met at: {error}") from error
        if isinstance(answer, str):
            error = CommunicationError(answer)
            tell_death(error)
            raise error
        if self._log is not None:
            self._log.met()
        return answer

    def _lead(self, call: str, text: str, deadline_s: float) -> Any:
        """Open the next meeting, hear everyone, and tell all what was heard, or in a sentence who is missing."""
        self._number += 1
        number = self._number
        self._store.set(f"{number}/0", text)
        self._store.set("now", str(number))
        answer = self._heard(number, call, deadline_s)
        self._store.set(f"{number}/all", json.dumps(answer))
        for rank in range(len(self.ranks)):
            self._store.delete_key(f"{number}/{rank}")
        if not isinstance(answer, str):
            self._stay(number)
        return answer

    def _stay(self, number: int) -> None:
        """Wait until all have read what was told: the store often lives in this process, which may end after this.

        A rank that has come and does not read has ended meanwhile, and is not waited for any longer than a few seconds.
        """
        self._until(lambda: self._store.add(f"{number}/read", 0) >= len(self.ranks) - 1, time.monotonic() + _GRACE_S)
        for key in ("all", "read"):  # everyone who has come here has read what was told before
            self._store.delete_key(f"{number - 1}/{key}")

    def _heard(self, number: int, call: str, deadline_s: float) -> list[Any] | str:
        end, said = time.monotonic() + deadline_s, list[Any]()
        for rank, named in enumerate(self.ranks):
            if not self._until(lambda key=f"{number}/{rank}": self._store.check([key]), end):
                return f"rank {named} has not come to {call} within {deadline_s:g} s: every rank must call it"
            other, words = json.loads(self._store.get(f"{number}/{rank}"))
            if other != call:
                lead = self.ranks[0]
                return f"rank {named} called {other} while rank {lead} called {call}: all ranks must call the same"
            said.append(words)
        return said

    def _follow(self, call: str, text: str, deadline_s: float) -> Any:
        """Come to the meeting that the lead has opened, and hear what it tells."""
        wait_s = deadline_s + _GRACE_S
        if not self._until(self._is_open, time.monotonic() + wait_s):
            return f"rank {self.ranks[0]} has not come to {call} within {wait_s:g} s: every rank must call it"
        answer = f"{self._number}/all"
        self._store.set(f"{self._number}/{self.rank}", text)
        if not self._until(lambda: self._store.check([answer]), time.monotonic() + wait_s):
            return f"rank {self.ranks[0]} has not answered in {call} within {wait_s:g} s"
        told = self._store.get(answer)
        self._store.add(f"{self._number}/read", 1)
        return json.loads(told)

    def _is_open(self) -> bool:
        """Whether the lead has opened a meeting that this rank has not been at, and that has not ended without it."""
        if not self._store.check(["now"]):
            return False
        number = int(self._store.get("now"))
        if number > self._number and not self._store.check([f"{number}/all"]):
            self._number = number
            return True
        return False

    @staticmethod
    def _until(come: Callable[[], bool], end: float) -> bool:
        """Whether something comes before the end. Asks again and again: waiting inside the store would block others."""
        pause = 0.001
        while not come():
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True


def group_store() -> Store:
    """The store that all ranks met at.

    Raises:
        CommunicationError: there is no process group.
    """
    if not dist.is_initialized():
        raise CommunicationError("there is no process group: save and load before destroy_process_group()")
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
