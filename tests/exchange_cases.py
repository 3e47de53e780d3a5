"""What the ranks of `test_exchanges.py` run: rows swapped and gathered, and which calls of Gloo carried them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.core.axis import Axis, SubGroups
from gradwire.core.collective import AllGather, AllToAll
from gradwire.core.link import Link
from gradwire.drivers.interpreter import ask
from gradwire.drivers.process_group import LARGE_ROWS_BYTES, SLOW_ROW_S, SMALL_ROW_BYTES, GroupTransport

BYTE_S = 1e-6
SLOW = round(SLOW_ROW_S / BYTE_S)
"""Bytes from which on a row is slow on the link of the cases, which is timed as `BYTE_S` a byte."""
ROWS = (1, SLOW - 1, SLOW, SMALL_ROW_BYTES, SMALL_ROW_BYTES + 1, LARGE_ROWS_BYTES)
CALLS = {"send": "sent", "alltoall_base": "swapped", "all_gather_single": "gathered", "_allgather_base": "gathered"}


def counted() -> Counter[str]:
    """Count the calls of process groups from now on, by what they do."""
    counts, group = Counter[str](), dist.ProcessGroup

    def counting(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            counts[what] += 1
            return call(*arguments, **named)

        return count

    for name, what in CALLS.items():
        if hasattr(group, name):
            setattr(group, name, counting(getattr(group, name), what))
    return counts


def row(source: int, to: int, nbytes: int) -> Tensor:
    """Bytes that tell a row from all others."""
    return torch.arange(nbytes).mul(7).add(31 * source + to).to(torch.uint8)


def carried(rank: int, world_size: int, known: bool, halves: bool) -> dict[str, list[Any]]:
    """Swap and gather rows of each size; whether all is as expected, and by which calls, for each kind and size."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    transport, counts, found = GroupTransport(group), counted(), dict[str, list[Any]]()
    transport.link = Link(0.0, BYTE_S) if known else None
    axis: SubGroups | None = Axis(world_size // 2) if halves else None
    members = list(axis.members(rank)) if axis else list(range(world_size))
    for nbytes in ROWS:
        sent = torch.stack([row(rank, to, nbytes) for to in members])
        for name, request, expected in (
            ("swap", AllToAll(sent, axis), [row(source, rank, nbytes) for source in members]),
            ("gather", AllGather(row(rank, 0, nbytes), axis), [row(source, 0, nbytes) for source in members]),
        ):
            counts.clear()
            result = ask(request, transport)
            found[f"{name} {nbytes}"] = [torch.equal(result, torch.stack(expected)), dict(counts)]
    return found


def links(rank: int, world_size: int) -> list[tuple[float, float] | None]:
    """The link that the transport of a session knows: as it begins, after it is timed again, and by the session."""
    session = gradwire.Session({"w": torch.zeros(300_000)}, "int4")
    first = session.transport.link
    measured = session.measure_link()
    found = [first, session.transport.link, measured]
    session.close()
    return [(each.alpha_s, each.beta_s_per_byte) if each else None for each in found]


def stepped(rank: int, world_size: int) -> tuple[float, dict[str, int]]:
    """The mean that a step of `int4` gives, and by which calls it travelled."""
    gradients = {"w": torch.linspace(-1, 1, 200_000) * (rank + 1)}
    session = gradwire.Session(gradients, "int4")
    counts = counted()
    session.reduce_(gradients)
    found = float(gradients["w"].abs().sum()), {name: counts[name] for name in ("sent", "swapped", "gathered")}
    session.close()
    return found
