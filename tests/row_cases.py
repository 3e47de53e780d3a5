"""What the ranks of `test_all_to_all_v.py` run: rows of unequal sizes, in one process or in several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.axis import Axis
from gradwire.core.collective import AllToAllV
from gradwire.core.program import Program, along
from gradwire.drivers.checked import Checked
from gradwire.drivers.interpreter import Interpreter, Traffic, run
from gradwire.drivers.process_group import GroupTransport

Sizes = Sequence[Sequence[int]]
"""Bytes from each rank (a row) to each rank (a column)."""

SIZES: dict[str, list[Sizes]] = {
    "even": [[[4] * 3] * 3],
    "uneven": [[[0, 1, 2], [3, 0, 5], [6, 7, 0]]],
    "own rows": [[[9, 1, 0], [0, 8, 2], [0, 0, 7]]],
    "one rank idle": [[[0, 5, 0], [3, 2, 0], [0, 0, 0]]],
    "nobody sends": [[[0] * 3] * 3],
    "two requests": [[[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0, 3, 0], [1, 0, 0], [2, 0, 11]]],
    "three requests, one empty": [[[1] * 3] * 3, [[0] * 3] * 3, [[2, 0, 1], [0, 2, 0], [1, 1, 1]]],
    "large": [[[300_000, 1, 700_001], [0, 5, 1_500_000], [900_000, 0, 3]]],
}


def content(number: int, source: int, to: int, nbytes: int) -> Tensor:
    """The row of a request from one rank to another: bytes that tell it from all others."""
    generator = torch.Generator().manual_seed(100 * number + 10 * source + to)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def asked(number: int, sizes: Sizes, place: int, name: int | None = None) -> Program[Tensor]:
    """Send this rank's rows, and return what came; rows say what their sender is called."""
    sends = tuple(sizes[place])
    rows = [content(number, place if name is None else name, to, nbytes) for to, nbytes in enumerate(sends)]
    receives = tuple(row[place] for row in sizes)
    return (yield AllToAllV(torch.cat(rows), sends, receives, place))


def expected(number: int, sizes: Sizes, place: int) -> Tensor:
    """What a rank must receive."""
    return torch.cat([content(number, source, place, row[place]) for source, row in enumerate(sizes)])


def sent(several: Sequence[Sizes], place: int) -> int:
    """Bytes that a rank sends to others."""
    return sum(sum(sizes[place]) - sizes[place][place] for sizes in several)


def exchanged(rank: int, world_size: int) -> dict[str, list[object]]:
    """Every case on a process group, plain and with checksums: whether all is as expected, and the bytes counted."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    found: dict[str, list[object]] = {}
    for name, several in SIZES.items():
        for transport in (GroupTransport(group), Checked(GroupTransport(group))):
            traffic = Traffic()
            programs = [asked(number, sizes, rank) for number, sizes in enumerate(several)]
            results = run(Interpreter[Tensor](transport, traffic).script(1, lambda _, wave=programs: wave))
            wanted = [expected(number, sizes, rank) for number, sizes in enumerate(several)]
            equal = all(torch.equal(result, want) for result, want in zip(results, wanted, strict=True))
            found.setdefault(name, []).extend([equal, traffic.wire_bytes])
    return found


def on_an_axis(rank: int, world_size: int) -> list[int]:
    """Rows within each pair of four ranks."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    axis, sizes = Axis(2), [[1, 2], [0, 3]]
    program = along(asked(0, sizes, axis.index(rank), name=rank), axis)
    (result,) = run(Interpreter[Tensor](GroupTransport(group)).script(1, lambda _: [program]))
    dist.barrier()  # rank 0 has the store by which the other pair's group may still be being made
    return result.tolist()
