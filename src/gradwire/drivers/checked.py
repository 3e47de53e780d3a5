"""A transport that finds payloads which were damaged on their way."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.core.axis import SubGroups
from gradwire.core.collective import AllGather, AllToAll, AllToAllV, Collective
from gradwire.core.errors import CommunicationError, PayloadError
from gradwire.drivers.interpreter import Pending, Transport, WrappedTransport, is_here

CHECKSUM_BYTES = 4


class Checked(WrappedTransport):
    """Wraps any transport: each payload of an all-gather or an all-to-all (a row of any size) travels with its CRC-32.

    TCP has a checksum of 16 bits, which misses one damaged packet in 65,536, and a bit that flips in memory is seen by
    nobody. Sums are not covered: how they travel is the backend's affair.

    Args:
        inner: what moves tensors; on a CPU, since checksums are made there.
        ranks: what errors call its ranks (default: by their own numbers).

    >>> from gradwire.drivers.interpreter import ask
    >>> from gradwire.drivers.lockstep import Meeting, VirtualTransport
    >>> ask(AllGather(torch.tensor([1, 2], dtype=torch.uint8)), Checked(VirtualTransport(Meeting(1), 0)))
    tensor([[1, 2]], dtype=torch.uint8)
    """

    def __init__(self, inner: Transport, ranks: Sequence[int] | None = None) -> None:
        super().__init__(inner)
        self._ranks = ranks if ranks is not None else range(inner.world_size)

    def issue(self, request: Collective) -> Pending:
        """Start a collective. Waiting for its result raises `PayloadError` where a row is not what was sent.

        Raises:
            CommunicationError: a payload that does not lie on a CPU.
        """
        if not isinstance(request, AllGather | AllToAll | AllToAllV) or not request.nbytes + request.length:
            return self.inner.issue(request)
        if request.tensor.device.type != "cpu":
            raise CommunicationError(f"checksums are made on a CPU, and this payload lies on {request.tensor.device}")
        pending = self.inner.issue(_whole(request))
        if isinstance(request, AllToAllV):
            return _UncheckedV(pending, request, self.inner.rank, self._ranks)
        return _Unchecked(pending, request, self.inner.rank, self._ranks)


def _whole(request: AllGather | AllToAll | AllToAllV) -> Collective:
    """The request with a checksum behind each row."""
    if isinstance(request, AllToAllV):
        tensor = torch.cat([_signed(row) if row.numel() else row for row in request.tensor.split(request.sends)])
        return replace(request, tensor=tensor, sends=_longer(request.sends), receives=_longer(request.receives))
    return replace(request, tensor=_signed(request.tensor))


def _longer(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of rows with checksums; a row of nothing has none."""
    return tuple(size + CHECKSUM_BYTES if size else 0 for size in sizes)


@dataclass(frozen=True, eq=False)
class _Unchecked:
    """A collective under way whose rows carry checksums."""

    pending: Pending
    request: Collective
    rank: int
    names: Sequence[int]

    def is_here(self) -> bool:
        return is_here(self.pending)

    def wait(self) -> Tensor:
        rows = self.pending.wait()
        payloads = rows[:, :-CHECKSUM_BYTES].contiguous()
        wrong = _checksums(payloads) != rows[:, -CHECKSUM_BYTES:]
        self.refuse(wrong.any(dim=1).nonzero().flatten().tolist())
        return payloads

    def refuse(self, wrong: Sequence[int]) -> None:
        """Raise an error that names the ranks at these places, if there are any."""
        if not wrong:
            return
        axis: SubGroups | None = self.request.axis
        senders = [self.names[axis.members(self.rank)[place] if axis else place] for place in wrong]
        kind = type(self.request).__name__
        raise PayloadError(
            f"the {kind} payload of rank {', '.join(map(str, senders))} was damaged on its way: its checksum is wrong"
        )


@dataclass(frozen=True, eq=False)
class _UncheckedV(_Unchecked):
    """The same, whose rows have sizes of their own."""

    request: AllToAllV

    def wait(self) -> Tensor:
        rows = self.pending.wait().split(_longer(self.request.receives))
        filled = [(place, row) for place, row in enumerate(rows) if row.numel()]
        self.refuse([place for place, row in filled if not torch.equal(row, _signed(row[:-CHECKSUM_BYTES]))])
        return torch.cat([row[:-CHECKSUM_BYTES] for row in rows])


def _signed(payloads: Tensor) -> Tensor:
    """Rows, or one row, with a checksum behind each."""
    rows = payloads.contiguous().view(-1, payloads.shape[-1])
    whole = torch.cat([rows, _checksums(rows)], dim=1)
    return whole.view(*payloads.shape[:-1], whole.shape[1])


def _checksums(rows: Tensor) -> Tensor:
    """A row of bytes for each row."""
    sums = [zlib.crc32(row.numpy().tobytes()) for row in rows.contiguous()]
    return torch.tensor(sums, dtype=torch.int64).to(torch.uint32).view(-1, 1).view(torch.uint8)
