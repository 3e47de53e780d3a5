"""The workers of one list, connected: they average named tensors, and nothing is kept before all have said so."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.drivers.engine import Stats
from gradwire.drivers.groups import group_apart
from gradwire.drivers.process_group import GroupTransport
from gradwire.session import Session
from gradwire.session.direct_lane import DirectLane
from gradwire.session.pace import WindowPace
from gradwire.session.report import Report
from gradwire.sync.elastic.owed import Owed, owed_norm
from gradwire.sync.elastic.shared import SharedModel
from gradwire.sync.elastic.store import reaching

WHAT = "gradwire.sync.Elastic"
"""The call that errors and flight records speak of."""


class GroupLine:
    """A group between workers, which may be closed by another thread, also before it is there.

    Args:
        transport: over the group, if it is there already.
    """

    def __init__(self, transport: GroupTransport | None = None) -> None:
        self._lock, self._transport, self._is_closed = threading.Lock(), transport, False

    def connected(self, store: Store, name: str, workers: Sequence[int], me: int, deadline_s: float) -> GroupTransport:
        """Connect this worker to others over a process group of their own.

        Args:
            store: a client of the run's keys. Another connection is made of it: who connects waits in the store.
            name: of the group, used for no other.
            workers: of the group, in its order.
            me: this worker.
            deadline_s: the group's patience.

        Raises:
            CommunicationError: they could not be connected, or this was closed meanwhile.
        """
        with reaching():
            apart = PrefixStore(name, store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        transport = GroupTransport(group_apart(apart, workers.index(me), len(workers), deadline_s))
        with self._lock:
            self._transport = transport
        if self._is_closed:
            transport.group.abort()
            raise CommunicationError("the workers were connected too late")
        return transport

    def close(self) -> None:
        """Break all connections: whoever still waits in them fails at once."""
        with self._lock:
            self._is_closed = True
        if self._transport is not None:
            self._transport.group.abort()


class WorkerLink:
    """The workers of one list, connected, with a session for each part of the model.

    Args:
        transport: between them.
        workers: their numbers, in its order.
        lane: over the same group.
        shared: the parts of the model.
        seed: of all random choices.
        owed: what this worker owes of the first part from before.
    """

    def __init__(
        self,
        transport: GroupTransport,
        workers: Sequence[int],
        lane: DirectLane,
        shared: SharedModel,
        seed: int,
        owed: Owed,
    ) -> None:
        self.transport, self.workers = transport, tuple(workers)
        self._log = lane.log
        self._sessions = [
            Session(part.copy.copies, part.reducer, seed=seed, lane=lane, what=WHAT) for part in shared.parts
        ]
        first, *others = self._sessions
        for session in self._sessions:
            session.non_finite.is_expected = True  # the end of the window names the parameter, and refuses it
        first.uncounted = "what newcomers are handed"
        self._pace = first.pace = WindowPace.of("window", shared.parts[0].copy.parameters)
        self._pace.others = others
        owed.into(first.engine, transport.rank, transport.world_size)

    def mean_(self, parts: Sequence[Mapping[str, Tensor]], window: int) -> None:
        """Write the mean over workers over each tensor of each part. `keep` or `forget` must follow.

        Args:
            parts: all tensors that were planned, float32 or wider, on the CPU.
            window: its number in the run, which random choices and schedules of methods go by.
        """
        for session, tensors in zip(self._sessions, parts, strict=True):
            session.engine.index = window
            session.reduce_(tensors)

    def keep(self, steps: int) -> None:
        """Keep what is owed after the last means, which were of a window of so many steps."""
        for session in self._sessions:
            session.engine.settle()
        self._pace.ended(steps)

    def forget(self) -> None:
        """Owe what was owed before the last means."""
        for session in self._sessions:
            session.feed.drop()

    def owed(self) -> Owed:
        """What this worker owes of the first part."""
        return Owed.of(self._sessions[0].engine, self.transport.rank, self.transport.world_size)

    def norm(self) -> float:
        """The norm of what it will owe of the mean once the last means are kept."""
        return owed_norm(self._sessions[0].engine, self.transport.world_size)

    def stats(self) -> Stats:
        """Bytes and times of this list of workers; nothing is kept or forgotten by asking."""
        return Stats.summed(session.engine.stats for session in self._sessions)

    def report(self) -> Report:
        """What averages cost in a step of training, since these workers were connected."""
        return self._sessions[0].report()

    def close(self) -> None:
        """Break all connections, see `GroupLine`; what is owed can still be asked for."""
        GroupLine(self.transport).close()
        for session in self._sessions:
            session.close()
        self._log.end()


def digest_of(parts: Iterable[Mapping[str, Tensor]]) -> str:
    """A digest of the bits of named tensors."""
    found = hashlib.blake2b(digest_size=16)
    for tensors in parts:
        for name, tensor in tensors.items():
            found.update(name.encode())
            found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
