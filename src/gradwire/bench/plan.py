"""What is to be compared, and under which conditions: options, checked before the first host is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import gradwire
from gradwire.bench import results
from gradwire.bench.environment import processor
from gradwire.bench.net import Network, parse_rate
from gradwire.bench.task import Task, count
from gradwire.bench.tasks import make_task
from gradwire.bench.torch_hooks import parse_torch
from gradwire.bench.user_tasks import check_one_step
from gradwire.core.errors import GradwireError

DEFAULT_METHODS = (
    "torch:fp32",
    "torch:fp16",
    "torch:powersgd:4",
    "torch:noop",
    "int4",
    "powersgd:8,factors=fp16",
    "topk:0.01",
)

NetworkMode = Literal["auto", "root", "user", "paced"]


class CompareError(GradwireError, ValueError):
    """Options that make no comparison, or that clash with what an output folder already holds."""


@dataclass(frozen=True)
class Options:
    """What to compare, and under which conditions.

    Attributes:
        task: "digits", "bytes" or "package.module:function".
        methods: gradwire specs and `torch:` methods, in the order to show.
        hosts: number of ranks, one a host.
        rate: of every link, such as "100mbit".
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
    methods: tuple[str, ...] = DEFAULT_METHODS
    hosts: int = 4
    rate: str = "100mbit"
    target: str | None = None
    steps: int | None = None
    minutes: float | None = None
    seeds: int = 1
    bucket_mb: float = 25.0
    out: Path = Path("compare-report")
    text: Path | None = None
    network: NetworkMode = "auto"
    deadline_s: float | None = None
    evaluate_every: int | None = None
    fresh: bool = False


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
            "rate": options.rate,
            "steps": self.steps,
            "minutes": options.minutes,
            "bucket size (MB)": options.bucket_mb,
            "evaluate every": self.evaluate_every,
            "network": mode,
            "processor": processor(),
            "torch": str(torch.__version__),
        }


def make_plan(options: Options) -> Plan:
    """Check everything that can be checked before the first host is started.

    Raises:
        GradwireError: a method, the task or an option is wrong; the message says which and what to do.
    """
    _check_numbers(options)
    results.check_target(options.target)
    for method in options.methods:
        check_method(method, options.hosts)
    _check_target_method(options)
    task = make_task(options.task, 0, options.text)
    check_one_step(task, options.task, options.hosts)
    steps = None if options.minutes else options.steps or task.steps
    seconds = options.minutes * 60 if options.minutes else None
    every = options.evaluate_every or _evaluation_interval(task, steps)
    return Plan(options, task, steps, seconds, every, options.deadline_s or _deadline(options, task))


def check_method(spec: str, hosts: int) -> None:
    """Refuse a spec that names no method, or one that wants more hosts, before anything is started."""
    if spec.startswith("torch:"):
        parse_torch(spec)
        return
    gradwire.parse(spec).require_ranks(hosts)


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
    if len(set(options.methods)) != len(options.methods) or not options.methods:
        raise CompareError("--methods: name each method once, and at least one")
    try:
        Network(options.hosts, options.rate, mode=options.network)
    except ValueError as error:
        raise CompareError(str(error)) from error


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
    """Twenty times what a dense step takes on this link, and a minute at least."""
    dense_s = 2 * 4 * count(task.model) / (parse_rate(options.rate) / 8)
    return max(60.0, 20 * dense_s)
