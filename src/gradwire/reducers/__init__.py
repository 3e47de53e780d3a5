"""Algorithms with several messages: exchanges, PowerSGD, and the wrappers that go around them."""

from gradwire.reducers.acp_sgd import ACPSGD
from gradwire.reducers.adaptive_precision import AdaptivePrecision
from gradwire.reducers.adaptive_threshold import AdaptiveThreshold
from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Reducer, Wrapper
from gradwire.reducers.compression_warm_up import CompressionWarmUp
from gradwire.reducers.count_sketch import CountSketch
from gradwire.reducers.error_feedback import ErrorFeedback
from gradwire.reducers.exchange import AllGatherExchange, AllGatherVExchange, AllReduceExchange
from gradwire.reducers.factored_residual import FactoredErrorFeedback
from gradwire.reducers.gather import Gather, ShardGather, ShardwiseGather, Whole
from gradwire.reducers.gradzip import GradZip
from gradwire.reducers.guard import Guard
from gradwire.reducers.hierarchical import Hierarchical
from gradwire.reducers.lean_residual import EF21, LeanErrorFeedback
from gradwire.reducers.majority_vote import MajorityVote
from gradwire.reducers.measured import MeasuredBits
from gradwire.reducers.momentum_correction import DGC, MomentumCorrection
from gradwire.reducers.partition import HasRole, Partition, is_vector
from gradwire.reducers.power_sgd import PowerSGD
from gradwire.reducers.routes import Direct, RecursiveHalvingDoubling, Ring
from gradwire.reducers.scaled_fp16 import ScaledFP16
from gradwire.reducers.scatter_reduce import Scatter, ScatterReduce, ShardwiseScatterReduce, scatter_reduce
from gradwire.reducers.scheduled import Scheduled
from gradwire.reducers.sketch import Sketch
from gradwire.reducers.step import Program, Reduced, Sent, Step
from gradwire.reducers.svd import SVD
from gradwire.reducers.ternary_sum import TernarySum
from gradwire.reducers.tree_route import Tree
from gradwire.reducers.two_shot import SparseTwoShot, TwoShot, two_shot
from gradwire.reducers.worker_momentum import WorkerMomentum

__all__ = [
    "ACPSGD",
    "DGC",
    "EF21",
    "SVD",
    "AdaptivePrecision",
    "AdaptiveThreshold",
    "AllGatherExchange",
    "AllGatherVExchange",
    "AllReduceExchange",
    "Auto",
    "CompressionWarmUp",
    "CountSketch",
    "Direct",
    "ErrorFeedback",
    "FactoredErrorFeedback",
    "Gather",
    "GradZip",
    "Guard",
    "HasRole",
    "Hierarchical",
    "LeanErrorFeedback",
    "MajorityVote",
    "MeasuredBits",
    "MomentumCorrection",
    "Partition",
    "PowerSGD",
    "Program",
    "RecursiveHalvingDoubling",
    "Reduced",
    "Reducer",
    "Ring",
    "ScaledFP16",
    "Scatter",
    "ScatterReduce",
    "Scheduled",
    "Sent",
    "ShardGather",
    "ShardwiseGather",
    "ShardwiseScatterReduce",
    "Sketch",
    "SparseTwoShot",
    "Step",
    "TernarySum",
    "Tree",
    "TwoShot",
    "Whole",
    "WorkerMomentum",
    "Wrapper",
    "is_vector",
    "scatter_reduce",
    "two_shot",
]
