"""Optimizers that are compression: what their ranks exchange is a part of the update rule, see `docs/optimizers.md`."""

from gradwire.sync.optimizers.base import SharedOptimizer
from gradwire.sync.optimizers.demo import DeMo
from gradwire.sync.optimizers.dion import Dion
from gradwire.sync.optimizers.one_bit_adam import OneBitAdam
from gradwire.sync.optimizers.orthonormal import OrthonormalMomentum, OrthonormalMomentumOfAll
from gradwire.sync.optimizers.zero_one_adam import ZeroOneAdam

__all__ = [
    "DeMo",
    "Dion",
    "OneBitAdam",
    "OrthonormalMomentum",
    "OrthonormalMomentumOfAll",
    "SharedOptimizer",
    "ZeroOneAdam",
]
