"""What codecs lose: `python benchmarks/quality.py [--specs SPEC ...] [--tasks TASK ...] [--save]`.

Both tasks of `gradwire compare` are trained uncompressed for 500 steps on four virtual ranks, and every method is given
the gradients of rank 0 as they come, cut into grains as in training, in a world of one rank. One process trains, and
`--processes` others share the methods.

- Early, in the middle and late, the exchange without its error feedback codes one gradient: what is lost of it, over
  several draws where the method draws, and whether that is within what the method declares. It starts afresh a few
  steps before, so that a warm start and thresholds that follow are as in training.
- All along, the method with its error feedback codes all 500 gradients: how large the residual is at each step.

With --save, writes a dated result file, and from it the table and picture of docs/building/quality.md; with --docs does
the latter alone, from a file. Exits with 1 where something lost more than it declares.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing

import gradwire
from common import save_result, training
from gradwire import kernels
from gradwire.codecs import Codec
from gradwire.core.collective import AllGather, AllToAll, Collective
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.program import asking
from gradwire.core.state import State, walk
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.lockstep import run_ranks
from gradwire.drivers.plan import Unit, plan
from gradwire.drivers.virtual import Gradients, VirtualRanks, gathered
from gradwire.reducers import Program, Reduced, Reducer, Step, Wrapper
from gradwire.reducers.aggregate import Sharded
from gradwire.reducers.sent import SentPayload
from gradwire.tasks.builtin import BUILT_IN, make_task
from quality_page import write_page

RANKS = 4
STEPS = 500
EARLY = 5
CHECKPOINTS = (10, 50, 100, 250, 500)
WINDOW = 50
"""Steps over which norms are averaged: gradients of small batches are noisy."""
BEFORE = 5
"""Steps that an exchange codes before the one it is measured at."""
DRAWS = 16
Z = 4.0
"""Standard errors that the mean over draws may be beyond what is declared."""
ALSO = ("threshold:0.01", "powersgd:8,factors=fp16")
"""Beside the registry's examples: a threshold of gradients' size, and what the README recommends."""


# ------------------------------------------------------------------------------------------ what is measured


def specs_to_measure() -> list[str]:
    """Every example of every method that loses something, each coding once: exchanges and nodes do not matter here."""
    found: dict[Reducer, str] = {}
    for method in gradwire.methods().values():
        plain = () if method.argument == "density" else (method.name,) if method.fixed else ()
        for example in (*method.examples, *plain):
            spec = ",".join(part for part in example.split(",") if not part.startswith(("exchange=", "node=")))
            reducer = gradwire.parse(spec)
            core = exchange_of(reducer)
            if not (core.lossless or isinstance(core, Sharded)) and core.repeatable:
                found.setdefault(reducer, spec)
    for spec in ALSO:
        found.setdefault(gradwire.parse(spec), spec)
    return list(found.values())


def exchange_of(reducer: Reducer) -> Reducer:
    """What is left without error feedback, momentum and guards."""
    while isinstance(reducer, Wrapper):
        reducer = reducer.inner
    return reducer


# --------------------------------------------------------------------------------------- one gradient, coded


@dataclass
class Loss:
    """What is lost of one grain, over draws, and what is declared of it."""

    grain: str
    declared: float | None
    omega: float | None
    energy: float = 0.0
    lost: list[float] = field(default_factory=list[float])
    product: list[float] = field(default_factory=list[float])

    def add(self, x: Tensor, left: Tensor) -> None:
        """Take in one draw: x, and x less what was sent."""
        x, left = x.double().view(-1), left.double().view(-1)
        self.energy = float(x.dot(x))
        self.lost.append(float(left.dot(left)))
        self.product.append(float(x.dot(x - left)))

    def excess(self) -> str | None:
        """By how much the declared bounds are missed, beyond the error of so many draws and of float32."""
        spread = statistics.stdev(self.lost) / len(self.lost) ** 0.5 if len(self.lost) > 1 else 0.0
        surely = (statistics.mean(self.lost) - Z * spread) / self.energy
        bounds = {"contraction": None if self.declared is None else 1 - self.declared, "omega": self.omega}
        for name, bound in bounds.items():
            # decoded values are rounded once or twice, as the laws allow
            if bound is not None and surely > (bound**0.5 * (1 + 2.0**-12) + 2.0**-21) ** 2:
                return f"{name} of {self.grain}: surely {surely:.6g} of |x|^2 is lost, and {bound:.6g} declared"
        return None


class Wire:
    """Counts the bytes of this rank's contribution: all that is handed over before the way back."""

    def __init__(self) -> None:
        self.used = self.buffers = 0

    def watch(self, program: Program, grain: Grain) -> Program:
        """Run a program, looking at what it sends."""
        returning, handed = False, 0

        def look(request: Collective) -> Collective:
            nonlocal returning, handed
            back = returning and isinstance(request, AllGather)
            handed += 0 if back else request.nbytes
            returning = returning or isinstance(request, AllToAll)
            return request

        reduced = yield from asking(program, look)
        sent = reduced.sent
        self.buffers += handed
        whole = not isinstance(sent, SentPayload)
        self.used += handed if whole else sent.codec.used_bytes(sent.payload, grain.numel, grain.dtype)
        return reduced


class Alone:
    """Programs on the grains that a method has in training, in a world of one rank."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.states: list[State] = []

    def start(self) -> None:
        """Begin anew."""
        self.states = [reducer.init(grain, Step(0, 0, 1)) for grain, reducer in self.units]

    def code(self, gradients: Gradients, step: Step, wire: Wire) -> list[Reduced]:
        """Code one gradient; states stay as they are."""
        programs = [
            [wire.watch(reducer.reduce(grain, gathered(grain, gradients), state, step), grain)]
            for (grain, reducer), state in zip(self.units, self.states, strict=True)
        ]
        return run_ranks([programs])[0]

    def advance(self, gradients: Gradients, index: int) -> None:
        """Code one gradient and go on from there."""
        self.states = [reduced.state for reduced in self.code(gradients, Step(index, 0, 1), Wire())]

    def measure(self, gradients: Gradients, index: int) -> dict[str, Any]:
        """The figures of one gradient. A method whose first two draws agree draws nothing."""
        losses = [Loss(grain.name, reducer.contraction(grain), omega_of(reducer)) for grain, reducer in self.units]
        wire = self._draw(gradients, index, losses, 0)
        self._draw(gradients, index, losses, 1)
        if all(loss.lost[0] == loss.lost[1] for loss in losses):
            for loss in losses:
                del loss.lost[1], loss.product[1]
        else:
            for draw in range(2, DRAWS):
                self._draw(gradients, index, losses, draw)
        numel = sum(grain.numel for grain, _ in self.units)
        return {"bits": 8 * wire.used / numel, "buffer_bits": 8 * wire.buffers / numel} | figures(losses)

    def _draw(self, gradients: Gradients, index: int, losses: Sequence[Loss], draw: int) -> Wire:
        """Code a gradient with the keys of one draw and add up what it loses."""
        wire = Wire()
        results = self.code(gradients, Step(index, 0, 1, seed=draw), wire)
        for loss, (grain, _), reduced in zip(losses, self.units, results, strict=True):
            x, left = gathered(grain, gradients), gathered(grain, gradients)
            reduced.sent.subtract_from(left)
            loss.add(x, left)
        return wire


def omega_of(reducer: Reducer) -> float | None:
    """The declared variance of an unbiased codec."""
    codec = getattr(reducer, "codec", None)
    return codec.omega() if isinstance(codec, Codec) and codec.unbiased else None


def figures(losses: Sequence[Loss]) -> dict[str, Any]:
    """Over all grains: relative error, cosine, and what is declared of this very gradient."""
    energy = sum(loss.energy for loss in losses)
    lost = [sum(draws) for draws in zip(*(loss.lost for loss in losses), strict=True)]
    product = [sum(draws) for draws in zip(*(loss.product for loss in losses), strict=True)]
    # |sent|^2 = |x|^2 - 2 x.left + |left|^2, and x.left = |x|^2 - x.sent
    cosine = [p / (energy * max(2 * p - energy + q, 1e-300)) ** 0.5 for p, q in zip(product, lost, strict=True)]
    share = statistics.mean(lost) / energy
    return {
        "error": share**0.5,
        "cosine": statistics.mean(cosine),
        "contraction": 1 - share,
        "declared": weighted([loss.declared for loss in losses], losses),
        "omega": weighted([loss.omega for loss in losses], losses),
        "draws": len(lost),
        "violations": [text for loss in losses if loss.energy and (text := loss.excess())],
    }


def weighted(values: Sequence[float | None], losses: Sequence[Loss]) -> float | None:
    """Mean over grains by their energy, if every grain has a value."""
    known = [value * loss.energy for value, loss in zip(values, losses, strict=True) if value is not None]
    return sum(known) / sum(loss.energy for loss in losses) if len(known) == len(values) else None


# ------------------------------------------------------------------------------------------ many gradients, fed back


class Subject:
    """One method, given gradient after gradient."""

    def __init__(self, spec: str, model: Sequence[ParameterSpec], steps: int) -> None:
        units = plan(model, gradwire.parse(spec)).units
        self.stages = stages_of(steps)
        self.exchange = Alone([Unit(grain, exchange_of(reducer)) for grain, reducer in units])
        self.fed = Alone(units) if any(reducer.keeps_input for _, reducer in units) else None
        if self.fed is not None:
            self.fed.start()
        self.residuals: list[float] = []
        self.measured: dict[str, Any] = {}

    def step(self, gradients: Gradients, index: int) -> None:
        """Take the next gradient."""
        if self.fed is not None:
            self.fed.advance(gradients, index)
            self.residuals.append(norm(owed(self.fed.states)))
        for stage, at in self.stages.items():
            if index == max(0, at - BEFORE):
                self.exchange.start()
            if index == at:
                self.measured[stage] = self.exchange.measure(gradients, index)
            elif at - BEFORE <= index < at:
                self.exchange.advance(gradients, index)


def stages_of(steps: int) -> dict[str, int]:
    """The steps at which one gradient is looked at."""
    return {"early": EARLY, "middle": steps // 2, "late": steps - 1}


def owed(states: Iterable[State]) -> list[Tensor]:
    """The residuals of all grains."""
    return [leaf.tensor for state in states for path, leaf in walk(state) if path.endswith("residual")]


def norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them as one vector."""
    return sum(float(torch.linalg.vector_norm(tensor.float())) ** 2 for tensor in tensors) ** 0.5


def feedback(residuals: Sequence[float], norms: Sequence[float]) -> dict[str, Any] | None:
    """Residual over gradient at checkpoints, and the residual itself window after window: root mean squares."""
    if not residuals:
        return None
    ratios = {
        str(at): root_mean_square(residuals[max(0, at - WINDOW) : at])
        / root_mean_square(norms[max(0, at - WINDOW) : at])
        for at in CHECKPOINTS
        if at <= len(residuals)
    }
    return {"ratio": ratios, "norms": windows(residuals)}


def windows(values: Sequence[float]) -> list[float]:
    """Root mean square of each window."""
    return [root_mean_square(values[start : start + WINDOW]) for start in range(0, len(values), WINDOW)]


def root_mean_square(values: Sequence[float]) -> float:
    """Of some norms."""
    return statistics.mean(value * value for value in values) ** 0.5


# ------------------------------------------------------------------------------------------------ all of it


def measure(specs: Sequence[str], tasks: Sequence[str], steps: int, processes: int) -> dict[str, Any]:
    """Train each task once, and have processes that share the methods look at each gradient as it comes."""
    found = {task: record(specs, task, steps, processes) for task in tasks}
    return {"ranks": RANKS, "steps": steps, "draws": DRAWS, "window": WINDOW, "tasks": found}


def record(specs: Sequence[str], task_name: str, steps: int, processes: int) -> dict[str, Any]:
    """The figures of all methods on one task."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    task = make_task(task_name, 0, None)
    model = parameter_specs(task.model.named_parameters())
    results, feeds = context.Queue(), [context.Queue(maxsize=4) for _ in range(processes)]
    workers = [
        context.Process(target=look, args=(specs[i::processes], model, steps, feed, results), daemon=True)
        for i, feed in enumerate(feeds)
    ]
    for worker in workers:
        worker.start()
    norms: list[float] = []
    for index, (own, *_) in enumerate(training(task, VirtualRanks(gradwire.parse("none"), task.model, RANKS), steps)):
        norms.append(norm(own.values()))
        for feed in feeds:
            patiently(partial(feed.put, own), workers)
        if (index + 1) % 50 == 0:
            print(f"{task_name}: {index + 1} steps of {steps}", flush=True)
    methods: dict[str, Any] = {}
    for _ in workers:
        methods |= patiently(results.get, workers)
    for row in methods.values():
        row["residual"] = feedback(row["residual"], norms)
    found = {
        "description": task.description,
        "stages": stages_of(steps),
        "norms": windows(norms),
        "methods": {spec: methods[spec] for spec in specs},
    }
    show(task_name, found)
    return found


def patiently(action: Callable[..., Any], workers: Sequence[BaseProcess]) -> Any:
    """Wait for a queue as long as all workers live."""
    while True:
        try:
            return action(timeout=5)
        except (queue.Full, queue.Empty):
            if any(worker.exitcode for worker in workers):
                raise SystemExit("a process died: see above") from None


def look(specs: Sequence[str], model: Sequence[ParameterSpec], steps: int, feed: Any, results: Any) -> None:
    """What one process does: give every gradient to its methods, and report."""
    torch.set_num_threads(1)
    kernels.warm_up()
    subjects = {spec: Subject(spec, model, steps) for spec in specs}
    for index in range(steps):
        gradients = feed.get()
        for subject in subjects.values():
            subject.step(gradients, index)
    results.put({spec: subject.measured | {"residual": subject.residuals} for spec, subject in subjects.items()})


def show(task: str, found: Mapping[str, Any]) -> None:
    """Print the figures of a task."""
    print(f"\n{task}: {found['description']}")
    print(
        f"{'method':34s} {'bits':>7s}   {'relative error':20s} {'cosine':>6s}   {'contraction, declared':24s} residual"
    )
    for spec, row in found["methods"].items():
        stages = [row[stage] for stage in found["stages"]]
        errors = " ".join(f"{stage['error']:6.4f}" for stage in stages)
        worst = min(stages, key=lambda stage: stage["contraction"])
        declared = "" if worst["declared"] is None else f"{worst['declared']:.2g}"
        declared = declared if worst["omega"] is None else f"omega {worst['omega']:.3g}"
        owed = " ".join(f"{value:.2f}" for value in (row["residual"] or {"ratio": {}})["ratio"].values())
        middle = row["middle"]
        print(
            f"{spec:34s} {middle['bits']:7.3f}   {errors:20s} {middle['cosine']:6.3f}   "
            f"{worst['contraction']:9.5f} {declared:14s} {owed}",
            flush=True,
        )


def violations(found: Mapping[str, Any]) -> list[str]:
    """A line for each bound that was missed."""
    return [
        f"{task}, {stage}, {spec}: {text}"
        for task, part in found["tasks"].items()
        for spec, row in part["methods"].items()
        for stage in part["stages"]
        for text in row[stage]["violations"]
    ]


def main() -> None:
    """Measure and print; with --save write a dated result file and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", nargs="+", default=None, help="default: every example of the registry")
    parser.add_argument("--tasks", nargs="+", choices=BUILT_IN, default=["bytes", "digits"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/quality_DATE.json and the page")
    parser.add_argument("--docs", type=Path, help="write the page from this result file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.docs:
        write_page(json.loads(arguments.docs.read_text()), arguments.docs.name)
        return
    found = measure(arguments.specs or specs_to_measure(), arguments.tasks, arguments.steps, arguments.processes)
    missed = violations(found)
    if arguments.save:
        path = save_result("quality", found)
        write_page(found, path.name)
        print("wrote", path)
    if missed:
        raise SystemExit("\n".join(["", f"{len(missed)} DECLARED BOUNDS ARE MISSED:", *missed]))
    print("every declared bound holds")


if __name__ == "__main__":
    main()
