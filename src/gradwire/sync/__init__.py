"""Fewer synchronisations: ranks train alone for some steps and then average what they have.

`gossip` has ranks hear their neighbours in a graph and nobody else; `optimizers` are those whose communication is a
part of the update rule.
"""

from gradwire.core.recipe import Recipe
from gradwire.sync import gossip, optimizers
from gradwire.sync.averager import Averager
from gradwire.sync.averaging import Averaging
from gradwire.sync.buffers import Policy
from gradwire.sync.elastic import Elastic, ElasticOptimizer
from gradwire.sync.gossip import CHOCO, DPSGD, SGP, Gossip
from gradwire.sync.hierarchical import Hierarchical
from gradwire.sync.local_sgd import AveragingOptimizer, LocalSGD
from gradwire.sync.outer import BMUF, DiLoCo, Mean, Outer, Rates, SlowMo
from gradwire.sync.schedules import Constant, DriftTriggered, Increasing, Schedule
from gradwire.sync.spec import is_sync, parse

__all__ = [
    "BMUF",
    "CHOCO",
    "DPSGD",
    "SGP",
    "Averager",
    "Averaging",
    "AveragingOptimizer",
    "Constant",
    "DiLoCo",
    "DriftTriggered",
    "Elastic",
    "ElasticOptimizer",
    "Gossip",
    "Hierarchical",
    "Increasing",
    "LocalSGD",
    "Mean",
    "Outer",
    "Policy",
    "Rates",
    "Recipe",
    "Schedule",
    "SlowMo",
    "gossip",
    "is_sync",
    "optimizers",
    "parse",
]
