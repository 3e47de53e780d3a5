"""The collectives of torch.distributed, each with tensors whose exact result is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from gradwire.bench.errors import BenchError

_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.int8: 127, torch.uint8: 255}
"""The largest n for which all whole numbers from 0 to n are numbers of a type; the others have all of those below."""
_MOST_VALUES = 1 << 10


@dataclass(frozen=True, eq=False)
class CollectivePlace:
    """Where a collective runs, and on what.

    Attributes:
        group: whose ranks take part.
        device: where tensors lie.
        dtype: of their elements.
        count: elements as nccl-tests counts them: of what a rank sends to one other, or of the whole where there are no
            such parts.
        root: the rank that sends or receives all, where there is one.
    """

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    count: int
    root: int

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self.group.size()

    def in_default_group(self, rank: int) -> int:
        """The number by which most calls of torch.distributed want a rank of the group."""
        return dist.get_global_rank(self.group, rank)

    def empty(self, rows: int = 1) -> Tensor:
        """Room for `rows` times the count."""
        return torch.empty(rows * self.count, dtype=self.dtype, device=self.device)

    def values(self, source: int, modulus: int) -> Tensor:
        """Whole numbers that tell sources apart: (i + 13 source) mod `modulus` for element i."""
        numbers = torch.arange(self.count, dtype=torch.int64, device=self.device)
        return ((numbers + 13 * source) % modulus).to(self.dtype)

    def addends(self, source: int) -> Tensor:
        """The same, so small that the sum over all ranks is exact in the type, in whatever order it is taken.

        Raises:
            BenchError: no numbers but 0 are so small.
        """
        largest = _EXACT.get(self.dtype, _MOST_VALUES * self.ranks) // self.ranks
        if not largest:
            name = str(self.dtype).removeprefix("torch.")
            raise BenchError(f"sums over {self.ranks} ranks are not exact in {name}: give --dtype float32")
        return self.values(source, min(largest + 1, _MOST_VALUES))

    def sums(self) -> Tensor:
        """The exact sum of all ranks' addends."""
        total = self.addends(0)
        for source in range(1, self.ranks):
            total += self.addends(source)
        return total

    def copies(self, source: int) -> Tensor:
        """Numbers that a type can tell apart, for what is moved and not summed."""
        return self.values(source, min(_EXACT.get(self.dtype, _MOST_VALUES), _MOST_VALUES))


class CollectiveCall(ABC):
    """One collective: its tensors, the call, and the check of its result.

    Attributes:
        name: of the row.
        sums: whether it adds up, so that a row shows the operation.
        has_root: whether one rank sends or receives all.
        has_parts: whether ranks gather or scatter: then the size is n times the count.
    """

    name: ClassVar[str]
    sums: ClassVar[bool] = False
    has_root: ClassVar[bool] = False
    has_parts: ClassVar[bool] = False

    def __init__(self, place: CollectivePlace) -> None:
        self.place = place

    @classmethod
    def bus_factor(cls, ranks: int) -> float:
        """What the algorithm's bandwidth times this is: the bandwidth of the slowest link, as nccl-tests has it."""
        return (ranks - 1) / ranks if cls.has_parts else 1.0

    @classmethod
    def count_of(cls, nbytes: int, element_bytes: int, ranks: int) -> int:
        """The count of a row of about so many bytes: at least one element for each part."""
        return max(1, nbytes // (element_bytes * (ranks if cls.has_parts else 1)))

    @classmethod
    def nbytes_of(cls, count: int, element_bytes: int, ranks: int) -> int:
        """The size of a row of this count."""
        return count * element_bytes * (ranks if cls.has_parts else 1)

    @abstractmethod
    def fill(self) -> None:
        """Write what this rank gives, and nothing that belongs to a result."""

    @abstractmethod
    def call(self) -> None:
        """Run the collective once."""

    @abstractmethod
    def wrong(self) -> int:
        """How many elements are not what they should be on this rank, after `fill` and one `call`."""

    def rest(self) -> None:
        """Write what many calls in a row leave as it is: a sum that is summed up again soon leaves its type."""
        self.fill()


class _InPlace(CollectiveCall):
    """A collective whose result lies where its input lay."""

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.buffer = place.empty()

    @override
    def rest(self) -> None:
        self.buffer.zero_()


class AllReduceCall(_InPlace):
    """The sum over ranks, on all of them: 2 (n - 1)/n of it crosses each link in a ring."""

    name, sums = "all_reduce", True

    @classmethod
    @override
    def bus_factor(cls, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    @override
    def fill(self) -> None:
        self.buffer.copy_(self.place.addends(self.place.rank))

    @override
    def call(self) -> None:
        dist.all_reduce(self.buffer, group=self.place.group)

    @override
    def wrong(self) -> int:
        return _differing(self.buffer, self.place.sums())


class ReduceCall(_InPlace):
    """The sum over ranks, on the root."""

    name, sums, has_root = "reduce", True, True

    @override
    def fill(self) -> None:
        self.buffer.copy_(self.place.addends(self.place.rank))

    @override
    def call(self) -> None:
        dist.reduce(self.buffer, self.place.in_default_group(self.place.root), group=self.place.group)

    @override
    def wrong(self) -> int:
        return _differing(self.buffer, self.place.sums()) if self.place.rank == self.place.root else 0


class BroadcastCall(_InPlace):
    """What the root has, on all ranks."""

    name, has_root = "broadcast", True

    @override
    def fill(self) -> None:
        if self.place.rank == self.place.root:
            self.buffer.copy_(self.place.copies(self.place.root))
        else:
            self.buffer.fill_(-1 if self.buffer.dtype.is_signed else 255)

    @override
    def call(self) -> None:
        dist.broadcast(self.buffer, self.place.in_default_group(self.place.root), group=self.place.group)

    @override
    def wrong(self) -> int:
        return _differing(self.buffer, self.place.copies(self.place.root))


class AllGatherCall(CollectiveCall):
    """The parts of all ranks, on all of them."""

    name, has_parts = "all_gather", True

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.given, self.whole = place.empty(), place.empty(place.ranks)

    @override
    def fill(self) -> None:
        self.given.copy_(self.place.copies(self.place.rank))
        self.whole.zero_()

    @override
    def call(self) -> None:
        _all_gather(self.whole, self.given, group=self.place.group)

    @override
    def wrong(self) -> int:
        parts = self.whole.chunk(self.place.ranks)
        return sum(_differing(part, self.place.copies(source)) for source, part in enumerate(parts))


class ReduceScatterCall(CollectiveCall):
    """The sum over ranks, of which each has its part."""

    name, sums, has_parts = "reduce_scatter", True, True

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.given, self.part = place.empty(place.ranks), place.empty()

    @override
    def fill(self) -> None:
        for index, part in enumerate(self.given.chunk(self.place.ranks)):
            part.copy_(self.place.addends(self.place.rank + index))
        self.part.zero_()

    @override
    def call(self) -> None:
        _reduce_scatter(self.part, self.given, group=self.place.group)

    @override
    def wrong(self) -> int:
        total = torch.zeros_like(self.part)
        for source in range(self.place.ranks):
            total += self.place.addends(source + self.place.rank)
        return _differing(self.part, total)


class AllToAllCall(CollectiveCall):
    """A part from each rank to each."""

    name, has_parts = "all_to_all", True

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.given, self.taken = place.empty(place.ranks), place.empty(place.ranks)

    @override
    def fill(self) -> None:
        for index, part in enumerate(self.given.chunk(self.place.ranks)):
            part.copy_(self.place.copies(self.place.rank * self.place.ranks + index))
        self.taken.zero_()

    @override
    def call(self) -> None:
        dist.all_to_all_single(self.taken, self.given, group=self.place.group)

    @override
    def wrong(self) -> int:
        place = self.place
        parts = enumerate(self.taken.chunk(place.ranks))
        return sum(_differing(part, place.copies(source * place.ranks + place.rank)) for source, part in parts)


class GatherCall(CollectiveCall):
    """The parts of all ranks, on the root."""

    name, has_root, has_parts = "gather", True, True

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.given = place.empty()
        self.parts = list(place.empty(place.ranks).chunk(place.ranks)) if place.rank == place.root else None

    @override
    def fill(self) -> None:
        self.given.copy_(self.place.copies(self.place.rank))
        for part in self.parts or []:
            part.zero_()

    @override
    def call(self) -> None:
        dist.gather(self.given, self.parts, self.place.in_default_group(self.place.root), group=self.place.group)

    @override
    def wrong(self) -> int:
        return sum(_differing(part, self.place.copies(source)) for source, part in enumerate(self.parts or []))


class ScatterCall(CollectiveCall):
    """A part from the root to each rank."""

    name, has_root, has_parts = "scatter", True, True

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.part = place.empty()
        self.parts = list(place.empty(place.ranks).chunk(place.ranks)) if place.rank == place.root else None

    @override
    def fill(self) -> None:
        for index, part in enumerate(self.parts or []):
            part.copy_(self.place.copies(index))
        self.part.zero_()

    @override
    def call(self) -> None:
        dist.scatter(self.part, self.parts, self.place.in_default_group(self.place.root), group=self.place.group)

    @override
    def wrong(self) -> int:
        return _differing(self.part, self.place.copies(self.place.rank))


class SendRecvCall(CollectiveCall):
    """A message from each rank to the next one, and from the last one to the first."""

    name = "send_recv"

    def __init__(self, place: CollectivePlace) -> None:
        super().__init__(place)
        self.given, self.taken = place.empty(), place.empty()

    @override
    def fill(self) -> None:
        self.given.copy_(self.place.copies(self.place.rank))
        self.taken.zero_()

    @override
    def call(self) -> None:
        place = self.place
        after, before = (place.in_default_group((place.rank + step) % place.ranks) for step in (1, -1))
        messages = [
            dist.P2POp(dist.irecv, self.taken, before, place.group),  # before the send, or it waits behind its bytes
            dist.P2POp(dist.isend, self.given, after, place.group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    @override
    def wrong(self) -> int:
        return _differing(self.taken, self.place.copies((self.place.rank - 1) % self.place.ranks))


def _differing(found: Tensor, wanted: Tensor) -> int:
    return int((found != wanted).sum())


def _renamed(new: str, old: str) -> Any:
    """A function of torch.distributed by its new name, or in PyTorch that does not have it yet by its old one."""
    return getattr(dist, new, None) or getattr(dist, old)


_all_gather = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")

CALLS: dict[str, type[CollectiveCall]] = {
    kind.name: kind
    for kind in (
        AllReduceCall,
        AllGatherCall,
        ReduceScatterCall,
        AllToAllCall,
        BroadcastCall,
        ReduceCall,
        GatherCall,
        ScatterCall,
        SendRecvCall,
    )
}
"""All of them by name, in the order of `gradwire.bench.options.COLLECTIVES`."""
