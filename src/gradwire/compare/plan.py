"""What is to be compared, and under which conditions: options, checked before the first host is started."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.compare import figures
from gradwire.compare.engines import make_engine
from gradwire.compare.options import BUCKET_MB, DDP, CompareError, CompareOptions, parse_nodes
from gradwire.compare.results import DENSE_BASELINES
from gradwire.compare.step_time import LEAST, WARM_UP
from gradwire.network import Network, parse_delay, parse_loss, parse_rate
from gradwire.network.environment import processor
from gradwire.network.slow import parse_slow
from gradwire.option_fields import check_fields, conditions
from gradwire.tasks.builtin import BUILT_IN, make_task
from gradwire.tasks.task import Task, count
from gradwire.tasks.user_tasks import check_one_step


@dataclass(frozen=True)
class ComparisonPlan:
    """Options of a comparison, checked and with everything filled in that they left open, and their task."""

    options: CompareOptions
    task: Task

    @property
    def grid(self) -> list[tuple[str, int]]:
        """(method, seed) of every run, in order."""
        return [(method, seed) for seed in range(self.options.seeds) for method in self.options.methods]

    @property
    def ranks(self) -> int:
        """How many ranks train, on all hosts."""
        return self.options.ranks

    @property
    def slow(self) -> tuple[float, ...]:
        """How many times slower each rank's processor is."""
        by_host = parse_slow(self.options.slow, self.options.hosts)
        return tuple(factor for factor in by_host for _ in range(self.options.ranks_per_host))

    @property
    def seconds(self) -> float | None:
        """Seconds of training for each run; None where it makes a number of steps."""
        return self.options.minutes * 60 if self.options.minutes else None

    @property
    def evaluate_every(self) -> int:
        """Steps between two evaluations."""
        assert self.options.evaluate_every is not None, "a plan has filled it in"
        return self.options.evaluate_every

    @property
    def deadline_s(self) -> float:
        """How long a collective may take."""
        assert self.options.deadline_s is not None, "a plan has filled it in"
        return self.options.deadline_s

    @property
    def smoothing(self) -> int:
        """Steps in the moving average of losses: a tenth of a run, between 10 and 50."""
        steps = self.options.steps
        return 20 if steps is None else min(50, max(10, steps // 10), steps)

    def estimates_time(self, method: str) -> bool:
        """Whether a method is timed over some steps only: its steps are alike, and no loss depends on the links."""
        options = self.options
        long_enough = options.steps is not None and options.steps > WARM_UP + LEAST
        return method in DENSE_BASELINES and long_enough and not options.whole_baselines

    def conditions(self, mode: str, method: str) -> dict[str, Any]:
        """What a run was made under; a stored one is reused only if all of it agrees."""
        options = self.options
        made = {
            **conditions(options),
            "data": self.task.fingerprint,
            "rate": ",".join(options.rates) or options.rate,
            "network": ", ".join([mode, *_weather(options)]),
            "processor": ", ".join([processor(), *_slow_hosts(options)]),
            "torch": str(torch.__version__),
        }
        made |= {} if options.engine == DDP else {"engine": options.engine}
        return made | ({"times": "estimated from some steps"} if self.estimates_time(method) else {})


def make_plan(options: CompareOptions) -> ComparisonPlan:
    """Check everything that can be checked before the first host is started.

    Raises:
        GradwireError: a method, the task or an option is wrong; the message says which and what to do.
    """
    options = _checked(options)
    figures.check_target(options.target)
    engine = make_engine(options.engine)
    for method in options.methods:
        engine.check(method, options.ranks)
    _check_target_method(options)
    task = make_task(options.task, 0, options.text)
    if options.task not in BUILT_IN:
        check_one_step(task, options.task, options.ranks)
    steps = None if options.minutes else options.steps or task.steps
    target = options.target or (None if task.target is None else str(task.target))
    filled = dataclasses.replace(
        options,
        steps=steps,
        evaluate_every=options.evaluate_every or _evaluation_interval(task, steps, target),
        deadline_s=options.deadline_s or _deadline(options, task),
        target=target,
    )
    return ComparisonPlan(filled, task)


def _checked(options: CompareOptions) -> CompareOptions:
    """The options, with nodes in the words of hosts and their links."""
    check_fields(options, CompareError)
    if options.nodes is not None:
        nodes, _ = parse_nodes(options.nodes)
        options = dataclasses.replace(options, hosts=nodes, rate=options.rate_between or options.rate)
    elif options.rate_between is not None:
        raise CompareError("--rate-between is for --nodes: write --rate for links between hosts of one rank")
    if options.rate_between is not None and options.rates:
        raise CompareError("give --rates or --rate-between, not both")
    if len(set(options.methods)) != len(options.methods):
        raise CompareError("--methods: name each method once")
    if options.whole_baselines and options.minutes is not None:
        raise CompareError("--whole-baselines is for --steps: with --minutes every run is whole")
    if options.engine != DDP and options.bucket_mb != BUCKET_MB:
        raise CompareError(f"--bucket-mb is for --engine ddp: {options.engine} has no buckets")
    try:
        make_network(options)
        parse_slow(options.slow, options.hosts)
    except ValueError as error:
        raise CompareError(str(error)) from error
    return options


def make_network(options: CompareOptions) -> Network:
    """The network of a comparison whose options were checked, not yet entered.

    Raises:
        ValueError: an option of it makes no sense.
    """
    rate = options.rates or options.rate
    return Network(
        options.hosts,
        rate,
        mode=options.network,
        delay=options.delay,
        loss=options.loss,
        ranks_per_host=options.ranks_per_host,
    )


def _weather(options: CompareOptions) -> list[str]:
    """What links have beyond their rates. Runs from before there were such links have the same conditions."""
    delay_s, loss = parse_delay(options.delay), parse_loss(options.loss)
    named = ((delay_s, f"delay {1e3 * delay_s:g} ms"), (loss, f"loss {100 * loss:g} %"))
    return [text for value, text in named if value]


def _slow_hosts(options: CompareOptions) -> list[str]:
    factors = parse_slow(options.slow, options.hosts)
    return [f"host {host} {factor:g} times slower" for host, factor in enumerate(factors) if factor != 1]


def _check_target_method(options: CompareOptions) -> None:
    target = options.target or ""
    setter = target.removeprefix("method:")
    if target.startswith("method:") and setter not in options.methods:
        raise CompareError(f"--target {target}: {setter!r} is not among the methods: {' '.join(options.methods)}")


def _evaluation_interval(task: Task, steps: int | None, target: str | None) -> int:
    """Steps between evaluations: only a target by the metric needs one before the end, and they take long."""
    if steps is None:
        return task.evaluate_every
    by_metric = target is not None and target.startswith("metric:")
    return min(task.evaluate_every, max(1, steps // 8)) if by_metric else steps


def _deadline(options: CompareOptions, task: Task) -> float:
    """Twenty times what a dense step takes on the slowest link, and a minute of the slowest host's at least.

    Where ranks share a link, all of them may send through it.
    """
    rate = min(parse_rate(rate) for rate in options.rates or [options.rate])
    dense_s = 2 * 4 * count(task.model) * options.ranks_per_host / (rate / 8)
    dense_s += options.ranks * parse_delay(options.delay)
    return max(60.0 * max(parse_slow(options.slow, options.hosts)), 20 * dense_s)
