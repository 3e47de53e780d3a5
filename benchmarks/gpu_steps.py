"""What methods add to a step of GPT-2 on one GPU, and how long a GPU codes: `python benchmarks/gpu_steps.py [--save]`.

A GPT of 124 M parameters trains in bfloat16 under DDP over NCCL. The world has one rank, so nothing travels: what a
method adds to DDP's own step is its coding and what its messages cost to start. PyTorch's own hooks stand beside it.
One training comes after the other, and each row tells the median of its rounds. DDP's own step is timed first and last,
which tells how far the machine's speed has changed.

The second table tells `gradwire.choosing.coding_s` of the same model among more ranks, beside what the planner assumes:
all bytes that coding must read and write, at the rate of a copy that is timed in the same run.

Without a CUDA device it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

import gpt2
import gradwire
from common import save_result
from gpu import device, median_ms
from gradwire.choosing import coding_s
from gradwire.planning.gradients import gradient_traffic

TOKENS, SAMPLES = 1024, 8
WARM_UP, STEPS, ROUNDS = 4, 5, 3
SPECS = ["none", "fp16", "bf16", "int8", "int4", "sign", "topk:0.01", "qsgd:15", "powersgd:8,factors=fp16"]
CODED = [spec for spec in SPECS if spec != "none"]
RANKS = (2, 8)
GRAINS = (20, 22, 23, 25)


# Steps ------------------------------------------------------------------------------------------------------


def model_on_gpu() -> nn.Module:
    """GPT-2, made on the GPU: a processor takes seconds to draw its parameters."""
    with torch.device("cuda"):
        return gpt2.model(TOKENS)


class Training:
    """A model under a method, its optimizer and its data."""

    def __init__(self, name: str) -> None:
        self._ends = ExitStack()
        self.ddp = DDP(model_on_gpu(), device_ids=[0])
        self._hook(name)
        self._optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4, fused=True)
        self._x = torch.randint(gpt2.VOCABULARY, (SAMPLES, TOKENS + 1), device="cuda")
        self.times_ms = list[float]()

    def _hook(self, name: str) -> None:
        if name == "PyTorch fp16":
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "PyTorch PowerSGD 8":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name != "DDP":
            spec, _, more = name.removeprefix("gradwire ").partition(", ")
            options: dict[str, Any] = {"residuals": "host"} if more == "residuals on the host" else {}
            if more.startswith("grains of 2^"):
                options = {"grain_numel": 1 << int(more.removeprefix("grains of 2^"))}
            self._ends.enter_context(gradwire.attach(self.ddp, spec, deadline_s=60, **options))

    def run(self, steps: int) -> None:
        """Train some steps; note the milliseconds of one."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                scores = self.ddp(self._x[:, :-1])
                loss = functional.cross_entropy(scores.flatten(0, 1), self._x[:, 1:].flatten())
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        torch.cuda.synchronize()
        self.times_ms.append((time.perf_counter() - began) * 1e3 / steps)

    def close(self) -> None:
        """Stop communicating."""
        self._ends.close()


def names() -> Iterator[str]:
    yield from ("DDP", "PyTorch fp16", "PyTorch PowerSGD 8")
    yield from (f"gradwire {spec}" for spec in SPECS)
    yield "gradwire int4, residuals on the host"
    for spec in ("none", "int4", "powersgd:8,factors=fp16"):
        yield from (f"gradwire {spec}, grains of 2^{exponent}" for exponent in GRAINS)
    yield "DDP"


def steps() -> list[dict[str, Any]]:
    """One method after the other, a row each."""
    rows = list[dict[str, Any]]()
    print(f"{'method':46} {'ms':>8} {'of DDP':>7} {'peak':>9}")
    for name in names():
        ms, peak_bytes = timed(name)
        gc.collect()  # a model and what communicates for it hold each other
        torch.cuda.empty_cache()
        of_ddp = ms / rows[0]["ms"] if rows else 1.0
        rows.append({"method": name, "ms": ms, "of_ddp": of_ddp, "peak_bytes": peak_bytes})
        print(f"{name:46} {ms:8.2f} {of_ddp:7.3f} {peak_bytes / 1e6:6,.0f} MB", flush=True)
    return rows


def timed(name: str) -> tuple[float, int]:
    """Milliseconds of a step under a method, and the most memory that it held."""
    torch.cuda.reset_peak_memory_stats()
    with closing(Training(name)) as training:
        training.run(WARM_UP)
        training.times_ms.clear()
        for _ in range(ROUNDS):
            training.run(STEPS)
        return statistics.median(training.times_ms), torch.cuda.max_memory_allocated()


# Coding -----------------------------------------------------------------------------------------------------


def coding() -> list[dict[str, Any]]:
    """Milliseconds of coding a step, measured and as the planner assumes it."""
    model = model_on_gpu()
    shapes = tuple((p.shape[0], p.shape[1]) for p in model.parameters() if p.dim() == 2)  # all but a thousandth
    numel = sum(p.numel() for p in model.parameters())
    source = torch.randn(numel, device="cuda")
    target = torch.empty_like(source)
    rate = 8 * numel / (median_ms(lambda: target.copy_(source)) / 1e3)
    rows = list[dict[str, Any]]()
    print(f"\na copy moves {rate / 1e9:,.0f} GB/s; {numel:,} parameters")
    print(f"{'method':28} {'ranks':>5} {'coding ms':>9} {'planner':>8} {'ratio':>6}")
    for spec in CODED:
        for ranks in RANKS:
            measured_ms = 1e3 * coding_s(spec, model, ranks)
            assumed_ms = 1e3 * gradient_traffic(spec, shapes, ranks, shards=False).coding_bytes * numel / rate
            rows.append({"method": spec, "ranks": ranks, "coding_ms": measured_ms, "planner_ms": assumed_ms})
            ratio = measured_ms / assumed_ms
            print(f"{spec:28} {ranks:5} {measured_ms:9.3f} {assumed_ms:8.3f} {ratio:6.2f}", flush=True)
    return rows


@contextmanager
def one_rank() -> Generator[None]:
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here, so there is nothing to measure: run this on a machine with a GPU")
        return 2
    os.environ.setdefault("GRADWIRE_TIME_LINK", "0")  # there is none
    about = device()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    with one_rank():
        figures = {"gpu": about, "steps": steps(), "coding": coding()}
    if arguments.save:
        print(save_result("gpu_steps", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
