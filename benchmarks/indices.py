"""What indices cost: `python benchmarks/indices.py [--save]`.

For each format, density and set of positions: bits an index on the wire (the capacity, which collectives send) and of
those the used part (which a channel may stop at), beside the entropy log2 C(d, k) / k, and nanoseconds an index to
encode and to decode. Positions are uniform ones, and the largest entries of real gradients: of the digits task, of the
bytes task, and of the bytes task after error feedback at that density has run for 20 steps.

Times are the least of several runs on one thread; below some thousand indices they are mostly the call's own cost.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from common import save_result
from gradwire import kernels
from gradwire.kernels import indices as index_coding
from gradwire.tasks.builtin import Task, make_task

DENSITIES = (0.0001, 0.001, 0.01, 0.1)
ROUNDS = 30
STEPS = 20


def entropy(numel: int, count: int) -> float:
    """log2 C(d, k) / k."""
    sets = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return sets / math.log(2) / count


def gradient(task: Task, step: int = 0) -> Tensor:
    """One gradient of a task, all parameters end to end."""
    task.model.zero_grad()
    inputs, targets = task.batch(step, 0, 1)
    task.loss(task.model(inputs), targets).backward()
    return torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None]).float()


def fed_back(task: Task, density: float) -> Tensor:
    """What error feedback hands to top-k in its last step, of training as the task trains."""
    optimizer = task.optimizer(task.model.parameters())
    residual = torch.zeros(sum(p.numel() for p in task.model.parameters()))
    for step in range(STEPS):
        residual += gradient(task, step)
        if step < STEPS - 1:
            indices = kernels.topk_indices(residual, round(density * residual.numel())).long()
            sent = torch.zeros_like(residual).index_copy_(0, indices, residual[indices])
            residual -= sent
            torch.nn.utils.vector_to_parameters(sent, (p.grad for p in task.model.parameters() if p.grad is not None))
            optimizer.step()
    return residual


def sources() -> Iterator[tuple[str, Callable[[float], Tensor]]]:
    """Yield names and functions from a density to a tensor whose largest entries are to be coded."""
    noise = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    yield "uniform", lambda _: noise
    for name in ("digits", "bytes"):
        once = gradient(make_task(name, seed=0))
        yield name, lambda _, once=once: once
    yield f"bytes, step {STEPS}", lambda density: fed_back(make_task("bytes", seed=0), density)


def best_ns(run: Callable[[], object], count: int) -> float:
    """Nanoseconds an index of the quickest run."""
    times: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e9 * min(times) / count


def row(indices: Tensor, numel: int, format_: index_coding.Format) -> dict[str, float]:
    """The figures of one format."""
    count = indices.numel()
    where = index_coding.field(format_, numel, count)
    packed = torch.empty(where.numel, dtype=where.dtype)
    encode_ns = best_ns(lambda: index_coding.encode(indices, numel, format_, packed), count)
    assert torch.equal(index_coding.decode(packed, numel, count, format_), indices)
    return {
        "bits": round(8 * packed.nbytes / count, 3),
        "used_bits": round(8 * index_coding.used_nbytes(packed, numel, count, format_) / count, 3),
        "encode_ns": round(encode_ns, 2),
        "decode_ns": round(best_ns(lambda: index_coding.decode(packed, numel, count, format_), count), 2),
    }


def measure() -> list[dict[str, Any]]:
    """Print and return every row."""
    rows: list[dict[str, Any]] = []
    print(f"{'positions':16} {'d':>8} {'k':>7} {'entropy':>8}  {'format':10} {'bits':>8} {'used':>8} {'ns enc':>7} dec")
    for name, source in sources():
        for density in DENSITIES:
            x = source(density)
            count = round(density * x.numel())
            indices, worth = kernels.topk_indices(x, count), entropy(x.numel(), count)
            for format_ in index_coding.FORMATS:
                found = row(indices, x.numel(), format_)
                rows.append({"positions": name, "numel": x.numel(), "count": count, "format": format_, **found})
                rows[-1]["entropy_bits"] = round(worth, 3)
                print(
                    f"{name:16} {x.numel():8} {count:7} {worth:8.2f}  {format_:10} {found['bits']:8.2f} "
                    f"{found['used_bits']:8.2f} {found['encode_ns']:7.2f} {found['decode_ns']:.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/indices_DATE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels.warm_up()
    rows = measure()
    if arguments.save:
        print("wrote", save_result("indices", {"rows": rows}))


if __name__ == "__main__":
    main()
