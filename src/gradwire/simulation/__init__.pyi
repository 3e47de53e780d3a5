from .failures import Failing
from .options import SimulateOptions
from .result import Interval, SimulatedRun, StepShares
from .simulate import refuse_idle, scale, simulate, simulate_model

__all__ = [
    "Failing",
    "Interval",
    "SimulateOptions",
    "SimulatedRun",
    "StepShares",
    "refuse_idle",
    "scale",
    "simulate",
    "simulate_model",
]
