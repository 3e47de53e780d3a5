"""Which reducer serves which parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import Program, Step

Condition = str | Callable[[ParameterSpec], bool]


@dataclass(frozen=True)
class Partition(Reducer):
    """The first rule that a parameter meets says which reducer serves it; `default` serves the rest.

    A rule is a pair of a condition and a reducer. A condition is a glob on the parameter's name (`"*.bias"`,
    `"embed*"`), a role (`HasRole("norm")`) or another function of its `ParameterSpec`. `layers=` of a spec makes one.

    Args:
        rules: pairs of (condition, reducer), first match wins.
        default: serves what no rule names.

    >>> from gradwire.codecs import BF16, TopK
    >>> from gradwire.reducers import AllGatherExchange, AllReduceExchange, is_vector
    >>> import torch
    >>> policy = Partition(((is_vector, AllReduceExchange(BF16())),), default=AllGatherExchange(TopK(0.1)))
    >>> policy.assign(ParameterSpec("bias", (64,), torch.float32, torch.device("cpu")))
    AllReduceExchange(codec=BF16())
    """

    rules: tuple[tuple[Condition, Reducer], ...]
    default: Reducer

    def __repr__(self) -> str:
        """The same in every process, as ranks compare it: functions are written by their names."""
        rules = ", ".join(f"({_named(condition)}, {reducer!r})" for condition, reducer in self.rules)
        return f"Partition(rules=({rules},), default={self.default!r})"

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """The reducer of the first rule that matches."""
        for condition, reducer in self.rules:
            if _meets(condition, parameter):
                return reducer.assign(parameter)
        return self.default.assign(parameter)

    def scattered(self) -> Reducer:
        """The same policy over what its reducers have for it."""
        rules = tuple((condition, reducer.scattered()) for condition, reducer in self.rules)
        return Partition(rules, self.default.scattered())

    def unmatched_globs(self, names: Collection[str]) -> list[str]:
        """Its own globs that match none of `names`, and those of its parts."""
        globs = [condition for condition, _ in self.rules if isinstance(condition, str)]
        own = [glob for glob in globs if not any(fnmatch.fnmatchcase(name, glob) for name in names)]
        return own + super().unmatched_globs(names)

    def init(self, grain: Grain, step: Step) -> State:
        """Never called: a plan asks `assign` first."""
        self._refuse()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Never called: a plan asks `assign` first."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CompositionError(
            "a Partition reduces nothing itself: call assign(parameter) for the reducer that does, as `plan` does"
        )


def _named(condition: Condition) -> str:
    if isinstance(condition, str | HasRole):
        return repr(condition)
    return getattr(condition, "__qualname__", type(condition).__qualname__)


def _meets(condition: Condition, parameter: ParameterSpec) -> bool:
    if isinstance(condition, str):
        return fnmatch.fnmatchcase(parameter.name, condition)
    return condition(parameter)


@dataclass(frozen=True)
class HasRole:
    """A condition: what a parameter is for in its model.

    Args:
        role: "embedding", "norm", "bias" or "output", as `gradwire.core.roles` tells them.

    >>> import torch
    >>> HasRole("bias")(ParameterSpec("fc.bias", (64,), torch.float32, torch.device("cpu")))
    True
    """

    role: str

    def __call__(self, parameter: ParameterSpec) -> bool:
        """Whether a parameter has it."""
        return parameter.role == self.role


def is_vector(parameter: ParameterSpec) -> bool:
    """Whether a parameter has fewer than two dimensions: biases, norms' weights, scalars."""
    return len(parameter.shape) < 2
