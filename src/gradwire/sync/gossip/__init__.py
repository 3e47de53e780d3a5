"""Decentralised training: ranks mix their models with those of their neighbours in a graph, and never with all."""

from gradwire.sync.gossip.choco import CHOCO
from gradwire.sync.gossip.d_psgd import DPSGD
from gradwire.sync.gossip.gossip import Gossip
from gradwire.sync.gossip.graphs import (
    Complete,
    Exponential,
    Graph,
    Neighbours,
    OnePeerExponential,
    Ring,
    Torus,
    Weighted,
)
from gradwire.sync.gossip.method import GossipMethod, OnGraph
from gradwire.sync.gossip.naming import graph
from gradwire.sync.gossip.sgp import SGP

__all__ = [
    "CHOCO",
    "DPSGD",
    "SGP",
    "Complete",
    "Exponential",
    "Gossip",
    "GossipMethod",
    "Graph",
    "Neighbours",
    "OnGraph",
    "OnePeerExponential",
    "Ring",
    "Torus",
    "Weighted",
    "graph",
]
