"""What is left of a step of a large model: `python benchmarks/large_model.py [--rate 1gbit] [--layers 12] [--save]`.

Two hosts of one core train a model in GPT-2's shapes whose gradients are ready at once: its backward pass computes
nothing. So a step is communication, coding and what DDP does anyway. All methods run in the same two processes, in
turn, each turn on a DDP of its own; printed are medians over turns of the slowest rank's step, as a share of fp32's.

Beside it stands a limit. No method can be faster than its passes over memory: `PASSES` says how many bytes of each
parameter it has to read and write at least, and the rate at which memory is copied is measured in the same processes.
Memory is the largest resident size of rank 0 during a turn, above what was resident before it, in bytes a parameter;
`fresh` are the bytes a parameter that the system had to hand out anew in a step, page by page.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gradwire
from common import network_arguments, save_result
from gradwire import kernels
from gradwire.baselines import TorchMethod
from gradwire.compare.engines import make_engine
from gradwire.compare.torch_hooks import bucket_mb
from gradwire.network import Network
from gradwire.ranks.supervised import run_function

FLOOR, FP32 = "torch.noop", "torch.fp32"
OURS = ["none", "fp16", "int4", "powersgd:8,factors=fp16", "topk:0.01"]
DEFAULT = [FLOOR, FP32, "torch.fp16", *OURS, "torch.powersgd:8"]
WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024
PASSES = {
    "int4": 48,
    "powersgd:8,factors=fp16": 36,
    "topk:0.01": 32,
}
"""Bytes of each parameter that a method reads and writes at least, with two ranks, if nothing is in a cache twice.

All of them read the gradient (4) and write its mean (4), into DDP's bucket. `int4`: the gradient is copied to the
buffer of its grain (8), the residual is added (12), the encoder reads it for the scales and once more to round and to
leave the residual (12); of the half that a rank owns two payloads are added up (8 bytes of each of its elements, twice)
and encoded again (12 of each): 14 a parameter; the means are decoded (4). The sum is rounded down.
`powersgd`: copy (8), add (12), two products that read the matrix (8), the residual and the mean from the factors (8).
`topk`: copy (8), add (12), select (8), the mean (4)."""


def shapes(layers: int) -> list[tuple[int, ...]]:
    """GPT-2's parameters: embeddings, so many blocks, the last norm. Twelve layers are 124 million elements."""
    width = WIDTH
    block = [
        *[(width,), (width,)],
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],
        *[(width,), (width,)],
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return [(VOCABULARY, width), (POSITIONS, width), *layers * block, (width,), (width,)]


class _Ready(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.gradients)


class ReadyModel(nn.Module):
    """A model whose backward pass gives it these gradients and computes nothing."""

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)
        self._gradients = gradients

    def forward(self) -> Tensor:
        """A loss of zero."""
        return _Ready.apply(self._gradients, *self.weights)  # type: ignore[no-any-return, no-untyped-call]


class Turn:
    """Steps of one method on a DDP of its own, and what they took."""

    def __init__(self, model: ReadyModel, method: str, steps: int, warm: int) -> None:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        parsed = gradwire.parse(method)
        one_bucket_mb = bucket_mb(parsed) if isinstance(parsed, TorchMethod) else None
        ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=one_bucket_mb)  # pyright: ignore[reportArgumentType]
        side = make_engine("ddp").attach(ddp, SGD(model.parameters(), 0.0), method)
        self.times_s, coded, faults = list[float](), 0.0, 0
        for index in range(warm + steps):
            model.zero_grad(set_to_none=True)
            if index == warm:
                coded, faults = side.codec_cpu_s(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            dist.barrier()
            began = time.perf_counter()
            ddp().backward()
            if index >= warm:
                self.times_s.append(time.perf_counter() - began)
        self.coded_s = (side.codec_cpu_s() - coded) / steps
        self.faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps
        self.peak_bytes = resident("VmHWM") - before
        side.close()
        model.zero_grad(set_to_none=True)


def resident(what: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10
    raise LookupError(what)


def copy_rate(gradients: list[Tensor]) -> float:
    """Bytes a second that are read and written where memory is copied, in pieces that no cache holds."""
    source, target = gradients[0].view(-1), torch.empty_like(gradients[0]).view(-1)
    times = list[float]()
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 8 * source.numel() / min(times)


def train_all(
    rank: int, world_size: int, *, methods: list[str], layers: int, rounds: int, steps: int, warm: int
) -> dict[str, Any]:
    """Take turns; return times and sizes of each method."""
    torch.set_num_threads(1)
    kernels.warm_up()
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator) ** 3 for shape in shapes(layers)]
    model = ReadyModel(gradients)
    rate = copy_rate(gradients)
    found: dict[str, dict[str, list[Any]]] = {
        method: {"times_s": [], "coded_s": [], "peak_bytes": [], "faults": []} for method in methods
    }
    for _ in range(rounds):
        for method in methods:
            turn = Turn(model, method, steps, warm)
            found[method]["times_s"].append(statistics.median(turn.times_s))
            found[method]["coded_s"].append(turn.coded_s)
            found[method]["peak_bytes"].append(turn.peak_bytes)
            found[method]["faults"].append(turn.faults)
            del turn
            gc.collect()
    return {"copy_rate": rate, "methods": found}


def rows_of(ranks: list[dict[str, Any]], parameters: int) -> dict[str, dict[str, float]]:
    """The medians of each method."""
    rate = min(rank["copy_rate"] for rank in ranks)
    rows = dict[str, dict[str, float]]()
    for method in ranks[0]["methods"]:
        mine = [rank["methods"][method] for rank in ranks]
        times = [max(each) for each in zip(*(found["times_s"] for found in mine), strict=True)]
        rows[method] = {
            "step_s": statistics.median(times),
            "coded_s": max(statistics.median(found["coded_s"]) for found in mine),
            "memory_limit_s": PASSES.get(method, 0) * parameters / rate,
            "faulted_bytes_a_parameter": statistics.median(mine[0]["faults"]) * resource.getpagesize() / parameters,
            "peak_bytes_a_parameter": max(mine[0]["peak_bytes"]) / parameters,
        }
    fp32 = rows.get(FP32, {"step_s": float("nan")})["step_s"]
    for row in rows.values():
        row["of_fp32"] = row["step_s"] / fp32
        row["coded_ns_an_element"] = 1e9 * row["coded_s"] / parameters
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = network_arguments(__doc__, 2, DEFAULT)
    parser.set_defaults(rate="1gbit", rounds=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that count")
    parser.add_argument("--warm", type=int, default=1, help="steps of a turn that do not count")
    told = parser.parse_args()
    options = {name: getattr(told, name) for name in ("methods", "layers", "rounds", "steps", "warm")}
    with Network(told.hosts, told.rate) as network:
        ranks = run_function(f"{__file__}:train_all", told.hosts, options, deadline_s=told.deadline, network=network)
        description = network.description
    parameters = sum(torch.Size(shape).numel() for shape in shapes(told.layers))
    rows = rows_of(ranks, parameters)
    print(f"{description}; {parameters:,} parameters; memory is copied at {ranks[0]['copy_rate'] / 1e9:.1f} GB/s")
    columns = f"{'step':>8s} {'of fp32':>8s} {'coded':>8s} {'ns/elem':>8s} {'limit':>8s} {'peak B/p':>9s} {'fresh':>6s}"
    print(f"{'method':28s} {columns}")
    for method, row in rows.items():
        times = (
            f"{row['step_s']:6.2f} s {row['of_fp32']:8.3f} {row['coded_s']:6.2f} s {row['coded_ns_an_element']:8.2f}"
        )
        sizes = f"{row['peak_bytes_a_parameter']:9.1f} {row['faulted_bytes_a_parameter']:6.1f}"
        print(f"{method:28s} {times} {row['memory_limit_s']:6.2f} s {sizes}")
    if told.save:
        whole = {"network": description, "parameters": parameters, "copy_rate": ranks[0]["copy_rate"], "rows": rows}
        print("wrote", save_result("large_model", whole))


if __name__ == "__main__":
    main()
