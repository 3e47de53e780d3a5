"""What is to be compared, and under which conditions: options, checked before the first host is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gradwire.bench import figures
from gradwire.bench.engines import DDP, FSDP2, make_engine
from gradwire.bench.environment import processor
from gradwire.bench.net import Network, parse_delay, parse_loss, parse_rate
from gradwire.bench.slow import parse_slow
from gradwire.bench.task import Task, count
from gradwire.bench.tasks import make_task
from gradwire.bench.user_tasks import check_one_step
from gradwire.core.errors import GradwireError

DEFAULT_METHODS = {
    DDP: (
        "torch:fp32",
        "torch:fp16",
        "torch:powersgd:4",
        "torch:noop",
        "int4",
        "powersgd:8,factors=fp16",
        "topk:0.01",
    ),
    FSDP2: (
        "torch:fp32",
        "torch:bf16",
        "torch:noop",
        "none,parameters=none",
        "int8",
        "int8,parameters=int8",
        "int4,parameters=int8",
    ),
}

BUCKET_MB = 25.0
"""DDP's own choice."""

NetworkMode = Literal["auto", "root", "user", "paced"]


class CompareError(GradwireError, ValueError):
    """Options that make no comparison, or that clash with what an output folder already holds."""


@dataclass(frozen=True)
class Options:
    """What to compare, and under which conditions.

    Attributes:
        task: "digits", "bytes" or "package.module:function".
        methods: gradwire specs and `torch:` methods, in the order to show; if empty, `DEFAULT_METHODS` of the engine.
        engine: what holds the model together: "ddp" or "fsdp2".
        hosts: number of ranks, one a host.
        rate: of every link, such as "100mbit".
        rates: of each host's link, instead of one rate for all.
        delay: what a round trip between two hosts takes, such as "50ms"; half of it each way.
        loss: share of the frames that get lost between two hosts, in each direction, such as "0.1%".
        slow: hosts that compute slower, such as "3:4x".
        target: see `results.Comparison.target`.
        steps: how many each run makes; None for the task's own number.
        minutes: of training time for each run instead of a number of steps.
        seeds: how many, from 0.
        bucket_mb: DDP's bucket size.
        out: output folder.
        text: folder of the bytes task.
        network: how to make the network.
        deadline_s: how long a collective may take; None for a guess from model and rate.
        evaluate_every: steps between evaluations; None for the task's own number.
        fresh: forget what the output folder holds.
    """

    task: str = "bytes"
    methods: tuple[str, ...] = ()
    engine: str = DDP
    hosts: int = 4
    rate: str = "100mbit"
    rates: tuple[str, ...] = ()
    delay: str = "0"
    loss: str = "0"
    slow: tuple[str, ...] = ()
    target: str | None = None
    steps: int | None = None
    minutes: float | None = None
    seeds: int = 1
    bucket_mb: float = BUCKET_MB
    out: Path = Path("compare-report")
    text: Path | None = None
    network: NetworkMode = "auto"
    deadline_s: float | None = None
    evaluate_every: int | None = None
    fresh: bool = False

    def __post_init__(self) -> None:
        """Fill in the methods."""
        object.__setattr__(self, "methods", self.methods or DEFAULT_METHODS.get(self.engine, ()))


@dataclass(frozen=True)
class Plan:
    """Options checked, with everything filled in that they left open."""

    options: Options
    task: Task
    steps: int | None
    seconds: float | None
    evaluate_every: int
    deadline_s: float

    @property
    def grid(self) -> list[tuple[str, int]]:
        """(method, seed) of every run, in order."""
        return [(method, seed) for seed in range(self.options.seeds) for method in self.options.methods]

    @property
    def target(self) -> str | None:
        """The target asked for, else the task's own, else None."""
        own = self.task.target
        return self.options.target or (None if own is None else str(own))

    @property
    def smoothing(self) -> int:
        """Steps in the moving average of losses: a tenth of a run, between 10 and 50."""
        return 20 if self.steps is None else min(50, max(10, self.steps // 10), self.steps)

    def conditions(self, mode: str) -> dict[str, Any]:
        """What two runs must share to be compared; a stored run is reused only if all of it agrees."""
        options = self.options
        return {
            "task": options.task,
            "data": self.task.fingerprint,
            "hosts": options.hosts,
            "rate": ",".join(options.rates) or options.rate,
            "steps": self.steps,
            "minutes": options.minutes,
            "bucket size (MB)": options.bucket_mb,
            "evaluate every": self.evaluate_every,
            "network": ", ".join([mode, *_weather(options)]),
            "processor": ", ".join([processor(), *_slow_hosts(options)]),
            "torch": str(torch.__version__),
        } | ({} if options.engine == DDP else {"engine": options.engine})


def make_plan(options: Options) -> Plan:
    """Check everything that can be checked before the first host is started.

    Raises:
        GradwireError: a method, the task or an option is wrong; the message says which and what to do.
    """
    _check_numbers(options)
    figures.check_target(options.target)
    engine = make_engine(options.engine)
    for method in options.methods:
        engine.check(method, options.hosts)
    _check_target_method(options)
    task = make_task(options.task, 0, options.text)
    check_one_step(task, options.task, options.hosts)
    steps = None if options.minutes else options.steps or task.steps
    seconds = options.minutes * 60 if options.minutes else None
    every = options.evaluate_every or _evaluation_interval(task, steps)
    return Plan(options, task, steps, seconds, every, options.deadline_s or _deadline(options, task))


MOST = {"--steps": 10**9, "--seeds": 1000, "--minutes": 1e6, "--bucket-mb": 1e6, "--deadline": 1e6}
"""Beyond these an option is a slip of the keyboard, and would fail somewhere deep inside."""


def _check_numbers(options: Options) -> None:
    if options.minutes is not None and options.steps is not None:
        raise CompareError("give --steps or --minutes, not both")
    for name, value in (
        ("--hosts", options.hosts),
        ("--seeds", options.seeds),
        ("--steps", options.steps),
        ("evaluate_every", options.evaluate_every),
    ):
        if value is not None and not 1 <= value <= MOST.get(name, math.inf):
            most = f", and at most {MOST[name]:,}" if name in MOST else ""
            raise CompareError(f"{name} must be at least 1{most}, not {_short(value)}")
    for name, value in (
        ("--minutes", options.minutes),
        ("--bucket-mb", options.bucket_mb),
        ("--deadline", options.deadline_s),
    ):
        if value is not None and not 0 < value <= MOST[name]:
            raise CompareError(f"{name} must be a positive number of at most {MOST[name]:,.0f}, not {value}")
    if len(set(options.methods)) != len(options.methods):
        raise CompareError("--methods: name each method once")
    if options.engine != DDP and options.bucket_mb != BUCKET_MB:
        raise CompareError(f"--bucket-mb is for --engine ddp: {options.engine} has no buckets")
    try:
        make_network(options)
        parse_slow(options.slow, options.hosts)
    except ValueError as error:
        raise CompareError(str(error)) from error


def make_network(options: Options) -> Network:
    """The network of a comparison, not yet entered.

    Raises:
        ValueError: an option of it makes no sense.
    """
    rate = options.rates or options.rate
    return Network(options.hosts, rate, mode=options.network, delay=options.delay, loss=options.loss)


def _weather(options: Options) -> list[str]:
    """What links have beyond their rates. Runs from before there were such links have the same conditions."""
    delay_s, loss = parse_delay(options.delay), parse_loss(options.loss)
    named = ((delay_s, f"delay {1e3 * delay_s:g} ms"), (loss, f"loss {100 * loss:g} %"))
    return [text for value, text in named if value]


def _slow_hosts(options: Options) -> list[str]:
    factors = parse_slow(options.slow, options.hosts)
    return [f"host {host} {factor:g} times slower" for host, factor in enumerate(factors) if factor != 1]


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"


def _check_target_method(options: Options) -> None:
    target = options.target or ""
    setter = target.removeprefix("method:")
    if target.startswith("method:") and setter not in options.methods:
        raise CompareError(f"--target {target}: {setter!r} is not among the methods: {' '.join(options.methods)}")


def _evaluation_interval(task: Task, steps: int | None) -> int:
    return task.evaluate_every if steps is None else min(task.evaluate_every, max(1, steps // 8))


def _deadline(options: Options, task: Task) -> float:
    """Twenty times what a dense step takes on the slowest link, and a minute of the slowest host's at least."""
    rate = min(parse_rate(rate) for rate in options.rates or [options.rate])
    dense_s = 2 * 4 * count(task.model) / (rate / 8) + options.hosts * parse_delay(options.delay)
    return max(60.0 * max(parse_slow(options.slow, options.hosts)), 20 * dense_s)
