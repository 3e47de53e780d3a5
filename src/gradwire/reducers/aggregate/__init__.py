"""Aggregation rules: what n gradients become where that is not their mean."""

from gradwire.reducers.aggregate.adasum import Adasum
from gradwire.reducers.aggregate.coordinate import Median, TrimmedMean
from gradwire.reducers.aggregate.exchange import Aggregate, Gathered, RuleOnShards, Sharded
from gradwire.reducers.aggregate.geometric import CenteredClipping, GeometricMedian
from gradwire.reducers.aggregate.krum import Bulyan, Krum, MultiKrum
from gradwire.reducers.aggregate.private import PrivateMean, PrivateReports, epsilon, epsilon_of_replacing
from gradwire.reducers.aggregate.rule import GeometricRule, Rule
from gradwire.reducers.aggregate.weighted import GIVEN, Weighted, Weights

__all__ = [
    "GIVEN",
    "Adasum",
    "Aggregate",
    "Bulyan",
    "CenteredClipping",
    "Gathered",
    "GeometricMedian",
    "GeometricRule",
    "Krum",
    "Median",
    "MultiKrum",
    "PrivateMean",
    "PrivateReports",
    "Rule",
    "RuleOnShards",
    "Sharded",
    "TrimmedMean",
    "Weighted",
    "Weights",
    "epsilon",
    "epsilon_of_replacing",
]
