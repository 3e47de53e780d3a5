"""What whoever runs a job sees of its servers: how far each is, and what it had in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.journal import history
from gradwire.asynchronous.several.messages import Failed, Finish, Finished, Progress, Watch
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.core.errors import CommunicationError
from gradwire.core.flat_layout import FlatLayout
from gradwire.peers.protocol import Arrived, Connections

_FINISH_S = 60.0
"""The least time for servers to say what they had; one that is started again meanwhile has the job's patience."""
_AGAIN_S = 0.2


class ServerWatch:
    """Asks servers how far they are, and tells them which workers are dead.

    Args:
        job: what they serve.
        connections: to them.
        missed: hears of each server that could not be reached, and may raise.

    Attributes:
        progress: what each said last; None before it said anything.
    """

    def __init__(self, job: Job, connections: Connections, missed: Callable[[int, Exception], None]) -> None:
        self.job, self.connections = job, connections
        self.progress: list[Progress | None] = [None] * connections.servers
        self._first_life: dict[int, int] = {}
        self._asked: set[int] = set()
        self._told: dict[int, set[int]] = {}
        self._missed = missed

    @property
    def versions(self) -> list[int]:
        """Updates that each had made when it last said so."""
        return [0 if one is None else one.version for one in self.progress]

    @property
    def unheard(self) -> list[int]:
        """Those that never said anything."""
        return [part for part, one in enumerate(self.progress) if one is None]

    def know_of(self, dead: Sequence[int]) -> bool:
        """Whether each server has said how far it is since it was told that these workers are dead."""
        return all(self._told.get(part, set()).issuperset(dead) for part in range(len(self.progress)))

    def poll(self, dead: Sequence[int], seconds: float) -> None:
        """Tell servers who is dead, and hear how far they are; what takes longer is heard of next time.

        Raises:
            CommunicationError: as `missed` says.
        """
        for part in range(len(self.progress)):
            if part not in self._asked:
                self._asked.add(part)
                self.connections.ask(part, Watch(list(dead)))
        end_s = time.monotonic() + seconds
        while self._asked and (left_s := end_s - time.monotonic()) > 0:
            self._take(self.connections.wait(left_s))
        if (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)

    def _take(self, arrived: Arrived | None) -> None:
        if arrived is None:
            return
        self._asked.discard(arrived.server)
        if arrived.error is not None:
            self._missed(arrived.server, arrived.error)
        elif isinstance(arrived.reply, Failed):
            raise _failure(arrived.server, arrived.reply)
        elif isinstance(arrived.reply, Progress):
            self.progress[arrived.server] = arrived.reply
            self._told[arrived.server] = set(arrived.request.dead)
            self._first_life.setdefault(arrived.server, arrived.reply.life)

    def finish(self) -> list[Finished]:
        """Have servers tell workers that all is done; return what each had. One that comes back just now is waited for.

        Raises:
            CommunicationError: as `missed` says, or one that does not come back.
        """
        found: dict[int, Finished] = {}
        away = set(range(len(self.progress)))
        end_s = time.monotonic() + max(_FINISH_S, self.job.patience_s)
        while len(found) < len(self.progress):
            if time.monotonic() > end_s:
                missing = min(set(range(len(self.progress))) - found.keys())
                raise CommunicationError(f"server {missing} does not say what it had in the end")
            for part in away:
                self.connections.ask(part, Finish())
            away = self._finished(found)
        return [found[part] for part in range(len(self.progress))]

    def _finished(self, found: dict[int, Finished]) -> set[int]:
        """Hear what comes until nothing does for a while; return which servers could not be reached."""
        away: set[int] = set()
        while len(found) < len(self.progress) and (arrived := self.connections.wait(_AGAIN_S)) is not None:
            if not isinstance(arrived.request, Finish):
                continue
            if arrived.error is not None:
                away.add(arrived.server)
                self._missed(arrived.server, arrived.error)
            elif isinstance(arrived.reply, Failed):
                raise _failure(arrived.server, arrived.reply)
            else:
                found[arrived.server] = arrived.reply
        return away

    def outcome(self, lost: Sequence[int]) -> ServersOutcome:
        """End the run, in which these workers were lost; return what came of it.

        Raises:
            CommunicationError: as `finish`.
        """
        found = self.finish()
        return ServersOutcome(
            FlatLayout(self.job.parameters).named(torch.cat([one.values for one in found])),
            [one.rows for one in found],
            [history(one.rows, one.version) for one in found],
            tuple(lost),
            tuple(one.life - self._first_life.get(part, one.life) for part, one in enumerate(found)),
        )


def _failure(server: int, reply: Failed) -> CommunicationError:
    return CommunicationError(f"server {server} fails: {reply.text[:200]}")
