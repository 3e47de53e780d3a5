"""Federations: a server and clients that are many, uneven, seldom there and do not trust each other.

The mathematics stands apart from what runs it: a `FederatedMethod` and a `ServerStep` say what is computed, a `Sending`
how it travels, an aggregation what becomes of many updates, and a `Server` sees to it that each counts once.
`Simulation` runs all of it on one machine.
"""

from gradwire.federated.buffered import BufferedServer
from gradwire.federated.buffered_simulation import BufferedSimulation
from gradwire.federated.client import Assignment, Client, Federation, Terms, Update, train
from gradwire.federated.engines import InProcess
from gradwire.federated.local import SGD
from gradwire.federated.methods import FedAvg, FederatedMethod, FedNova, FedProx, Scaffold
from gradwire.federated.names import Named
from gradwire.federated.optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, Mean, ServerStep
from gradwire.federated.processes import Processes
from gradwire.federated.sampling import ByWeight, Poisson, Uniform
from gradwire.federated.server import Round, Server
from gradwire.federated.simulation import Conditions, Simulation
from gradwire.sending import Sending

Method = FederatedMethod  # its name before

__all__ = [
    "SGD",
    "Assignment",
    "BufferedServer",
    "BufferedSimulation",
    "ByWeight",
    "Client",
    "Conditions",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedNova",
    "FedProx",
    "FedYogi",
    "FederatedMethod",
    "Federation",
    "InProcess",
    "Mean",
    "Named",
    "Poisson",
    "Processes",
    "Round",
    "Scaffold",
    "Sending",
    "Server",
    "ServerStep",
    "Simulation",
    "Terms",
    "Uniform",
    "Update",
    "train",
]
