"""Workers that do not wait for each other, and the server that they push to."""

from gradwire.asynchronous import snapshots
from gradwire.asynchronous.hogwild_optimizer import HogwildOptimizer
from gradwire.asynchronous.lengths import Fixed, Length, Matched
from gradwire.asynchronous.messages import Grant, Push, Receipt
from gradwire.asynchronous.methods import is_asynchronous, parse
from gradwire.asynchronous.optimizer import AsynchronousOptimizer
from gradwire.asynchronous.pace import Barriers, Bounded, Free, Pace
from gradwire.asynchronous.rates import Constant, Geometric, Hyperbolic, Inverse, Rate, Relative, RootHyperbolic
from gradwire.asynchronous.rules import ASGD, DCASGD, AdaptiveDCASGD, DelayedNesterov, ServerRule
from gradwire.asynchronous.server import ParameterServer
from gradwire.asynchronous.simulation import Applied, AsynchronousSimulation, Faults, Machine
from gradwire.asynchronous.work import Gradient, LocalSteps, Result, Work
from gradwire.asynchronous.worker import Worker
from gradwire.core.recipe import Recipe
from gradwire.sending import Sending

Rule, Server, Simulation = ServerRule, ParameterServer, AsynchronousSimulation  # their names before

__all__ = [
    "ASGD",
    "DCASGD",
    "AdaptiveDCASGD",
    "Applied",
    "AsynchronousOptimizer",
    "AsynchronousSimulation",
    "Barriers",
    "Bounded",
    "Constant",
    "DelayedNesterov",
    "Faults",
    "Fixed",
    "Free",
    "Geometric",
    "Gradient",
    "Grant",
    "HogwildOptimizer",
    "Hyperbolic",
    "Inverse",
    "Length",
    "LocalSteps",
    "Machine",
    "Matched",
    "Pace",
    "ParameterServer",
    "Push",
    "Rate",
    "Receipt",
    "Recipe",
    "Relative",
    "Result",
    "RootHyperbolic",
    "Sending",
    "ServerRule",
    "Work",
    "Worker",
    "is_asynchronous",
    "parse",
    "snapshots",
]
