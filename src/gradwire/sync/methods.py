"""The methods of `gradwire.sync`: the one place where a name is made known whose spec goes with the optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gradwire.core.errors import SpecError
from gradwire.core.options import Option, convert, options_of
from gradwire.core.places import ELASTIC, WINDOWS
from gradwire.core.recipe import OptimizerMethod
from gradwire.core.registry import register_all
from gradwire.core.uses import Recommended, Special, Study, Use
from gradwire.session.names import named
from gradwire.spec import as_method
from gradwire.sync.averaging_options import Merge
from gradwire.sync.buffers import Policy
from gradwire.sync.elastic import Elastic, ElasticOptimizer, ElasticWhere
from gradwire.sync.elastic.elastic import require_settings
from gradwire.sync.elastic.protocol import Lost, Needs
from gradwire.sync.gossip import CHOCO, DPSGD, SGP, Gossip
from gradwire.sync.gossip.method import GossipMethod
from gradwire.sync.gossip.naming import graph as named_graph
from gradwire.sync.local_sgd import AveragingOptimizer, LocalSGD
from gradwire.sync.moments import Moments
from gradwire.sync.optimizers import DeMo, Dion, OneBitAdam, SharedOptimizer, ZeroOneAdam
from gradwire.sync.outer import BMUF, DiLoCo, Mean, Outer, SlowMo
from gradwire.sync.schedules import Constant, DriftTriggered, Increasing, Schedule, as_schedule
from gradwire.sync.wrapper import require_of_model

F = TypeVar("F")
R = TypeVar("R")

Synchronised = AveragingOptimizer | SharedOptimizer
"""An optimizer that keeps the models of all ranks together."""


class SyncWhere(TypedDict, total=False):
    """What every method may be told beside its spec, see `gradwire.Session`."""

    group: dist.ProcessGroup | None
    seed: int
    deadline_s: float


class SyncMethod(OptimizerMethod[Synchronised]):
    """A method of ranks that keep their models together.

    Attributes:
        shared: those of its options that several methods have.
    """

    place = WINDOWS
    shared: Mapping[str, Option] = {}

    @override
    def label_session(self, spec: str, made: Synchronised) -> None:
        made.session.method = spec


def _parted(given: Mapping[str, Any], frame: type[F], rule: Callable[..., R]) -> tuple[F, R]:
    """Make a method's frame of the options that are the frame's, and its rule of the others."""
    own = {name: value for name, value in given.items() if name in options_of(frame)}
    return frame(**own), rule(**{name: value for name, value in given.items() if name not in own})


# ------------------------------------------------------------------------------------------- windows


@dataclass(frozen=True)
class Windows:
    """Options of every method that averages at the end of windows; see `Averaging` and the module's text.

    `double_after` and `warmup` are numbers of steps, or percentages of the run's `steps`.
    """

    H: int = 8
    last: int | None = None
    double_after: str | None = None
    drift: float | None = None
    steps: int | None = None
    outer: str = "none"
    warmup: str = "0"
    fragments: int = 1
    delay: int = 0
    merge: str | None = None
    buffers: Policy = "average"
    moments: Moments = "own"

    def __post_init__(self) -> None:
        if (self.last is None) != (self.double_after is None):
            raise SpecError("windows grow by last= and double_after= together, as in local:H=2,last=16,double_after=50")
        if self.last is not None and self.drift is not None:
            raise SpecError("a window is ended by drift= or grows up to last=: leave one of them out")
        self._require_effect()

    def _require_effect(self) -> None:
        """Refuse what would change nothing."""
        if self.last == self.H:
            raise SpecError(f"windows of H={self.H} steps do not grow to last={self.last}: make last= larger")
        if self.steps is not None and "%" not in f"{self.double_after} {self.warmup}":
            raise SpecError(f"steps={self.steps} tells what percentages are of, as in double_after=25%: leave it out")
        if self.drift is not None and self.H == 1:
            raise SpecError("drift= ends windows early, and a window of H=1 step cannot end earlier: make H larger")
        if self.merge == "progress" and not self.delay:
            raise SpecError(
                "merge=progress keeps what a rank changes while an average is under way, which is nothing without a "
                "delay: add delay=1, or leave merge out"
            )

    def arguments(self) -> dict[str, Any]:
        """What `LocalSGD` is made with.

        Raises:
            GradwireError: a method, a schedule or a number that cannot be.
        """
        given = {name: getattr(self, name) for name in ("fragments", "delay", "buffers", "moments")}
        given |= {"every": self._schedule(), "method": as_method(self.outer), "merge": self._merge()}
        return given | {"warmup": self._of_run("warmup", self.warmup)}

    def _of_run(self, name: str, text: str) -> int:
        """A number of steps that was written as one, or as a percentage of the run's, rounded up."""
        is_share = text.endswith("%")
        wanted = "a number of steps, or a percentage of steps=, such as 25%"
        number = convert(f"{name}={text}", name, text.removesuffix("%"), float if is_share else int, wanted)
        if not is_share:
            return number
        if self.steps is None:
            said = f"{name}={text},steps=1000"
            raise SpecError(f"{name}={text} is a part of the run: tell how long that is, as in {said}")
        if not (0 <= number <= 100 and self.steps > 0):
            raise SpecError(f"{name}={text},steps={self.steps}: give 0% to 100% of one step or more")
        return math.ceil(number * self.steps / 100)

    def _merge(self) -> Merge | None:
        if self.merge is None or self.merge == "progress":
            return self.merge
        return convert(f"merge={self.merge}", "merge", self.merge, float, "a number below 1, or progress")

    def _schedule(self) -> Schedule:
        if self.drift is not None:
            return DriftTriggered(self.drift, self.H)
        if self.last is not None and self.double_after is not None:
            return Increasing(self.H, self.last, self._of_run("double_after", self.double_after))
        return Constant(self.H)


class Windowed(SyncMethod):
    """A method whose windows end with the outer step `rule`."""

    argument, exchange = "H", "that of outer="

    def __init__(self, rule: type[Outer], summary: str, example: str, use: Use) -> None:
        self._rule, self.summary, self.example, self.use = rule, summary, example, use
        self.build = rule
        self.shared = options_of(Windows)
        self.options = self.shared | options_of(rule)

    def check(self, given: Mapping[str, Any]) -> None:
        """Make what can be made without ranks."""
        self._made(given)

    def _made(self, given: Mapping[str, Any]) -> dict[str, Any]:
        windows, rule = _parted(given, Windows, self._rule)
        if windows.warmup and windows.H == 1 and windows.last is None and isinstance(rule, Mean):
            raise SpecError(
                "warmup= makes windows of one step first, which H=1 has anyway: make H larger, or leave it out"
            )
        return windows.arguments() | {"outer": rule}

    def optimizer(self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: SyncWhere) -> LocalSGD:
        """Wrap the inner optimizer."""
        return LocalSGD(inner, model, **self._made(given), **where)


# ------------------------------------------------------------------------------------------- elastic


@dataclass(frozen=True)
class ElasticOptions:
    """Options of windows among workers that come and go, see `Elastic`."""

    H: int = 8
    update: str = "none"
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    lost: Lost = "keep"

    def arguments(self) -> dict[str, Any]:
        """What `Elastic` is made with.

        Raises:
            GradwireError: a method, a schedule or a number that cannot be.
        """
        outer = DiLoCo(self.lr, self.momentum, self.nesterov)
        given = {"every": as_schedule(self.H), "method": as_method(self.update), "lost": self.lost}
        return given | {"outer": Mean() if (self.lr, self.momentum) == (1.0, 0.0) else outer}


class ElasticMethod(SyncMethod):
    """A method of windows whose workers come and go."""

    place = ELASTIC
    summary, example = "the mean of the workers at hand, every H steps; others come and go", "elastic:50,update=int4"
    argument, build, exchange = "H", Elastic, "that of update="
    use: Use = Special("machines that come and go, such as spot instances")
    options = options_of(ElasticOptions)

    @override
    def check(self, given: Mapping[str, Any]) -> None:
        require_settings(**ElasticOptions(**given).arguments(), needs=Needs())

    @override
    def optimizer(
        self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: ElasticWhere
    ) -> ElasticOptimizer:
        if "store" not in where:
            raise SpecError(
                "workers that come and go meet at a store: start `gradwire store`, and pass store= what it prints"
            )
        return ElasticOptimizer(inner, Elastic(model, **ElasticOptions(**given).arguments(), **where))

    @override
    def label_session(self, spec: str, made: Synchronised) -> None:
        assert isinstance(made, ElasticOptimizer)
        made.averaging.method = spec


# -------------------------------------------------------------------------------------------- gossip


@dataclass(frozen=True)
class GossipOptions:
    """Options of every gossip method, see `Gossip`."""

    graph: str = "ring"
    every: int = 1
    buffers: Policy = "average"


class Gossiping(SyncMethod):
    """A method by which ranks mix their models with those of their neighbours."""

    argument, exchange = "graph", "neighbours"

    def __init__(self, rule: type[GossipMethod], summary: str, example: str, use: Use) -> None:
        self._rule, self.summary, self.example, self.use = rule, summary, example, use
        self.build = rule
        self.options = options_of(GossipOptions) | options_of(rule)

    def check(self, given: Mapping[str, Any]) -> None:
        """Make the method, and look the graph's name up."""
        rounds, _ = self._made(given)
        named_graph(rounds.graph, 4)

    def _made(self, given: Mapping[str, Any]) -> tuple[GossipOptions, GossipMethod]:
        return _parted(given, GossipOptions, self._rule)

    def optimizer(
        self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: SyncWhere
    ) -> AveragingOptimizer:
        """Wrap the inner optimizer."""
        rounds, rule = self._made(given)
        gossip = Gossip(model, rounds.graph, rule, every=rounds.every, buffers=rounds.buffers, **where)
        return AveragingOptimizer(inner, gossip)


# ---------------------------------------------------------------------------------------- optimizers


class Replacing(SyncMethod):
    """A method that is an optimizer of its own, in place of the script's."""

    exchange = "own"

    def __init__(self, kind: type[SharedOptimizer], summary: str, example: str, argument: str, use: Use) -> None:
        self._kind, self.summary, self.example, self.argument, self.use = kind, summary, example, argument, use
        self.build = kind
        self.options = options_of(kind)

    def check(self, given: Mapping[str, Any]) -> None:
        """Read the method that carries messages, where one is written."""
        as_method(given.get("method", "none"))

    def optimizer(
        self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: SyncWhere
    ) -> SharedOptimizer:
        """Make it with the groups of the inner one."""
        taken = [name for name in _TAKEN_OVER if name in inspect.signature(self._kind).parameters and name not in given]
        make = cast(Callable[..., SharedOptimizer], self._kind)
        require_of_model(inner, model)
        groups = list(_groups(inner, model, taken))
        made = make(groups, **{name: groups[0][name] for name in taken if name in groups[0]}, **given, **where)
        made.follow(model)
        return made


_TAKEN_OVER = ("lr", "weight_decay", "betas", "eps")


def _groups(inner: Optimizer, model: nn.Module, taken: list[str]) -> Iterator[dict[str, Any]]:
    """The inner optimizer's groups, with the names that parameters have in the model."""
    names = {id(parameter): name for name, parameter in named(model).items()}
    for group in inner.param_groups:
        params = [(names[id(p)], p) for p in cast("list[Tensor]", group["params"]) if p.requires_grad]
        yield {"params": params, **{name: group[name] for name in taken if name in group}}


# ---------------------------------------------------------------------------------------------- list


METHODS: Mapping[str, SyncMethod] = {
    "local": Windowed(
        Mean,
        "the mean of all models, every H steps",
        "local:H=8",
        Recommended(
            "local:H=2,last=8,double_after=50,outer=topk:0.05+int4,delay=1,merge=progress",
            "20 Mbit/s and slower: fp32's loss after 1.32 times what a free link takes, at 5 Mbit/s and 50 ms, "
            "with outer=topk:0.02+int4, after 1.83 times",
            "models that fit on each rank",
            "byte-GPT, 200 and 222 steps: held-out loss 2.413 and 2.414, fp32 2.408 after 150",
            ("docs/results.md#how-soon-fp32s-loss-is-reached-from-100-to-5-mbits",),
        ),
    ),
    "diloco": Windowed(
        DiLoCo,
        "an outer step with Nesterov momentum, every H steps",
        "diloco:H=20,outer=topk:0.02",
        Special("windows of many steps, whose mean change wants momentum"),
    ),
    "slowmo": Windowed(
        SlowMo,
        "slow momentum around windows of H steps",
        "slowmo:H=12,beta=0.5",
        Study("momentum in units of the inner learning rate; diloco needs none"),
    ),
    "bmuf": Windowed(
        BMUF,
        "blockwise model update filtering, every H steps",
        "bmuf:H=8,momentum=0.5",
        Study("the momentum that diloco took up later"),
    ),
    "elastic": ElasticMethod(),
    "gossip": Gossiping(
        DPSGD,
        "D-PSGD: models are mixed with those of neighbours",
        "gossip:ring",
        Special("many ranks of which each has fast links to few"),
    ),
    "sgp": Gossiping(
        SGP,
        "stochastic gradient push, along edges that go one way",
        "sgp:one-peer",
        Special("gossip where one message a round must do, or edges go one way"),
    ),
    "choco": Gossiping(
        CHOCO,
        "CHOCO-SGD: gossip by compressed messages",
        "choco:ring,codec=topk:0.1,gamma=0.3",
        Special("gossip over slow links"),
    ),
    "onebitadam": Replacing(
        OneBitAdam,
        "Adam, later with a frozen variance and momentum in one bit",
        "onebitadam:freeze_step=50",
        "freeze_step",
        Study("byte-GPT: held-out loss 2.602 after 120 steps, AdamW 2.567 (one seed)"),
    ),
    "zerooneadam": Replacing(
        ZeroOneAdam,
        "0/1 Adam: a variance refreshed ever more rarely, and local steps",
        "zerooneadam:var_freeze_step=50,local_step_scaler=50",
        "var_freeze_step",
        Study("onebitadam with local steps; not measured in training"),
    ),
    "demo": Replacing(
        DeMo,
        "the fast components of momentum, by DCT",
        "demo:lr=0.0003",
        "density",
        Study(
            "byte-GPT: held-out loss 2.762 after 120 steps at lr=5e-4, 2.720 with momentum=0.95 too, AdamW 2.567 "
            "(one seed)"
        ),
    ),
    "dion": Replacing(
        Dion,
        "low-rank orthonormalised updates",
        "dion:16,lr=0.01",
        "rank",
        Special("an optimizer to train by; byte-GPT: held-out loss 2.486 after 120 steps, AdamW 2.567 (one seed)"),
    ),
}

register_all(METHODS)
