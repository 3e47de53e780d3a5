"""The workers of one list, connected: they average named tensors, and nothing is kept before all have said so."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.dry_run import dry_run
from gradwire.drivers.engine import Engine
from gradwire.drivers.groups import group_apart
from gradwire.drivers.measure import measured
from gradwire.drivers.plan import plan
from gradwire.drivers.process_group import GroupTransport
from gradwire.reducers.base import Reducer
from gradwire.session.feed import Feed, Piece
from gradwire.sync.elastic.owed import Owed, owed_norm
from gradwire.sync.elastic.store import reaching

CPU = torch.device("cpu")


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


class Averages:
    """Averages named tensors among the ranks of a transport.

    Args:
        transport: between them.
        specs: of the tensors, which lie on the CPU.
        reducer: how they travel.
        seed: of all random choices.
        owed: what this rank owes from before.
    """

    def __init__(
        self, transport: GroupTransport, specs: Sequence[ParameterSpec], reducer: Reducer, seed: int, owed: Owed
    ) -> None:
        self.rank, self.ranks = transport.rank, transport.world_size
        planned = plan(specs, measured(reducer, transport, CPU))
        dry_run(planned.units, transport.world_size)
        self.engine = Engine(planned, transport, seed)
        self._feed = Feed(self.engine, specs)
        owed.into(self.engine, self.rank, self.ranks)

    def mean_(self, tensors: Mapping[str, Tensor], window: int) -> None:
        """Write the mean over ranks over each tensor. `keep` or `forget` must follow.

        Args:
            tensors: all that were planned, float32 or wider, 1-d views of which can be taken.
            window: its number in the run, which random choices and schedules of methods go by.
        """
        self.engine.index = window
        self._feed.put(Piece(name, tensors[name].view(-1)) for name in reversed(list(tensors)))
        self._feed.end()

    def keep(self) -> None:
        """Keep what is owed after the last mean."""
        self.engine.settle()

    def forget(self) -> None:
        """Owe what was owed before it."""
        self._feed.drop()

    def owed(self) -> Owed:
        """What this rank owes."""
        return Owed.of(self.engine, self.rank, self.ranks)

    def norm(self) -> float:
        """The norm of what it will owe once the last mean is kept."""
        return owed_norm(self.engine, self.ranks)


class WorkerLink:
    """The workers of one list, connected.

    Args:
        transport: between them.
        workers: their numbers, in its order.
        averages: of each part of the model.
    """

    def __init__(self, transport: GroupTransport, workers: Sequence[int], averages: Sequence[Averages]) -> None:
        self.transport, self.workers, self.averages = transport, tuple(workers), averages

    def mean_(self, parts: Sequence[Mapping[str, Tensor]], window: int) -> None:
        """Write means over all tensors; `keep` or `forget` must follow."""
        for averages, tensors in zip(self.averages, parts, strict=True):
            averages.mean_(tensors, window)

    def keep(self) -> None:
        """Keep what is owed after the last means."""
        for averages in self.averages:
            averages.keep()

    def forget(self) -> None:
        """Owe what was owed before them."""
        for averages in self.averages:
            averages.forget()

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent over it for means."""
        return sum(averages.engine.stats.wire_bytes for averages in self.averages)

    def close(self) -> None:
        """Break all connections, see `GroupLine`."""
        GroupLine(self.transport).close()


def digest_of(parts: Iterable[Mapping[str, Tensor]]) -> str:
    """A digest of the bits of named tensors."""
    found = hashlib.blake2b(digest_size=16)
    for tensors in parts:
        for name, tensor in tensors.items():
            found.update(name.encode())
            found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
