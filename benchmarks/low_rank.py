"""What low rank and sketches cost a processor: `python benchmarks/low_rank.py [--specs SPEC ...] [--threads N]`.

One step of the byte-GPT's 1.85 M gradients through a method, as the engine runs it, waves and coalescing included, on a
world of one rank: the exchange costs nothing, so this is the processor's share of a step. Beside it stand the
collectives and bytes of a step on four ranks, and the products that no low-rank method can do without: M Q, M^T P and
P Q^T of the same matrices. Methods are timed in turn, in rounds, and each figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gradwire
from common import Alone, save_result
from gradwire import kernels
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.cost import cost, parameter_specs
from gradwire.drivers.engine import Engine
from gradwire.drivers.plan import plan
from gradwire.tasks.builtin import ByteGPT

DEFAULT = ("none", "int4", "powersgd:1", "powersgd:4", "powersgd:16")
ROUNDS = 25


def steps_of(spec: str, model: Sequence[ParameterSpec]) -> Callable[[], None]:
    """A step of a method on a world of one, as the engine makes it."""
    engine = Engine(plan(model, gradwire.parse(spec)), Alone())
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(unit.grain.numel, generator=generator) for unit in engine.plan.units]

    def step() -> None:
        engine.begin()
        for i, gradient in enumerate(gradients):
            engine.deliver(i, 0, gradient)
            engine.pump()
        engine.finish()
        engine.release()
        engine.settle()

    return step


def products(model: Sequence[ParameterSpec], rank: int) -> Callable[[], None]:
    """M Q, M^T P and P Q^T of every matrix, equal shapes in batches: the least a low-rank method does."""
    units = [u for u in plan(model, gradwire.parse(f"powersgd:{rank}")).units if len(u.grain.shape) == 3]
    Ms = [torch.randn(u.grain.shape) for u in units]
    Qs = [torch.randn(M.shape[0], M.shape[2], rank) for M in Ms]

    def run() -> None:
        for M, Q in zip(Ms, Qs, strict=True):
            P = torch.bmm(M, Q)
            torch.bmm(P, torch.bmm(M.mT, P).mT)

    return run


def milliseconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor time of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Median wall and processor milliseconds of each, taken in turn."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            found[name].append(milliseconds(run))
    drop = 3  # the first rounds compile and touch new memory
    return {
        name: (statistics.median(w for w, _ in ts[drop:]), statistics.median(c for _, c in ts[drop:]))
        for name, ts in found.items()
    }


def measure(specs: Sequence[str]) -> dict[str, Any]:
    """Return and print a row a method."""
    model = parameter_specs(ByteGPT().named_parameters())
    runs: dict[str, Callable[[], object]] = {f"products of rank {r}": products(model, r) for r in (1, 4, 16)}
    runs |= {spec: steps_of(spec, model) for spec in specs}
    rows: dict[str, Any] = {}
    print(f"{'method':28s} {'wall ms':>8s} {'cpu ms':>8s} {'collectives':>12s} {'KB a rank':>10s}")
    for name, (wall, cpu) in timed(runs).items():
        row: dict[str, Any] = {"wall_ms": round(wall, 2), "cpu_ms": round(cpu, 2)}
        if name in specs:
            found = cost(gradwire.parse(name), model, world_size=4)
            row |= {"collectives": found.collectives, "wire_bytes": found.wire_bytes}
        rows[name] = row
        sent = row.get("wire_bytes")
        kb = "" if sent is None else f"{sent / 1e3:.0f}"
        print(f"{name:28s} {wall:8.2f} {cpu:8.2f} {row.get('collectives', '')!s:>12s} {kb:>10s}")
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", nargs="+", default=list(DEFAULT))
    parser.add_argument("--threads", type=int, default=1, help="ranks usually have about one core each")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/low_rank_DATE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels.warm_up()
    rows = {"methods": measure(arguments.specs)}
    if arguments.save:
        print("wrote", save_result("low_rank", rows))


if __name__ == "__main__":
    main()
