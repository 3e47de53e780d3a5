"""The main job: train one task with several methods on a slow network, and keep what was measured.

A comparison is a grid of runs, seeds outermost, so that slow drifts of the machine fall on every method alike. Each
finished run is stored at once; the same command run again goes on where the last one stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

import gradwire
from gradwire.bench import results
from gradwire.bench.net import Network, parse_rate
from gradwire.bench.ranks import RankFailure, run_ranks
from gradwire.bench.results import Comparison, Evaluation, Run, Split, Wire
from gradwire.bench.tasks import Task, check_one_step, count, make_task
from gradwire.bench.torch_hooks import parse_torch
from gradwire.bench.warm import WarmHosts
from gradwire.bench.worker import PROGRESS, Job
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


class News(NamedTuple):
    """How far the run in progress has come.

    Attributes:
        step: steps made.
        loss: rank 0's training loss.
        time_s: seconds of training.
        tx_bytes: bytes rank 0 has sent.
    """

    step: int
    loss: float
    time_s: float
    tx_bytes: float


class View(Protocol):
    """Someone who watches a comparison."""

    def begin(self, plan: Plan, network: str, kept: Sequence[tuple[str, int]]) -> None:
        """Runs are about to start; those `kept` are there already, as (method, seed)."""
        ...

    def start(self, method: str, seed: int) -> None:
        """A run starts."""
        ...

    def news(self, method: str, seed: int, news: News) -> None:
        """The run in progress has come a little further."""
        ...

    def finish(self, run: Run) -> None:
        """A run has finished, or failed."""
        ...


# -------------------------------------------------------------------------------------------- planning


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


def _check_numbers(options: Options) -> None:
    if options.minutes is not None and options.steps is not None:
        raise CompareError("give --steps or --minutes, not both")
    for name, value, least in (
        ("--hosts", options.hosts, 1),
        ("--seeds", options.seeds, 1),
        ("--steps", options.steps, 1),
    ):
        if value is not None and value < least:
            raise CompareError(f"{name} must be at least {least}, not {value}")
    for name, value in (
        ("--minutes", options.minutes),
        ("--bucket-mb", options.bucket_mb),
        ("--deadline", options.deadline_s),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise CompareError(f"{name} must be a positive number, not {value}")
    if len(set(options.methods)) != len(options.methods) or not options.methods:
        raise CompareError("--methods: name each method once, and at least one")
    try:
        Network(options.hosts, options.rate, mode=options.network)
    except ValueError as error:
        raise CompareError(str(error)) from error


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


# ------------------------------------------------------------------------------------------- comparing


def compare(options: Options, view: View) -> Comparison:
    """Run a comparison, or what is left of it, and store runs, results and tables in its folder.

    Args:
        options: what to compare.
        view: told what happens.

    Returns:
        All runs, failed ones included.

    Raises:
        GradwireError: the options are wrong, or clash with what the folder holds.
        OSError: the folder cannot be written.
    """
    plan = make_plan(options)
    folder = prepare_folder(options.out, fresh=options.fresh)
    with Network(options.hosts, options.rate, mode=options.network) as network:
        conditions = plan.conditions(network.mode)
        kept = stored_runs(folder, plan, conditions)
        view.begin(plan, network.description, [(run.method, run.seed) for run in kept])
        runs = {(run.method, run.seed): run for run in kept}
        missing = [cell for cell in plan.grid if cell not in runs]
        hosts = warm_hosts(plan, network, folder) if missing else contextlib.nullcontext()
        with hosts as warm:
            for method, seed in missing:
                view.start(method, seed)
                assert warm is not None
                run = run_once(plan, network, warm, method, seed, folder, view)
                run = dataclasses.replace(run, conditions=conditions)
                store_run(folder, run)
                runs[method, seed] = run
                view.finish(run)
        ordered = [runs[cell] for cell in sorted(plan.grid, key=lambda cell: _place(plan, cell))]
        comparison = assemble(plan, network, ordered)
    results.save(comparison, folder / "results.json")
    results.write_tables(comparison, folder)
    return comparison


def _place(plan: Plan, cell: tuple[str, int]) -> tuple[int, int]:
    return plan.options.methods.index(cell[0]), cell[1]


def assemble(plan: Plan, network: Network, runs: list[Run]) -> Comparison:
    """Put runs and their conditions together."""
    task, options = plan.task, dataclasses.asdict(plan.options)
    options |= {
        "out": str(plan.options.out),
        "text": str(plan.options.text) if plan.options.text else None,
        "steps": plan.steps,
        "evaluate_every": plan.evaluate_every,
        "deadline_s": plan.deadline_s,
    }
    del options["fresh"]
    return Comparison(
        task={
            "name": plan.options.task,
            "description": task.description,
            "parameters": count(task.model),
            "metric_name": task.metric_name,
            "higher_is_better": task.higher_is_better,
        },
        options=options,
        environment=environment(network),
        smoothing=plan.smoothing,
        target=plan.target,
        runs=runs,
    )


def warm_hosts(plan: Plan, network: Network, folder: Path) -> WarmHosts:
    """Processes that make every run of this comparison start at once."""
    options = plan.options
    return WarmHosts(network, options.hosts, options.task, options.text, folder / "logs")


def run_once(plan: Plan, network: Network, warm: WarmHosts, method: str, seed: int, folder: Path, view: View) -> Run:
    """Train with one method and one seed on every host; a failure becomes a failed `Run`."""
    place = folder / "logs" / f"{slug(method)}-seed{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    job = place / "job.json"
    job.write_text(json.dumps(dataclasses.asdict(make_job(plan, method, seed, place))))
    ranks = range(plan.options.hosts)

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith(PROGRESS):
            view.news(method, seed, News(**json.loads(line.removeprefix(PROGRESS))))

    try:
        run_ranks(
            [warm.command(rank, job.resolve()) for rank in ranks],
            [network.environment(rank) for rank in ranks],
            log_dir=place,
            deadline_s=run_deadline(plan),
            on_line=on_line,
        )
        return merge(method, seed, [json.loads((place / f"rank{rank}.json").read_text()) for rank in ranks])
    except RankFailure as failure:
        return Run(method, seed, status="failed", reason=str(failure))
    finally:
        for leftover in [*place.glob("rank*.json"), *place.glob("rendezvous*")]:
            leftover.unlink(missing_ok=True)


def make_job(plan: Plan, method: str, seed: int, place: Path) -> Job:
    """What each rank of a run is told."""
    options = plan.options
    return Job(
        method=method,
        seed=seed,
        task=options.task,
        text=str(options.text.resolve()) if options.text else None,
        steps=plan.steps,
        seconds=plan.seconds,
        bucket_mb=options.bucket_mb,
        evaluate_every=plan.evaluate_every,
        deadline_s=plan.deadline_s,
        folder=str(place.resolve()),
    )


def run_deadline(plan: Plan) -> float:
    """Upper limit on a whole run; a rank that hangs is found by its peers' collectives long before."""
    if plan.seconds is not None:
        return 3 * plan.seconds + 10 * plan.deadline_s
    return (plan.steps or 1) * plan.deadline_s + 10 * plan.deadline_s


def merge(method: str, seed: int, ranks: list[dict[str, Any]]) -> Run:
    """Make one run of what its ranks wrote: means over ranks, and times by the slowest."""

    def mean(name: str) -> float:
        return statistics.fmean(float(rank[name]) for rank in ranks)

    def columns(name: str) -> list[tuple[float, ...]]:
        return list(zip(*(rank[name] for rank in ranks), strict=True))

    total, framing, payload, buffers = (mean(n) for n in ("total", "framing", "payload", "buffers"))
    wire = Wire(total, framing, payload, buffers, total - framing - payload - buffers, mean("setup"))
    split = Split(*(mean(f.name) for f in dataclasses.fields(Split)))
    return Run(
        method=method,
        seed=seed,
        label=ranks[0]["label"],
        losses=[statistics.fmean(losses) for losses in columns("losses")],
        times_s=[max(times) for times in columns("times_s")],
        tx_bytes=[statistics.fmean(sent) for sent in columns("tx_bytes")],
        evaluations=[Evaluation(*evaluation) for evaluation in ranks[0]["evaluations"]],
        wire=wire,
        split=split,
        residual_norm=ranks[0]["residual_norm"],
    )


# --------------------------------------------------------------------------------------------- storing


def slug(method: str) -> str:
    """A method's spec as a file name."""
    return re.sub(r"[^A-Za-z0-9.=+-]", "_", method)


def prepare_folder(folder: Path, *, fresh: bool) -> Path:
    """Make the output folder and see that it can be written; with `fresh`, forget its runs."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    probe = folder / "runs" / ".probe"
    results.write_atomically(probe, "can this folder be written?")
    probe.unlink()
    if fresh:
        for path in (folder / "runs").glob("*.json"):
            path.unlink()
    return folder


def store_run(folder: Path, run: Run) -> None:
    """Keep a run, so that it need not be made again."""
    path = folder / "runs" / f"{slug(run.method)}-seed{run.seed}.json"
    results.write_atomically(path, json.dumps(results.run_to_json(run)))


def stored_runs(folder: Path, plan: Plan, conditions: dict[str, Any]) -> list[Run]:
    """Finished runs that a folder holds and this plan wants.

    Raises:
        CompareError: a stored run was made under other conditions; the message says which.
    """
    kept: list[Run] = []
    for method, seed in plan.grid:
        path = folder / "runs" / f"{slug(method)}-seed{seed}.json"
        run = read_run(path)
        if run is None or run.method != method or run.status != "finished":
            continue
        differing = [key for key, value in conditions.items() if run.conditions.get(key) != value]
        if differing:
            raise CompareError(_clash(folder, run, conditions, differing))
        kept.append(run)
    return kept


def read_run(path: Path) -> Run | None:
    """A stored run, or None if there is none that can be read."""
    try:
        return results.run_from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _clash(folder: Path, run: Run, conditions: dict[str, Any], differing: list[str]) -> str:
    changes = "; ".join(f"{key} was {run.conditions.get(key)!r}, is {conditions[key]!r}" for key in differing)
    return (
        f"{folder} holds runs made under other conditions ({changes}). "
        "Give another --out to keep them, or --fresh to replace them."
    )


# ----------------------------------------------------------------------------------------- environment


def processor() -> str:
    """The processor's name and how many cores of it may be used."""
    name = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
        name = found[1] if found else name
    except OSError:
        pass
    return f"{name}, {cores()} cores"


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(network: Network) -> dict[str, Any]:
    """Hardware, versions and network, for whoever reads the results elsewhere."""
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradwire": gradwire.__version__,
        "network": network.description,
        "network_mode": network.mode,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["gradwire", *sys.argv[1:]]),
    }
