"""One collective for many requests of a kind.

All ranks run the same programs, so they yield the same kinds in the same order with the same sizes; grouping by kind
in order of first appearance is therefore the same on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.collective import Agree, AllGather, AllReduce, Axis, Collective, SendRecv, Total

Kind = tuple[type[Collective], torch.dtype, str, Axis | None]


def kind_of(request: Collective) -> Kind:
    """What must be equal for requests to share a collective."""
    if isinstance(request, Agree):
        return Agree, torch.uint8, "max", None
    if isinstance(request, SendRecv):
        return SendRecv, request.like.dtype, "", request.axis
    assert not isinstance(request, Total), "totals are added first, then `sums_to_send`"
    op = request.op if isinstance(request, AllReduce) else ""
    return type(request), request.tensor.dtype, op, request.axis


@dataclass(frozen=True)
class Batch:
    """Requests that travel as one, and the buffer that carries them.

    `members` are positions in the round. For `AllReduce` and `AllGather` the buffer is 1-d; for `AllToAll` it has one
    row a rank, in which each request has its columns. Rounds of `SendRecv` start together, but each message travels for
    itself, since two that leave for one rank need not have been joined where they arrive; their buffer is empty and
    the result has what the requests receive end to end.
    """

    kind: Kind
    members: tuple[int, ...]
    buffer: Tensor
    sizes: tuple[int, ...]
    requests: tuple[Collective, ...]

    @property
    def axis(self) -> Axis | None:
        """The ranks that take part."""
        return self.kind[3]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands over."""
        return sum(request.nbytes for request in self.requests)

    def split(self, result: Tensor) -> list[Tensor]:
        """Cut the result of the collective into the results of the requests, as views."""
        if len(self.members) == 1:
            request = self.requests[0]
            return [result.view(request.tensor.shape) if isinstance(request, AllReduce) else result]
        pieces = result.split(list(self.sizes), dim=-1)
        if self.kind[0] is AllReduce:
            shapes = [r.tensor.shape for r in self.requests if isinstance(r, AllReduce)]
            return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return [piece.contiguous() for piece in pieces]


def coalesce(requests: Sequence[tuple[int, Collective]]) -> list[Batch]:
    """Group the requests of one round, each given with its position, into batches."""
    groups: dict[Kind, list[tuple[int, Collective]]] = {}
    for position, request in requests:
        groups.setdefault(kind_of(request), []).append((position, request))
    return [_batch(kind, members) for kind, members in groups.items()]


Sum = tuple[str, Hashable]
"""What is added up: over what, and of whom."""


def sum_of(total: Total) -> Sum:
    """What must be equal for totals to be added."""
    return total.over, total.of


def add_grains(totals: Sequence[Total]) -> dict[Sum, Tensor]:
    """Add up one rank's totals, which stand in the order of its grains."""
    sums: dict[Sum, Tensor] = {}
    for total in totals:
        name = sum_of(total)
        sums[name] = sums[name] + total.tensor if name in sums else total.tensor
    return sums


def sums_to_send(sums: Mapping[Sum, Tensor]) -> list[tuple[int, Collective]]:
    """The requests of one round for those of `sums` that run over ranks, each with its position among all."""
    return [
        (position, AllGather(tensor.contiguous().view(-1).view(torch.uint8)))
        for position, ((over, _), tensor) in enumerate(sums.items())
        if over == "ranks"
    ]


def add_ranks(rows: Tensor, like: Tensor) -> Tensor:
    """Add the rows of a gathered sum in rank order."""
    first, *others = rows.view(like.dtype).unbind(0)
    for row in others:
        first = first + row
    return first.view(like.shape)


def _batch(kind: Kind, members: list[tuple[int, Collective]]) -> Batch:
    requests = tuple(request for _, request in members)
    if kind[0] is SendRecv:
        return _rounds(kind, members)
    tensors = [_carried(request) for request in requests]
    sizes = tuple(tensor.shape[-1] for tensor in tensors)
    if len(tensors) > 1:
        buffer = torch.cat(tensors, dim=-1)
    else:
        buffer = _own(requests[0], tensors[0])
    return Batch(kind, tuple(position for position, _ in members), buffer, sizes, requests)


def _rounds(kind: Kind, members: list[tuple[int, Collective]]) -> Batch:
    requests = tuple(request for _, request in members if isinstance(request, SendRecv))
    sizes = tuple(request.received_numel for request in requests)
    return Batch(kind, tuple(position for position, _ in members), requests[0].like.new_empty(0), sizes, requests)


def _carried(request: Collective) -> Tensor:
    assert not isinstance(request, SendRecv)
    if isinstance(request, Agree):
        return request.flag.view(1).to(torch.uint8)
    return request.tensor.reshape(-1) if isinstance(request, AllReduce) else request.tensor


def _own(request: Collective, tensor: Tensor) -> Tensor:
    """A buffer that an in-place all-reduce may overwrite."""
    overwritten = isinstance(request, AllReduce) and not request.consumable
    return tensor.clone() if overwritten else tensor
