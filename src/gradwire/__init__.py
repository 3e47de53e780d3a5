"""gradwire: train PyTorch models over networks slower than their processors.

ddp = DistributedDataParallel(model)
session = gradwire.attach(ddp, "int4")
"""

from gradwire import asynchronous, federated, overlap, recipes, sync
from gradwire.adapters.attach import attach
from gradwire.adapters.drift import watch_drift
from gradwire.adapters.wrap import wrap
from gradwire.catalogue import catalogue
from gradwire.codecs.error_memory import ErrorMemory, compress
from gradwire.core.errors import (
    AttachError,
    CommunicationError,
    CompositionError,
    DriftError,
    DriftWarning,
    FederationError,
    GradwireError,
    NetworkError,
    NonFiniteWarning,
    PayloadError,
    PushError,
    SpecError,
    StateError,
    StepError,
)
from gradwire.core.reshard import reshard
from gradwire.core.version import VERSION
from gradwire.drivers.cost import Cost, cost
from gradwire.drivers.engine import Stats
from gradwire.drivers.lockstep import Lockstep
from gradwire.methods import methods
from gradwire.profiling import profile
from gradwire.session import Session, SessionStep
from gradwire.session.checkpoint import load, save
from gradwire.session.drift import check_drift
from gradwire.session.report import Report
from gradwire.spec import parse

Handle = Session  # what `attach` returned before it returned a session, in scripts of then

__version__ = VERSION

__all__ = [
    "AttachError",
    "CommunicationError",
    "CompositionError",
    "Cost",
    "DriftError",
    "DriftWarning",
    "ErrorMemory",
    "FederationError",
    "GradwireError",
    "Lockstep",
    "NetworkError",
    "NonFiniteWarning",
    "PayloadError",
    "PushError",
    "Report",
    "Session",
    "SessionStep",
    "SpecError",
    "StateError",
    "Stats",
    "StepError",
    "asynchronous",
    "attach",
    "catalogue",
    "check_drift",
    "compress",
    "cost",
    "federated",
    "load",
    "methods",
    "overlap",
    "parse",
    "profile",
    "recipes",
    "reshard",
    "save",
    "sync",
    "watch_drift",
    "wrap",
]
