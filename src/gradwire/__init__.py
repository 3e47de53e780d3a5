"""gradwire: train PyTorch models over networks slower than their processors.

ddp = DistributedDataParallel(model)
handle = gradwire.attach(ddp, "int4")
"""

from gradwire.adapters.ddp import Handle, attach
from gradwire.core.errors import (
    AttachError,
    CommunicationError,
    CompositionError,
    GradwireError,
    NetworkError,
    PayloadError,
    SpecError,
    StateError,
)
from gradwire.core.saved import reshard
from gradwire.drivers.cost import Cost, cost
from gradwire.drivers.lockstep import Lockstep
from gradwire.drivers.process_group import Stats
from gradwire.methods import methods
from gradwire.spec import parse

__version__ = "0.2.0"

__all__ = [
    "AttachError",
    "CommunicationError",
    "CompositionError",
    "Cost",
    "GradwireError",
    "Handle",
    "Lockstep",
    "NetworkError",
    "PayloadError",
    "SpecError",
    "StateError",
    "Stats",
    "attach",
    "cost",
    "methods",
    "parse",
    "reshard",
]
