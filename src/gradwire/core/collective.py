"""What a program may ask for. A program yields one of these and is sent the result; a driver does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum (or maximum) over ranks of `tensor`, elementwise.

    `consumable` says that the driver may overwrite `tensor`; else it must leave it as it is.
    """

    tensor: Tensor
    op: Literal["sum", "max"] = "sum"
    consumable: bool = False


@dataclass(frozen=True, eq=False)
class AllGather:
    """Every rank's `tensor`, a 1-d uint8 buffer, stacked in rank order: shape `(world_size, bytes)`."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Row j of `tensor` goes to rank j: shape `(world_size, bytes)` in, row i of the result is from rank i."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Agree:
    """Whether `flag` (a 0-d bool tensor) is true on any rank.

    All of a step's `Agree`s travel as one collective once every program of the step has reached its own, so
    they cost one latency a step; a program should yield it last.
    """

    flag: Tensor


Collective = AllReduce | AllGather | AllToAll | Agree
