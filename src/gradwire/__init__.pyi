from . import asynchronous, federated, overlap, recipes, sync
from .adapters.accumulation.window import accumulate
from .adapters.attach import attach
from .adapters.drift import watch_drift
from .adapters.wrap import wrap
from .catalogue import catalogue
from .codecs.error_memory import ErrorMemory, compress
from .core.errors import (
    AccumulationWarning,
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
from .core.reshard import reshard
from .drivers.cost import Cost, cost
from .drivers.engine import Stats
from .drivers.lockstep import Lockstep
from .methods import methods
from .profiling import profile
from .session import Session, SessionStep
from .session.checkpoint import load, save
from .session.drift import check_drift
from .session.report import Report
from .spec import parse

__version__: str

__all__ = [
    "AccumulationWarning",
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
    "accumulate",
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
