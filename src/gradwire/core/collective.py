"""What a program may ask for. A program yields one of these and is sent the result; a driver does the work."""

from __future__ import annotations

from collections.abc import Hashable
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


@dataclass(frozen=True, eq=False)
class Total:
    """Sum of `tensor`, float64 and small, over all grains of the step whose programs give an equal `of`.

    What a rule must know of the whole gradient (its norm, the distances between ranks) while a program sees one grain
    of it. With `over` "grains" the sum is of this rank's grains alone and costs no bytes; with "ranks" it runs over all
    ranks' as well and is the same on each bit for bit: grains in planned order, then ranks in theirs. Like `Agree`, a
    program waits for it until all programs of the step have come so far, and those of a step travel as one collective.
    `of` is usually the reducer; a program that asks twice tells its stages apart by it.
    """

    tensor: Tensor
    of: Hashable
    over: Literal["grains", "ranks"] = "ranks"


Collective = AllReduce | AllGather | AllToAll | Agree | Total
