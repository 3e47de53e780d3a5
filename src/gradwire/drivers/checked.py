"""A transport that finds payloads which were damaged on their way."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.core.collective import AllGather, AllToAll, Axis, Collective
from gradwire.core.errors import CommunicationError, PayloadError
from gradwire.drivers.interpreter import Pending, Transport, WrappedTransport, is_here

CHECKSUM_BYTES = 4


class Checked(WrappedTransport):
    """Wraps any transport: each payload of an all-gather or an all-to-all travels with its CRC-32.

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
        if not isinstance(request, AllGather | AllToAll) or not request.tensor.numel():
            return self.inner.issue(request)
        if request.tensor.device.type != "cpu":
            raise CommunicationError(f"checksums are made on a CPU, and this payload lies on {request.tensor.device}")
        whole = replace(request, tensor=_signed(request.tensor))
        return _Unchecked(self.inner.issue(whole), request, self.inner.rank, self._ranks)


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
        if not torch.equal(_checksums(payloads), rows[:, -CHECKSUM_BYTES:]):
            self._refuse(payloads, rows)
        return payloads

    def _refuse(self, payloads: Tensor, rows: Tensor) -> None:
        wrong = (_checksums(payloads) != rows[:, -CHECKSUM_BYTES:]).any(dim=1).nonzero().flatten().tolist()
        axis: Axis | None = self.request.axis
        senders = [self.names[axis.members(self.rank)[place] if axis else place] for place in wrong]
        kind = type(self.request).__name__
        raise PayloadError(
            f"the {kind} payload of rank {', '.join(map(str, senders))} was damaged on its way: its checksum is wrong"
        )


def _signed(payloads: Tensor) -> Tensor:
    """Rows, or one row, with a checksum behind each."""
    rows = payloads.contiguous().view(-1, payloads.shape[-1])
    whole = torch.cat([rows, _checksums(rows)], dim=1)
    return whole.view(*payloads.shape[:-1], whole.shape[1])


def _checksums(rows: Tensor) -> Tensor:
    """A row of bytes for each row."""
    sums = [zlib.crc32(row.numpy().tobytes()) for row in rows.contiguous()]
    return torch.tensor(sums, dtype=torch.int64).to(torch.uint32).view(-1, 1).view(torch.uint8)
