"""`torch.distributed` as a transport: collectives on a process group, and on sub-groups of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.axis import SubGroups
from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import ConnectionLost
from gradwire.core.messages import SendRecv
from gradwire.drivers.groups import deadline_of, destroy, new_group
from gradwire.drivers.interpreter import Pending, served

SMALL_ROW_BYTES = 1 << 16
LARGE_ROWS_BYTES = 1 << 19


class Watcher(Protocol):
    """Who wants to know what a rank is doing: which collectives it has started, and which one it waits for."""

    def issue(self, what: str, nbytes: int) -> int:
        """Another collective is started; return its number."""
        ...

    def wait(self, number: int, what: str, nbytes: int) -> None:
        """The rank waits for one."""
        ...

    def take(self, number: int, what: str, nbytes: int) -> None:
        """Its result is here."""
        ...

    def lose(self, number: int, what: str, nbytes: int) -> None:
        """It failed."""
        ...


@dataclass(frozen=True, eq=False)
class _Started:
    works: Sequence[dist.Work]
    result: Tensor
    what: str
    began: float
    watcher: Watcher | None
    issued: tuple[int, str, int]

    def wait(self) -> Tensor:
        if self.watcher is not None:
            self.watcher.wait(*self.issued)
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            if self.watcher is not None:
                self.watcher.lose(*self.issued)
            raise ConnectionLost(self.what, time.monotonic() - self.began, error) from error
        if self.watcher is not None:
            self.watcher.take(*self.issued)
        return self.result


class GroupTransport:
    """Issues batches on a process group, all of them asynchronous.

    Gloo's all_gather moves large rows at 94% of a link's rate but takes 3.5 ms for the smallest; an all-to-all of the
    repeated row sends the same bytes, takes 0.6 ms, and on large rows loses a quarter to flows that meet at a receiver.
    They break even at about 64 KiB a row on four hosts at 100 Mbit/s (docs/building/log/links.md).

    Gloo's all_to_all takes 1.6 times as long as the same messages posted one by one where they are large (16 MB on four
    hosts at 200 Mbit/s: 839 against 535 ms; 1 MB: 47 against 37; 256 KB: 10.4 against 11.1), so large rows are posted.

    Collectives on an axis have a group of their own for each sub-group, made when the first one is issued: all its
    members reach that place in the same static order. Messages between pairs travel on the whole group.

    Args:
        group: of all ranks.
        watcher: is told what this rank is doing.
    """

    def __init__(self, group: dist.ProcessGroup, watcher: Watcher | None = None) -> None:
        self.group = group
        self._watcher = watcher
        self.rank, self.world_size = group.rank(), group.size()
        self._is_gloo = group.name() == "gloo"
        self._subgroups: dict[SubGroups, dist.ProcessGroup] = {}

    def issue(self, request: Collective) -> Pending:
        """Start a collective.

        Raises:
            ConnectionLost: a connection broke or a rank fell silent; waiting for the result raises it as well.
        """
        began = time.monotonic()
        kind, nbytes = type(request).__name__, request.nbytes
        number = 0 if self._watcher is None else self._watcher.issue(kind, nbytes)
        method: Any = served(self, request)
        try:
            works, result = method(request)
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):  # a mistake of ours
                raise
            raise ConnectionLost(_described(request), time.monotonic() - began, error) from error
        return _Started(works, result, _described(request), began, self._watcher, (number, kind, nbytes))

    def all_reduce(self, request: AllReduce) -> Issued:
        """Combine in place, and return the tensor."""
        buffer = request.tensor
        if not buffer.numel():  # backends differ on what they make of nothing
            return [], buffer
        op = dist.ReduceOp.SUM if request.op == "sum" else dist.ReduceOp.MAX
        return _started(dist.all_reduce(buffer, op, self._group_of(request.axis)[0], async_op=True), buffer)

    def all_gather(self, request: AllGather) -> Issued:
        """By an all-to-all where rows are small."""
        row = request.tensor
        if not row.numel():
            size = request.axis.size_of(self.rank) if request.axis else self.world_size
            return [], row.new_empty((size, 0))
        group, size = self._group_of(request.axis)
        if self._is_gloo and row.numel() <= SMALL_ROW_BYTES:
            return self._swapped(buffers.copied(row.expand(size, -1)), group)
        out = buffers.empty((size * row.numel(),), row.dtype, row.device)
        # Newer PyTorch renames it and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
        work = gather(out, row, group, async_op=True)
        return _started(work, out.view(size, -1))

    def all_to_all(self, request: AllToAll) -> Issued:
        """By messages where rows are large."""
        if not request.tensor.numel():
            return [], request.tensor
        return self._swapped(request.tensor, self._group_of(request.axis)[0])

    def all_to_all_v(self, request: AllToAllV) -> Issued:
        """Also where this rank has nothing to send and to receive: others may have, unless there are none."""
        if request.axis is not None and request.axis.size_of(self.rank) == 1:
            return [], request.tensor
        rows, group = request.tensor, self._group_of(request.axis)[0]
        out = buffers.empty((request.length,), rows.dtype, rows.device)
        sizes = list(request.receives), list(request.sends)
        return _started(dist.all_to_all_single(out, rows, *sizes, group=group, async_op=True), out)

    def _swapped(self, rows: Tensor, group: dist.ProcessGroup) -> Issued:
        out = buffers.empty(rows.shape, rows.dtype, rows.device)
        if self._is_gloo and rows.numel() >= LARGE_ROWS_BYTES:
            return self._swapped_by_messages(rows, out, group)
        return _started(dist.all_to_all_single(out, rows, group=group, async_op=True), out)

    def _swapped_by_messages(self, rows: Tensor, out: Tensor, group: dist.ProcessGroup) -> Issued:
        """An all-to-all as messages; each rank begins with the next one, so that not all begin with the same."""
        rank, n = group.rank(), rows.shape[0]
        out[rank].copy_(rows[rank])
        peers = [(rank + i) % n for i in range(1, n)]
        sends, receives = [(peer, rows[peer]) for peer in peers], [(peer, out[peer]) for peer in reversed(peers)]
        return self._post(sends, receives, group), out

    def send_recv(self, request: SendRecv) -> Issued:
        """Post every receive, then every send, and wait for none of them: so no order of ranks can block a round."""
        result = buffers.empty((request.length,), request.like.dtype, request.like.device)
        pieces = result.split([numel for _, numel in request.receives]) if request.receives else ()
        ranks = request.axis.members(self.rank) if request.axis else range(self.world_size)
        receives = [(ranks[source], piece) for (source, _), piece in zip(request.receives, pieces, strict=True)]
        sends = [(ranks[to], tensor) for to, tensor in request.sends]
        return self._post(_filled(sends), _filled(receives), self.group), result

    def _post(self, sends: _Letters, receives: _Letters, group: dist.ProcessGroup) -> list[dist.Work]:
        if self._is_gloo:  # directly, without the checks that a batch makes of every message
            posted = [group.recv([piece], source, 0) for source, piece in receives]
            return posted + [group.send([tensor], to, 0) for to, tensor in sends]
        made = [dist.P2POp(dist.irecv, piece, group=group, group_peer=source) for source, piece in receives]
        made += [dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for to, tensor in sends]
        return dist.batch_isend_irecv(made) if made else []

    def _group_of(self, axis: SubGroups | None) -> tuple[dist.ProcessGroup, int]:
        """The group of this rank's sub-group, and how many ranks it has."""
        if axis is None or axis.size_of(self.rank) == self.world_size:
            return self.group, self.world_size
        if axis not in self._subgroups:
            whole = dist.get_process_group_ranks(self.group)
            members = [whole[rank] for rank in axis.members(self.rank)]
            device = torch.device("cpu" if self._is_gloo else "cuda")
            self._subgroups[axis] = new_group(
                self.group, members, deadline_of(self.group, device), f"a group of {axis}"
            )
        return self._subgroups[axis], axis.size_of(self.rank)

    def prepare(self, axes: Iterable[SubGroups]) -> None:
        """Make the groups of these axes now: two threads that made theirs later might not meet each other's."""
        for axis in axes:
            if axis.size_of(self.rank) > 1:
                self._group_of(axis)

    def close(self) -> None:
        """Let go of the sub-groups, and forget the group itself, which belongs to whoever gave it."""
        while self._subgroups:
            destroy(self._subgroups.popitem()[1])
        del self.group


Issued = tuple[Sequence[dist.Work], Tensor]
"""What is under way, and the tensor that will hold the result."""

_Letters = list[tuple[int, Tensor]]
"""Peers of a group, and what goes to or comes from each."""


def _filled(messages: _Letters) -> _Letters:
    """Messages that have something in them: both ends know the size, and leave out the others alike."""
    return [(peer, tensor) for peer, tensor in messages if tensor.numel()]


def _started(work: dist.Work | None, result: Tensor) -> Issued:
    assert work is not None, "this process is no member of the group"
    return [work], result


def _described(request: Collective) -> str:
    """A collective, for errors."""
    return f"{type(request).__name__} of {request.nbytes:,} bytes" + (f" on {request.axis}" if request.axis else "")
