"""`simulate`: what training by a method takes on ranks that need not exist."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import torch

from gradwire.choosing import parameters_in, square_matrices
from gradwire.core.errors import SpecError
from gradwire.core.grain import ParameterSpec
from gradwire.core.key import Key
from gradwire.core.link import Link
from gradwire.core.rates import parse_rate
from gradwire.drivers.cost import Parameters, specs_of, specs_on
from gradwire.network.slow import parse_slow
from gradwire.reducers.base import Reducer
from gradwire.simulation.draws import ComputingTimes, SlowInTurn, TimeSpread
from gradwire.simulation.elastic import Away, train_elastic
from gradwire.simulation.failures import Failing, run_with_failures
from gradwire.simulation.links import LevelLinks, MessageTimes, message_times
from gradwire.simulation.options import MOST_RANKS, SimulateOptions
from gradwire.simulation.result import Interval, SimulatedRun, StepShares, percentile
from gradwire.simulation.schedules import AmongThoseHere, EveryStep, InWindows, WithServers, schedule_of
from gradwire.simulation.servers import Servers, computing_times, train_with_servers
from gradwire.simulation.windows import Meetings, train_in_windows
from gradwire.tasks.builtin import make_task

FAILURES = 1000
"""Failures of a run whose lost time is simulated, in the mean."""

LEAST_WINDOWS = 10
"""Windows that are simulated at least."""

SEEN_LOSSES, MOST_ROUNDS, MOST_DRAWS = 500, 4_000, 20_000_000
"""Hosts that are lost in an elastic run in the mean; rounds, and steps of ranks, that it has at most for that."""


def simulate(method: str, options: SimulateOptions, shown: int = 0) -> SimulatedRun:
    """Return what training takes on simulated ranks. The same arguments give the same result.

    Ranks that meet are vectors, one element a rank, and each push to a server is an event. What messages take comes
    from the cost driver, what ranks compute is drawn; docs/simulate.md has all formulas.

    Args:
        method: a spec: of every step, of windows, `elastic:H`, or `asgd`, `ssp:S`, `dcasgd`.
        options: what is trained, where, and what goes wrong. Those that the method has no use for do not count.
        shown: steps to keep for `chrome_trace`; of methods of every step and of windows.

    Raises:
        SpecError, CompositionError: a method that cannot be simulated or built, or that needs more ranks; options that
            make no sense.
        TopologyError: a file of links that cannot be read.
        TaskError: a task that cannot be found.

    >>> ten_ms = SimulateOptions(step="10ms", parameters="1M", ranks=8, rate="1gbit")
    >>> found = simulate("none", ten_ms)
    >>> f"{found.step_s:.4f} s, {found.shares.messages:.0%} for messages"
    '0.0771 s, 87% for messages'
    """
    return simulate_model(method, model_of(options), options, shown)


def simulate_model(method: str, model: Parameters, options: SimulateOptions, shown: int = 0) -> SimulatedRun:
    """Return what training a model of your own takes on simulated ranks, see `simulate`.

    Args:
        method: a spec.
        model: a module, or what its `parameters()` or `named_parameters()` return; in place of that of `options`.
        options, shown: as in `simulate`.

    Raises:
        SpecError, CompositionError, TopologyError: as `simulate`.

    >>> options = SimulateOptions(step="10ms", ranks=8, rate="1gbit")
    >>> round(simulate_model("int4", torch.nn.Linear(1000, 1000), options).step_s, 4)
    0.0245
    """
    schedule, model, links = schedule_of(method), specs_of(model), links_of(options)
    times = ComputingTimes(
        options.seconds("step"),
        TimeSpread.of(options.spread),
        _slow(options),
        SlowInTurn.of(options.slow_in_turn),
        options.seed,
    )
    match schedule:
        case EveryStep(reducer):
            messages = _messages(reducer, model, options.ranks, links)
            meetings = Meetings(messages.seconds, messages.pieces, options.seconds("coding"), options.overlap)
            return _met(method, schedule.name, options, times, meetings, shown)
        case InWindows(reducer, every, delay, fragments, vectors):
            messages = _messages(reducer, model, options.ranks, links)
            meetings = Meetings(
                vectors * messages.seconds / fragments,
                1,
                options.seconds("coding") / fragments,
                0.0,
                every,
                delay,
                fragments,
            )
            return _met(method, schedule.name, options, times, meetings, shown)
        case AmongThoseHere(reducer, every):
            return _elastic(method, options, times, reducer, every, model, links)
        case WithServers():
            _refuse_served(method, options)
            return _served(method, options, times, schedule, model, links)


def scale(method: str, options: SimulateOptions, first: int, last: int) -> Iterator[SimulatedRun]:
    """Yield runs of `first` ranks, of twice as many, and so on to `last`, each rank with as much work as before.

    Raises:
        SpecError: no such range, and as `simulate`.
    """
    if not 1 <= first <= last <= MOST_RANKS:
        raise SpecError(f"--scale {first}..{last} is no range of 1 to {MOST_RANKS:,} ranks: write one such as 8..16384")
    ranks = first
    while ranks <= last:
        yield simulate(method, dataclasses.replace(options, ranks=ranks))
        ranks *= 2


# What options say --------------------------------------------------------------------------------------------


_USED_BY = {
    "overlap": ("every step",),
    "device": ("every step", "windows", "elastic"),
    "all_reduce": ("every step", "windows", "elastic"),
    "interval": ("every step", "windows"),
    "checkpoint": ("every step", "windows"),
    "detection": ("elastic",),
    "servers": ("servers",),
    "server_rate": ("servers",),
    "server_time": ("servers",),
}
"""Options that only some schedules have a use for."""


def refuse_idle(methods: Sequence[str], options: SimulateOptions) -> None:
    """Refuse options that none of these methods has a use for, so that nobody believes that they count.

    Raises:
        SpecError: with the option; methods that cannot be simulated.
    """
    schedules = {schedule_of(method).name for method in methods}
    for name, kind in ((each.name, each) for each in dataclasses.fields(options)):
        if getattr(options, name) != kind.default and schedules.isdisjoint(_USED_BY.get(name, schedules)):
            flag = f"--{name.replace('_', '-')}"
            raise SpecError(
                f"{flag} is for methods of {' and '.join(_USED_BY[name])}, and {', '.join(methods)} is of "
                f"{' and '.join(sorted(schedules))}: leave it out"
            )


def _refuse_served(method: str, options: SimulateOptions) -> None:
    if options.mtbf is not None or options.ranks_per_host > 1:
        raise SpecError(
            f"failures and hosts of several ranks are not simulated with the servers of {method!r}: leave --mtbf and "
            "--ranks-per-host out"
        )


@functools.lru_cache(maxsize=4)
def _model(task: str, text: str | None, parameters: str | None) -> Sequence[ParameterSpec]:
    if parameters is None:
        from pathlib import Path

        return specs_of(make_task(task, 0, None if text is None else Path(text)).model)
    return square_matrices(parameters_in(parameters))


def model_of(options: SimulateOptions) -> Sequence[ParameterSpec]:
    """The parameters of the model that is trained, without data.

    Raises:
        TaskError, SpecError: no such task, or no number.
    """
    text = None if options.text is None else str(options.text)
    return specs_on(options.device, _model(options.task, text, options.parameters))


def links_of(options: SimulateOptions) -> LevelLinks:
    """The links of all levels.

    Raises:
        SpecError, TopologyError: a rate or a file that cannot be read.
    """
    if options.topology is not None:
        found = LevelLinks.of_topology(options.topology)
    elif options.measured is not None:
        found = LevelLinks.of_profile(options.measured)
    else:
        link = Link(options.seconds("latency"), _beta(options.rate))
        inside = None if options.inside is None else Link(0.0, _beta(options.inside))
        found = LevelLinks.of_hosts(link, options.ranks_per_host, inside)
    return dataclasses.replace(found, all_reduce=options.all_reduce)


def _beta(rate: str) -> float:
    try:
        return 8 / parse_rate(rate)
    except ValueError as error:
        raise SpecError(str(error)) from error


def _slow(options: SimulateOptions) -> dict[int, float]:
    try:
        factors = parse_slow(options.slow, options.ranks)
    except ValueError as error:
        raise SpecError(str(error).replace("host", "rank")) from error
    return {rank: factor for rank, factor in enumerate(factors) if factor != 1.0}


def _messages(reducer: Reducer, model: Sequence[ParameterSpec], ranks: int, links: LevelLinks) -> MessageTimes:
    if ranks == 1:
        return MessageTimes(0.0, 1, 0)
    return message_times(reducer, model, ranks, links)


# Schedules ---------------------------------------------------------------------------------------------------


def _met(
    method: str, schedule: str, options: SimulateOptions, times: ComputingTimes, meetings: Meetings, shown: int
) -> SimulatedRun:
    """Ranks that meet in every step or window."""
    every = meetings.every
    windows = max(math.ceil(options.steps / every), 1 if every == 1 else LEAST_WINDOWS)
    found = train_in_windows(times.steps(options.ranks), options.ranks, meetings, windows * every, shown)
    steps = windows * every
    step_s = sum(found.window_s) / steps
    parts = (found.computed_s, found.coded_s, found.waited_s, found.exposed_s)
    lost, intervals = _lost(options, step_s)
    return SimulatedRun(
        method, schedule, options.ranks, steps, step_s,
        percentile(found.window_s, 0.5) / every, percentile(found.window_s, 0.99) / every, times.mean_s,
        StepShares.of(*(float(part.sum()) for part in parts)), lost=lost, intervals=intervals, shown=tuple(found.shown),
    )  # fmt: skip


def _lost(options: SimulateOptions, step_s: float) -> tuple[float, tuple[Interval, ...]]:
    """The share of time that failures and checkpoints take, at the interval that is taken and at others."""
    if options.mtbf is None:
        return 0.0, ()
    failing = Failing(options.seconds("mtbf"), options.hosts, options.seconds("checkpoint"), options.seconds("restart"))
    named = {"best": failing.best_s, "Young 1974": failing.young_s, "Daly 2006": failing.daly_s}
    if options.interval is not None:
        named = {"given": options.seconds("interval"), **named}
    else:
        failing.refuse_hopeless()
    found = [_interval(name, seconds, failing, options.seed, step_s) for name, seconds in named.items()]
    return found[0].simulated, tuple(found)


def _interval(name: str, interval_s: float, failing: Failing, seed: int, step_s: float) -> Interval:
    """An interval of whole steps, and what a run of it loses; all intervals have the same failures."""
    interval_s = max(1, round(interval_s / step_s)) * step_s
    draws = random.Random(Key(seed=seed, name="failures").stream_seed)
    gaps = (draws.expovariate(1 / failing.mean_s) for _ in itertools.count())
    if failing.lost(interval_s) > 0.999:
        return Interval(name, interval_s, failing.lost(interval_s), 1.0)
    work_s = max(FAILURES * failing.mean_s * (1 - failing.lost(interval_s)), 10 * interval_s)
    run = run_with_failures(work_s, interval_s, failing.checkpoint_s, failing.restart_s, gaps)
    return Interval(name, interval_s, failing.lost(interval_s), run.lost)


def _elastic(
    method: str,
    options: SimulateOptions,
    times: ComputingTimes,
    reducer: Reducer,
    every: int,
    model: Sequence[ParameterSpec],
    links: LevelLinks,
) -> SimulatedRun:
    """Ranks that average among those that are here."""
    whole = max(level.ranks for level in links.levels)

    @functools.cache
    def messages_s(count: int) -> float:
        return _messages(reducer, model, min(options.ranks, -(-count // whole) * whole), links).seconds

    mtbf_s = math.inf if options.mtbf is None else options.seconds("mtbf")
    away = Away(
        mtbf_s, options.seconds("restart"), options.seconds("detection"), min(options.ranks_per_host, options.ranks)
    )
    generator = torch.Generator().manual_seed(Key(seed=options.seed, name="hosts that leave").stream_seed >> 1)
    rounds = max(math.ceil(options.steps / every), LEAST_WINDOWS)
    if math.isfinite(mtbf_s):  # so long that losses are seen, within some seconds of computing
        seen = math.ceil(SEEN_LOSSES * mtbf_s / options.hosts / (every * times.mean_s))
        rounds = max(rounds, min(seen, MOST_ROUNDS, MOST_DRAWS // (every * options.ranks)))
    found = train_elastic(
        times.steps(options.ranks), options.ranks, every, rounds, messages_s, options.seconds("coding"), away, generator
    )
    if not sum(found.present):
        raise SpecError(
            "no round was ended by anyone, since every host was lost first: give --mtbf a longer time, or take shorter "
            "windows"
        )
    shares = StepShares.of(found.computed_s, found.coded_s, found.waited_s, found.exposed_s)
    present, steps = sum(found.present) / rounds, rounds * every
    return SimulatedRun(
        method, "elastic", options.ranks, steps * present / options.ranks, sum(found.round_s) / steps,
        percentile(found.round_s, 0.5) / every, percentile(found.round_s, 0.99) / every, times.mean_s,
        shares, lost=1 - present / options.ranks, present=present,
    )  # fmt: skip


def _served(
    method: str,
    options: SimulateOptions,
    times: ComputingTimes,
    schedule: WithServers,
    model: Sequence[ParameterSpec],
    links: LevelLinks,
) -> SimulatedRun:
    """Ranks that push to servers."""
    if len(links.levels) > 1:
        raise SpecError(f"the servers of {method!r} are simulated on links of one level: give --rate and no --topology")
    every, link = schedule.every, links.outermost
    like = torch.empty(sum(spec.numel for spec in model), device="meta")
    server_link = link if options.server_rate is None else Link(link.alpha_s, _beta(options.server_rate))
    served = Servers(
        schedule.sending.nbytes(like), like.nbytes, link, server_link, options.servers, options.seconds("server_time"),
        options.seconds("coding"), schedule.bound,
    )  # fmt: skip
    pushes = max(2, math.ceil(options.steps / every))
    seconds = computing_times(functools.partial(times.chunk, options.ranks), every)
    found = train_with_servers(seconds, options.ranks, served, options.ranks * pushes)
    known_s = found.computed_s + found.coded_s + found.held_s
    shares = StepShares.of(found.computed_s, found.coded_s, found.held_s, sum(found.cycle_s) - known_s)
    return SimulatedRun(
        method, "servers", options.ranks, pushes * every, found.ended_s / (pushes * every),
        percentile(found.cycle_s, 0.5) / every, percentile(found.cycle_s, 0.99) / every, times.mean_s,
        shares, staleness=sum(found.staleness) / len(found.staleness),
    )  # fmt: skip
