"""What coding takes in several source trees: `python benchmarks/coding.py BASE TREE... [--vectors 512 256] [--save]`.

For comparing changes to kernels, which a step on a network hides: most of that is the link. One process for each tree
trains nothing and sends nothing. It makes whole steps of four virtual ranks with given gradients: error feedback,
encoding, decoding, means, in the grains that training has. All processes run in turn, a stretch of steps at a time, so
that whatever else the machine does falls on all alike. Printed is a tree's time over that of BASE in the same round,
the median over rounds. Give BASE twice: what it takes of itself is the noise.

With one thread it is the processor's time, with more of them the clock's. TREE is a folder to import `gradwire` from.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METHODS = ["int4", "powersgd:8,factors=fp16", "topk:0.01", "sign"]
RANKS = 4
MODELS = {"small": [(256, 192), *4 * [(768, 192), (192, 768), (576, 192), (192, 192)]], "large": [(1024, 2048)] * 4}
"""Shapes of weights: about the byte-GPT's 1.85 M parameters, and 8.4 M of which grains are as large as they get."""

VECTORS: dict[str, dict[str, str]] = {
    "host": {},
    "256": {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+popcnt,+lzcnt,+f16c"},
    "128": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"},
}
"""Processors to compile for: this one (512 bits where it has AVX-512), one with AVX2, one with nothing beyond SSE2."""

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Memory that was freed stays: fetching it anew from the system takes long, and not always equally long."""


class Worker:
    """A process that imports gradwire from one tree."""

    def __init__(self, tree: str, vectors: str, threads: int, cache: str) -> None:
        digest = f"{Path(tree).resolve()}/{vectors}".replace("/", "_")
        environment = {
            **os.environ,
            **VECTORS[vectors],
            "PYTHONPATH": tree,
            "NUMBA_CACHE_DIR": os.path.join(cache, digest),
            "OMP_NUM_THREADS": str(threads),
            **KEEP_MEMORY,
        }
        command = [sys.executable, __file__, "--serve", tree]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, model: str, method: str, steps: int) -> float:
        """Seconds of one step of one rank."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([model, method, steps]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of a tree ended with status {self.process.wait()}")
        return float(answer)

    def end(self) -> None:
        """Let the process end, which it does when it is asked nothing any more."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Answer questions of `Worker.ask` until there are none."""
    import torch
    from torch import nn

    import gradwire
    from gradwire.drivers.virtual import VirtualRanks

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    made: dict[tuple[str, str], VirtualRanks] = {}
    gradients: dict[str, list[dict[str, torch.Tensor]]] = {}

    def make(model: str, method: str) -> VirtualRanks:
        generator = torch.Generator().manual_seed(0)
        parameters = nn.ParameterList(torch.zeros(shape) for shape in MODELS[model])
        if model not in gradients:
            made.clear()
            gradients.clear()
            gradients[model] = [
                {name: torch.randn(p.shape, generator=generator) ** 3 for name, p in parameters.named_parameters()}
                for _ in range(RANKS)
            ]
        ranks = VirtualRanks(gradwire.parse(method), parameters, RANKS)
        for _ in range(2):
            ranks.step(gradients[model])
        return ranks

    for line in sys.stdin:
        model, method, steps = json.loads(line)
        if (model, method) not in made:
            made[model, method] = make(model, method)
        ranks = made[model, method]
        begun = clock()
        for _ in range(steps):
            ranks.step(gradients[model])
        print((clock() - begun) / (steps * RANKS), flush=True)


def measure(arguments: argparse.Namespace, vectors: str, cache: str) -> list[dict[str, Any]]:
    """A row for each model and method."""
    workers = [Worker(tree, vectors, arguments.threads, cache) for tree in arguments.trees]
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        times: dict[str, list[list[float]]] = {method: [] for method in arguments.methods}
        for method in arguments.methods:
            for worker in workers:
                worker.ask(model, method, 1)  # which compiles
        for turn in range(arguments.rounds):
            for method in arguments.methods:
                times[method].append([0.0] * len(workers))
                for i in range(len(workers)):
                    at = (i + turn) % len(workers)
                    times[method][-1][at] = workers[at].ask(model, method, arguments.stretch if model == "small" else 2)
        rows += [summary(model, method, vectors, arguments, each) for method, each in times.items()]
    for worker in workers:
        worker.end()
    return rows


def summary(
    model: str, method: str, vectors: str, arguments: argparse.Namespace, rows: list[list[float]]
) -> dict[str, Any]:
    """Print and return what trees took."""
    ratios = [statistics.median(row[i] / row[0] for row in rows) for i in range(len(arguments.trees))]
    base = statistics.median(row[0] for row in rows)
    text = " ".join(f"{ratio:7.3f}" for ratio in ratios)
    print(f"{model:6s} {method:26s} {vectors:5s} {1e3 * base:8.2f} ms {text}", flush=True)
    return {"model": model, "method": method, "vectors": vectors, "base_s": base, "ratios": ratios}


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", help="folders to import gradwire from, the first of them the base")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--vectors", nargs="+", default=["host", "256"], choices=list(VECTORS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stretch", type=int, default=5, help="steps of the small model in a row")
    parser.add_argument("--cache", help="a folder that keeps compiled kernels")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/coding_DATE.json")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache or folder
        rows = [row for vectors in arguments.vectors for row in measure(arguments, vectors, cache)]
    if arguments.save:
        from common import save_result

        figures = {"trees": [Path(tree).name for tree in arguments.trees], "threads": arguments.threads, "rows": rows}
        print("wrote", save_result("coding", figures))


if __name__ == "__main__":
    main()
