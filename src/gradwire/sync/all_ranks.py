"""What all ranks agree on beside what they average: a few numbers at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.core.collective import AllReduce
from gradwire.drivers.interpreter import ask
from gradwire.session import Session
from gradwire.sync.copies import WholeCopy
from gradwire.sync.fragment import Fragment


class AllRanks:
    """All ranks of all copies: those that hold the same shard ask each other first, and then those of each copy.

    Args:
        session: of ranks that hold the same shard, or where models are whole of all ranks.
        shards: who has a copy together with this rank.
        device: where numbers travel.

    Attributes:
        rank, world_size: this one among all of them, and how many they are.
        sent_bytes: what this rank has sent so far.
    """

    def __init__(self, session: Session, shards: WholeCopy, device: torch.device) -> None:
        self._lane, self._transport, self._shards, self._device = session.lane, session.transport, shards, device
        self.rank = self._transport.rank * shards.total + shards.number
        self.world_size = self._transport.world_size * shards.total
        self.sent_bytes = 0

    def ask(self, request: AllReduce, where: str) -> Tensor:
        """The result of an all-reduce over all ranks.

        Args:
            request: alike on all of them.
            where: the step, for errors.

        Raises:
            CommunicationError: a rank failed or fell silent, by its number.
        """
        self.sent_bytes += request.wire_bytes(self._transport.world_size) + self._shards.wire_bytes(request)
        between = self._lane.call(lambda: ask(request, self._transport), where)
        return self._shards.ask(dataclasses.replace(request, tensor=between), where)

    def largest(self, values: Sequence[float], where: str) -> list[float]:
        """The largest that any rank has of each number."""
        return self.ask(
            AllReduce(torch.tensor(values, dtype=torch.float64, device=self._device), "max"), where
        ).tolist()

    def drift(self, fragments: Sequence[Fragment], where: str) -> float:
        """|x - x_0| / |x_0| over all parameters of a copy, the largest of all copies."""
        squares = torch.tensor([fragment.moved() for fragment in fragments], dtype=torch.float64)
        moved, whole = self._shards.ask(AllReduce(squares.sum(0).to(self._device)), where).tolist()
        return self.largest([(moved / whole) ** 0.5 if whole else 0.0], where)[0]

    def rates(self, optimizer: Optimizer, fragments: Sequence[Fragment], where: str) -> dict[str, float]:
        """The learning rate of each parameter, the largest that any rank has in its parameter group."""
        groups = optimizer.param_groups
        rates = self.largest([float(group["lr"]) for group in groups], where)
        of = {id(p): rate for group, rate in zip(groups, rates, strict=True) for p in group["params"]}
        return {name: of[id(p)] for part in fragments for name, p in part.parameters.items() if id(p) in of}
