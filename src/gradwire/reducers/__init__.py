"""Algorithms with several messages: exchanges, PowerSGD, and the wrappers that go around them."""

from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Program, Reduced, Reducer, Sent, Step, Wrapper
from gradwire.reducers.error_feedback import ErrorFeedback
from gradwire.reducers.exchange import AllGather, AllReduce, TwoShot
from gradwire.reducers.guard import Guard
from gradwire.reducers.hierarchical import Hierarchical
from gradwire.reducers.partition import Partition, is_vector
from gradwire.reducers.power_sgd import PowerSGD
from gradwire.reducers.routes import Direct, RecursiveHalvingDoubling, Ring, Tree
from gradwire.reducers.warm_up import WarmUp

__all__ = [
    "AllGather",
    "AllReduce",
    "Auto",
    "Direct",
    "ErrorFeedback",
    "Guard",
    "Hierarchical",
    "Partition",
    "PowerSGD",
    "Program",
    "RecursiveHalvingDoubling",
    "Reduced",
    "Reducer",
    "Ring",
    "Sent",
    "Step",
    "Tree",
    "TwoShot",
    "WarmUp",
    "Wrapper",
    "is_vector",
]
