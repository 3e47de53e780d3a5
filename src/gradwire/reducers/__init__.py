"""Algorithms with several messages: exchanges, PowerSGD, and the wrappers that go around them."""

from gradwire.reducers.adaptive_threshold import AdaptiveThreshold
from gradwire.reducers.base import Program, Reduced, Reducer, Sent, Step, Wrapper
from gradwire.reducers.error_feedback import ErrorFeedback
from gradwire.reducers.exchange import AllGather, AllReduce, TwoShot
from gradwire.reducers.guard import Guard
from gradwire.reducers.momentum_correction import DGC, MomentumCorrection
from gradwire.reducers.partition import Partition, is_vector
from gradwire.reducers.power_sgd import PowerSGD
from gradwire.reducers.scheduled import Scheduled
from gradwire.reducers.sparse_two_shot import SparseTwoShot, two_shot
from gradwire.reducers.warm_up import WarmUp

__all__ = [
    "DGC",
    "AdaptiveThreshold",
    "AllGather",
    "AllReduce",
    "ErrorFeedback",
    "Guard",
    "MomentumCorrection",
    "Partition",
    "PowerSGD",
    "Program",
    "Reduced",
    "Reducer",
    "Scheduled",
    "Sent",
    "SparseTwoShot",
    "Step",
    "TwoShot",
    "WarmUp",
    "Wrapper",
    "is_vector",
    "two_shot",
]
