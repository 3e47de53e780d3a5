"""Graphs and methods by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from gradwire.core.errors import CompositionError
from gradwire.core.nearest import nearest
from gradwire.sync.gossip.d_psgd import DPSGD
from gradwire.sync.gossip.graphs import Complete, Exponential, Graph, OnePeerExponential, Ring, Torus
from gradwire.sync.gossip.method import GossipMethod
from gradwire.sync.gossip.sgp import SGP

T = TypeVar("T")


def graph(name: str, ranks: int) -> Graph:
    """The graph of a name for a number of ranks: "ring", "torus", "exponential", "one-peer" or "complete".

    A torus has as many rows as columns, or the numbers nearest to each other that there are.

    Raises:
        CompositionError: another name, or a number of ranks that makes no such graph.

    >>> graph("torus", 12)
    Torus(rows=3, columns=4)
    >>> graph("rings", 12)
    Traceback (most recent call last):
        ...
    gradwire.core.errors.CompositionError: unknown graph 'rings': did you mean 'ring'?
    """
    return _meant(name, _GRAPHS, "graph", "or make one of your own by Neighbours or Weighted")(ranks)


def method(name: str) -> GossipMethod:
    """The gossip method of a name: "dpsgd" or "sgp".

    Raises:
        CompositionError: another name.

    >>> method("sgp")
    SGP()
    """
    return _meant(name, _METHODS, "gossip method", "or pass CHOCO(codec, gamma)")()


def _squarest(ranks: int) -> Torus:
    rows = max(divisor for divisor in range(1, math.isqrt(max(1, ranks)) + 1) if ranks % divisor == 0)
    return Torus(rows, ranks // rows)


_GRAPHS: Mapping[str, Callable[[int], Graph]] = {
    "ring": Ring,
    "torus": _squarest,
    "exponential": Exponential,
    "one-peer": OnePeerExponential,
    "complete": Complete,
}
_METHODS: Mapping[str, Callable[[], GossipMethod]] = {"dpsgd": DPSGD, "sgp": SGP}


def _meant(name: str, known: Mapping[str, T], what: str, otherwise: str) -> T:
    if name not in known:
        close = nearest(name, {key: key for key in known})
        hint = f"did you mean {close!r}?" if close else f"known are {', '.join(known)}, {otherwise}"
        raise CompositionError(f"unknown {what} {name!r}: {hint}")
    return known[name]
