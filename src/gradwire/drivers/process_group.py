"""`torch.distributed` as a transport: collectives on a process group, and on sub-groups of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.axis import SubGroups
from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.errors import ConnectionLost
from gradwire.core.link import Link
from gradwire.core.messages import SendRecv
from gradwire.drivers.groups import deadline_of, destroy, new_group
from gradwire.drivers.interpreter import Pending, served

SMALL_ROW_BYTES = 1 << 16
LARGE_ROWS_BYTES = 1 << 19
"""Bytes of a row up to which it is small, and of all rows from which on they are large, where no link is known."""
SLOW_ROW_S = 3e-3
"""What the bytes of a row take at least where its link is slow: on fewer bytes Gloo's all_to_all is the quickest."""


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


class _Started:
    """A collective under way. It is made for every message, so it costs little: it is no frozen dataclass, and what an
    error says of it is put into words where there is one."""

    __slots__ = ("_axis", "_began", "_issued", "_result", "_watcher", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        result: Tensor,
        issued: tuple[int, str, int],
        axis: SubGroups | None,
        began: float,
        watcher: Watcher | None,
    ) -> None:
        self._works, self._result, self._issued, self._axis = works, result, issued, axis
        self._began, self._watcher = began, watcher

    def wait(self) -> Tensor:
        """Return the result.

        Raises:
            ConnectionLost: a connection broke, or a rank fell silent.
        """
        watcher = self._watcher
        if watcher is not None:
            watcher.wait(*self._issued)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            if watcher is not None:
                watcher.lose(*self._issued)
            _, kind, nbytes = self._issued
            what = _described(kind, nbytes, self._axis)
            raise ConnectionLost(what, time.monotonic() - self._began, error) from error
        if watcher is not None:
            watcher.take(*self._issued)
        return self._result


class GroupTransport:
    """Issues batches on a process group, all of them asynchronous.

    Gloo's all_to_all sends before it receives. Where a row fills the link for a while, the word that a rank is ready to
    receive waits behind what that rank sends. So the two directions are used in turn: on two hosts that takes 1.9 times
    what the bytes of one direction take, and on four 1.6 times. The same messages, each receive posted before the
    sends, take 1.02 to 1.1. Each of them costs up to 2 ms more where cores are few, so short rows are not posted.

    Gloo's all_gather is a ring: four hosts take 4 ms for the smallest rows, and 1.5 to 2 times what an all_to_all of
    the repeated row takes on a fast link. Rows that fill the link are posted here too. On four hosts and more the ring
    is up to a tenth quicker alone, but not where several exchanges are under way, as in a step: its rounds wait for
    each other, and each of its calls has one of Gloo's two threads until it is over.

    How long a row fills the link is known once `link` is. Before that, and on sub-groups, sizes decide that are right
    at about 100 Mbit/s (`benchmarks/exchanges.py`, docs/building/log/links.md).

    Collectives on an axis have a group of their own for each sub-group, made when the first one is issued: all its
    members reach that place in the same static order. Messages between pairs travel on the whole group.

    Args:
        group: of all ranks.
        watcher: is told what this rank is doing.

    Attributes:
        link: what a message between two ranks of the whole group takes, alike on all ranks; None until somebody has
            timed it. It is set while nothing is under way, since all ranks must issue the same messages.
    """

    def __init__(self, group: dist.ProcessGroup, watcher: Watcher | None = None) -> None:
        self.group = group
        self.link: Link | None = None
        self._watcher = watcher
        self.rank, self.world_size = group.rank(), group.size()
        self._ranks = range(self.world_size)
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
            what = _described(kind, nbytes, request.axis)
            raise ConnectionLost(what, time.monotonic() - began, error) from error
        return _Started(works, result, (number, kind, nbytes), request.axis, began, self._watcher)

    def all_reduce(self, request: AllReduce) -> Issued:
        """Combine in place, and return the tensor."""
        buffer = request.tensor
        if not buffer.numel():  # backends differ on what they make of nothing
            return [], buffer
        group, op = self._group_of(request.axis)[0], dist.ReduceOp.SUM if request.op == "sum" else dist.ReduceOp.MAX
        if self._is_gloo and not buffer.is_complex():  # directly, as messages are sent
            return [group.allreduce([buffer], op)], buffer
        return _started(dist.all_reduce(buffer, op, group, async_op=True), buffer)

    def all_gather(self, request: AllGather) -> Issued:
        """By an all-to-all of the repeated row, but by the backend's own where it is large and no link is known."""
        row = request.tensor
        if not row.numel():
            size = request.axis.size_of(self.rank) if request.axis else self.world_size
            return [], row.new_empty((size, 0))
        group, size = self._group_of(request.axis)
        if self._is_gloo and (self._link_of(group) is not None or row.numel() <= SMALL_ROW_BYTES):
            return self._swapped(row.expand(size, -1), group)
        out = buffers.empty((size * row.numel(),), row.dtype, row.device)
        # Newer PyTorch renames it and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
        work = gather(out, row, group, async_op=True)
        return _started(work, out.view(size, -1))

    def all_to_all(self, request: AllToAll) -> Issued:
        """By messages where rows are slow, or large if no link is known."""
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
        """An all-to-all, also of one row that is repeated without a copy."""
        if self._is_gloo and self._is_posted(rows, group):
            return self._posted(rows, group)
        out, rows = buffers.like(rows), rows if rows.is_contiguous() else buffers.copied(rows)
        if self._is_gloo:
            return [group.alltoall_base(out, rows, [], [], dist.AllToAllOptions())], out
        return _started(dist.all_to_all_single(out, rows, group=group, async_op=True), out)

    def _link_of(self, group: dist.ProcessGroup) -> Link | None:
        return self.link if group is self.group else None

    def _is_posted(self, rows: Tensor, group: dist.ProcessGroup) -> bool:
        """Whether rows travel as messages: where they are slow, or large if no link is known."""
        link = self._link_of(group)
        if link is None:
            return rows.numel() >= LARGE_ROWS_BYTES
        return rows.shape[1] * link.beta_s_per_byte >= SLOW_ROW_S

    def _posted(self, rows: Tensor, group: dist.ProcessGroup) -> Issued:
        """An all-to-all as messages; each rank begins with the next one, so that not all begin with the same."""
        out, rank, n = buffers.like(rows), group.rank(), rows.shape[0]
        out[rank].copy_(rows[rank])
        peers = [(rank + i) % n for i in range(1, n)]
        sends, receives = [(peer, rows[peer]) for peer in peers], [(peer, out[peer]) for peer in reversed(peers)]
        return self._post(sends, receives, group), out

    def send_recv(self, request: SendRecv) -> Issued:
        """Post every receive, then every send, and wait for none of them: so no order of ranks can block a round."""
        result, sends, receives = self._letters(request)
        return self._post(sends, receives, self.group), result

    def prepared(self, request: SendRecv) -> Callable[[], Pending]:
        """Return what issues a round of messages again and again, each time into the same memory.

        All that is alike for each round is done here, once. Python that runs after a wait takes several times what it
        takes in a loop, so what is done for a message would be a third of the latency of a link without a delay.
        """
        if not self._is_gloo:
            return lambda: self.issue(request)
        result, sends, receives = self._letters(request)
        posts = [functools.partial(self.group.recv, [piece], source, 0) for source, piece in receives]
        posts += [functools.partial(self.group.send, [tensor], to, 0) for to, tensor in sends]
        kind, nbytes, axis, watcher = type(request).__name__, request.nbytes, request.axis, self._watcher

        def issue() -> Pending:
            began = time.monotonic()
            number = 0 if watcher is None else watcher.issue(kind, nbytes)
            try:
                works = [post() for post in posts]
            except RuntimeError as error:
                raise ConnectionLost(_described(kind, nbytes, axis), time.monotonic() - began, error) from error
            return _Started(works, result, (number, kind, nbytes), axis, began, watcher)

        return issue

    def _letters(self, request: SendRecv) -> tuple[Tensor, _Letters, _Letters]:
        """Memory for what a round receives, and the messages that have something in them."""
        like, expected = request.like, request.receives
        result = buffers.empty((request.length,), like.dtype, like.device)
        # A split takes longer than all else here, and most rounds have one message.
        pieces = (result,) if len(expected) == 1 else result.split([numel for _, numel in expected]) if expected else ()
        ranks = request.axis.members(self.rank) if request.axis else self._ranks
        # Messages that have something in them: both ends know the size, and leave out the others alike.
        receives = [(ranks[e.source], piece) for e, piece in zip(expected, pieces, strict=True) if e.numel]
        sends = [(ranks[to], tensor) for to, tensor in request.sends if tensor.numel()]
        return result, sends, receives

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


def _started(work: dist.Work | None, result: Tensor) -> Issued:
    assert work is not None, "this process is no member of the group"
    return [work], result


def _described(kind: str, nbytes: int, axis: SubGroups | None) -> str:
    """A collective, for errors."""
    return f"{kind} of {nbytes:,} bytes" + (f" on {axis}" if axis else "")
