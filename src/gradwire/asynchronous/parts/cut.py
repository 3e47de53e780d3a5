"""How parameters are cut into parts, and the server of a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.names import Names
from gradwire.asynchronous.server import Server
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key


@dataclass(frozen=True)
class Parts:
    """Part p of S has the elements p d // S to (p + 1) d // S of the vector of all parameters, in their order.

    So sizes differ by one element at most, and a tensor may lie on several servers.

    Args:
        numel: d.
        servers: S, from 1 to d.

    Raises:
        CompositionError: another number of servers.

    >>> import torch
    >>> Parts(numel=5, servers=2).cut(torch.arange(5))
    [tensor([0, 1]), tensor([2, 3, 4])]
    """

    numel: int
    servers: int

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= self.numel:
            raise CompositionError(
                f"{self.servers} servers for {self.numel} parameters: give 1 or more, and a parameter to each"
            )

    def bounds(self, part: int) -> tuple[int, int]:
        """Where a part begins in the vector, and where it ends."""
        return part * self.numel // self.servers, (part + 1) * self.numel // self.servers

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return views of the parts of a vector (d,)."""
        return [flat[slice(*self.bounds(part))] for part in range(self.servers)]


def named_parts(names: Names, flat: Tensor, servers: int) -> list[dict[str, Tensor]]:
    """Return for each part what its server keeps: one tensor, whose name tells the model, the part and their number.

    Args:
        names: of the whole model.
        flat: (d,) its parameters; what is returned are views.
        servers: S.

    Raises:
        CompositionError: as `Parts`.

    >>> import torch
    >>> first, _ = named_parts(Names({"x": torch.ones(4)}), torch.ones(4), 2)
    >>> [(name.split(" of ", 1)[0], tensor.shape) for name, tensor in first.items()]
    [('elements 0 to 2', torch.Size([2]))]
    """
    parts = Parts(names.numel, servers)
    ranges = (" to ".join(map(str, parts.bounds(part))) for part in range(servers))
    ids = (f"elements {which} of {names.numel} of {names.fingerprint}" for which in ranges)
    return [{name: piece} for name, piece in zip(ids, parts.cut(flat), strict=True)]


def part_seed(seed: int, part: int) -> int:
    """The seed of a part's codecs: pushes of one worker and number to different servers draw different bits.

    >>> part_seed(0, 0) != part_seed(0, 1)
    True
    """
    return Key(seed=seed, name="part", rank=part).bits >> 1  # 63 bits, as seeds are saved


def server_of(job: Job, part: int, servers: int) -> Server:
    """Return the core of a part's server, as the job begins.

    Raises:
        CompositionError: as `Parts` and `Server`.
    """
    names = Names(job.parameters)
    return Server(
        named_parts(names, names.flat(job.parameters), servers)[part],
        job.rule,
        workers=job.workers,
        pace=job.pace,
        length=job.length,
        sending=job.sending,
        seed=part_seed(job.seed, part),
    )


def accounts_like(like: Mapping[str, Tensor], servers: int) -> list[Names]:
    """Return the names of what each server keeps.

    Raises:
        CompositionError: as `Parts` and `Names`.
    """
    names = Names(like)
    return [Names(part) for part in named_parts(names, names.flat(like), servers)]
