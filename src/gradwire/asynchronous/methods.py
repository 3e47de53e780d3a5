"""Specs of methods whose ranks do not wait: `ssp:4`, `dcasgd:2`, `asgd:rate=hyperbolic,update=topk:0.05`.

`update` says how pushes travel, by a codec's spec, and `H` how many local steps are made between two pushes. `hogwild`
has no server and no messages: the ranks must be processes of one machine, which change one copy of the model in shared
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from gradwire import spec as language
from gradwire.asynchronous.hogwild_optimizer import HogwildOptimizer
from gradwire.asynchronous.lengths import Fixed, Length
from gradwire.asynchronous.optimizer import AsynchronousOptimizer, AsynchronousWhere
from gradwire.asynchronous.pace import Bounded, Free, Pace
from gradwire.asynchronous.rates import Hyperbolic, Inverse, Rate, Relative, RootHyperbolic
from gradwire.asynchronous.rules import ASGD, CONSTANT, AdaptiveDCASGD, ServerRule
from gradwire.asynchronous.unwaiting import UnwaitingOptimizer
from gradwire.core.errors import SpecError
from gradwire.core.grammar import name_of
from gradwire.core.nearest import meant
from gradwire.core.options import Option, options_of
from gradwire.core.places import UNWAITING
from gradwire.core.recipe import OptimizerMethod, Recipe
from gradwire.core.registry import register_all
from gradwire.core.uses import Special, Study, Use
from gradwire.sending import Sending

_FALLING: Mapping[str, Rate] = {
    "inverse": Inverse(),
    "hyperbolic": Hyperbolic(),
    "root": RootHyperbolic(),
}


class AsyncMethod(OptimizerMethod[UnwaitingOptimizer]):
    """A method of ranks that do not wait for each other."""

    place = UNWAITING


@dataclass(frozen=True)
class Pushing:
    """Options of every method that pushes to servers."""

    update: str = "none"
    H: int = 1

    @property
    def sending(self) -> Sending:
        """How pushes travel to the server."""
        return Sending.of(self.update)

    @property
    def length(self) -> Length:
        """Local steps between pushes."""
        return Fixed(self.H)


@dataclass(frozen=True)
class ASGDOptions(Pushing):
    """Options of `asgd`, see `ASGD`.

        w -= 1/n min(1, f(tau) / f(n - 1)) g

    So n pushes at the usual staleness of n - 1 move as far as one synchronous step, whatever f is, see `Relative`.
    """

    rate: Literal["constant", "inverse", "hyperbolic", "root"] = "constant"

    @property
    def pace(self) -> Pace:
        """Nobody waits for anybody."""
        return Free()

    def rule(self, workers: int) -> ServerRule:
        """The n-th part of a step of the mean."""
        falling = _FALLING.get(self.rate)
        return ASGD(1 / workers, CONSTANT if falling is None else Relative(falling, workers - 1))


@dataclass(frozen=True, kw_only=True)
class Stale(ASGDOptions):
    """Options of `ssp`, see `Bounded`."""

    staleness: int

    @property
    @override
    def pace(self) -> Pace:
        return Bounded(self.staleness)


@dataclass(frozen=True)
class Compensated(Pushing):
    """Options of `dcasgd`, see `AdaptiveDCASGD`.

    What is pushed is a step and no gradient, eta times as long with SGD. Compensation by g*g / sqrt(v) is of the length
    of g, so it is right for steps of any length, where that of DC-ASGD-c would depend on eta. That takes an epsilon of
    0: the paper's 1e-7 is for squares of gradients, and would leave little of the compensation of short steps.
    """

    strength: float = 2.0
    decay: float = 0.95

    def __post_init__(self) -> None:
        if self.strength == 0:
            raise SpecError("a strength of 0 compensates nothing, which is 'asgd': write that, or a strength above 0")

    @property
    def pace(self) -> Pace:
        """Nobody waits for anybody."""
        return Free()

    def rule(self, workers: int) -> ServerRule:
        """A compensated step of the mean."""
        return AdaptiveDCASGD(1 / workers, self.strength, self.decay, epsilon=0.0)


class ServerMethod(AsyncMethod):
    """A method whose ranks push to servers."""

    exchange = "servers"

    def __init__(
        self, kind: type[ASGDOptions | Compensated], build: type, summary: str, example: str, argument: str, use: Use
    ) -> None:
        self._kind, self.build, self.options = kind, build, options_of(kind)
        self.summary, self.example, self.argument, self.use = summary, example, argument, use

    def check(self, given: Mapping[str, Any]) -> None:
        """Make every part, for two workers."""
        _parts(self._kind(**given), workers=2)

    def optimizer(
        self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: AsynchronousWhere
    ) -> AsynchronousOptimizer:
        """Wrap the inner optimizer."""
        workers = dist.get_world_size(where.get("group"))
        rule, pace, length, sending = _parts(self._kind(**given), workers)
        return AsynchronousOptimizer(inner, model, rule, pace=pace, length=length, sending=sending, **where)


def _parts(made: ASGDOptions | Compensated, workers: int) -> tuple[ServerRule, Pace, Length, Sending]:
    """What options say, for so many workers."""
    return made.rule(workers), made.pace, made.length, made.sending


class SharedMemory(AsyncMethod):
    """A method whose ranks change one copy of the model."""

    summary = "Hogwild!: processes of one machine change one model without locks"
    example, argument, build, exchange = "hogwild", None, HogwildOptimizer, "shared memory"
    use: Use = Special("processes of one machine, and gradients that touch few parameters each")
    options: Mapping[str, Option] = {}

    def check(self, given: Mapping[str, Any]) -> None:
        """There is nothing to be written."""

    def optimizer(
        self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: AsynchronousWhere
    ) -> HogwildOptimizer:
        """Put the model into shared memory."""
        return HogwildOptimizer(inner, model, where.get("group"), deadline_s=where.get("deadline_s", 600.0))


METHODS: Mapping[str, AsyncMethod] = {
    "asgd": ServerMethod(
        ASGDOptions,
        ASGD,
        "asynchronous SGD: nobody waits for anybody",
        "asgd:rate=hyperbolic",
        "rate",
        Study("digits beside a slow host: accuracy 96.9, DDP 97.5 (one seed)"),
    ),
    "ssp": ServerMethod(
        Stale,
        Bounded,
        "bounded staleness: nobody is more than s + 1 pushes ahead",
        "ssp:4",
        "staleness",
        Special("ranks whose speed varies, with a bound on how far apart they are"),
    ),
    "dcasgd": ServerMethod(
        Compensated,
        AdaptiveDCASGD,
        "asynchronous, and compensated for staleness",
        "dcasgd:0.5",
        "strength",
        Special("a rank that is always several times slower than the others"),
    ),
    "hogwild": SharedMemory(),
}


register_all(METHODS)


def is_asynchronous(spec: str) -> bool:
    """Whether a spec is of a method of `gradwire.asynchronous`.

    >>> is_asynchronous("ssp:4"), is_asynchronous("local:H=8")
    (True, False)
    """
    return name_of(spec) in METHODS


def parse(spec: str) -> Recipe[UnwaitingOptimizer]:
    """Read a spec by `gradwire.parse`, and refuse other methods than those of `gradwire.asynchronous`.

    Raises:
        SpecError: an unknown name or option, or a value that cannot be read.
        CompositionError: options that cannot be.

    >>> parse("ssp:-1")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.CompositionError: a staleness of -1: it is 0, which is synchronous, or more
    """
    if not is_asynchronous(spec):
        raise SpecError(f"{spec!r} is no method of gradwire.asynchronous: {meant(name_of(spec), METHODS)}")
    return language.parse(spec)
