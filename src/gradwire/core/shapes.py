"""What collectives are answered where tensors have no data: results of the right shape."""

from __future__ import annotations

from torch import Tensor

from gradwire.core.collective import AllGather, AllReduce, AllToAll, AllToAllV, Collective
from gradwire.core.messages import SendRecv


class Shapes:
    """Answers of the right shape to what one of `world_size` ranks asks for.

    A method for each kind of collective, called by its `verb`, as in a transport.

    Args:
        world_size: how many ranks there are.
        rank: which of them asks.

    >>> import torch
    >>> Shapes(4).all_gather(AllGather(torch.empty(8, dtype=torch.uint8, device="meta"))).shape
    torch.Size([4, 8])
    """

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size, self.rank = world_size, rank

    def ranks(self, request: Collective) -> int:
        """How many take part in a request."""
        return request.axis.size_of(self.rank) if request.axis else self.world_size

    def all_reduce(self, request: AllReduce) -> Tensor:
        """A result of the same shape."""
        return request.tensor

    def all_gather(self, request: AllGather) -> Tensor:
        """A row a rank."""
        return request.tensor.new_empty((self.ranks(request), request.length))

    def all_to_all(self, request: AllToAll) -> Tensor:
        """A result of the same shape."""
        return request.tensor

    def all_to_all_v(self, request: AllToAllV) -> Tensor:
        """A result of the size that is received."""
        return request.tensor.new_empty(request.length)

    def send_recv(self, request: SendRecv) -> Tensor:
        """A result of the size that is received."""
        return request.like.new_empty(request.length)
