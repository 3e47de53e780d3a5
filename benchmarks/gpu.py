"""Time of each kernel on a GPU, in copies of the same tensor: `python benchmarks/gpu.py [numel ...] [--only NAME]`.

A copy (read all, write all) is timed in the same run, and gives the memory bandwidth that the share in each row refers
to: the bytes that the function must move at the least, by its time, by that bandwidth. Beside each stand the same
function in plain torch (`reference`) and, where PyTorch has a function for the same end, that one. Times are
medians of CUDA events after a warm-up; at 2^20 elements all data stay in the cache and launching costs most.

Without a CUDA device it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common import save_result
from gradwire import kernels
from gradwire.kernels import low_rank
from gradwire.kernels.dispatch import KERNELS

ROUNDS = 50
WARM_UP = 5
NUMELS = (1 << 20, 25_000_000)
Run = Callable[[], object]

reference = SimpleNamespace(**{kernel.name: kernel.reference for kernel in KERNELS})


@dataclass(frozen=True)
class Case:
    """A kernel to time, the bytes it must move, and what it is compared with."""

    name: str
    nbytes: int
    run: Run
    plain: Run | None = None
    torch_name: str = ""
    torch_run: Run | None = None


def median_ms(run: Run) -> float:
    """Median time of a call on the device. The host runs ahead, so it is not measured unless it is what holds up."""
    for _ in range(WARM_UP):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # pyright: ignore[reportPrivateUsage]  # some 30 ms, for the host to get ahead
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


# Cases ------------------------------------------------------------------------------------------------------


def wire(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    packed = torch.zeros(kernels.packed_nbytes(x.numel(), bits), dtype=torch.uint8, device=x.device)
    return packed, torch.ones(-(-x.numel() // block), device=x.device)


def selection(x: Tensor) -> Iterator[Case]:
    n = x.numel()
    yield Case(
        "all_finite",
        4 * n,
        lambda: kernels.all_finite(x),
        torch_name="isfinite().all()",
        torch_run=lambda: torch.isfinite(x).all(),
    )
    for density in (0.001, 0.01, 0.1):
        k = int(density * n)
        yield Case(
            f"topk_indices {density}",
            4 * n + 4 * k,
            lambda k=k: kernels.topk_indices(x, k),
            lambda k=k: reference.topk_indices(x, k),
            "topk(abs)",
            lambda k=k: torch.topk(x.abs(), k, sorted=False),
        )
    yield from sparse(x, n // 100)


def sparse(x: Tensor, k: int) -> Iterator[Case]:
    n, into, residual = x.numel(), torch.zeros_like(x), torch.zeros_like(x)
    indices = kernels.topk_indices(x, k)
    values = kernels.gather(x, indices)
    sent, places = torch.empty_like(values), torch.empty_like(indices)
    sector = 32  # what a scattered access moves
    yield Case(
        "topk_encode_keeping 0.01",
        4 * n + 8 * k,
        lambda: kernels.topk_encode_keeping(residual.copy_(x), sent, places),
    )
    yield Case(
        "gather 0.01",
        (8 + sector) * k,
        lambda: kernels.gather(x, indices),
        torch_name="index_select",
        torch_run=lambda: x.index_select(0, indices),
    )
    yield Case(
        "scatter_add_ 0.01",
        (8 + 2 * sector) * k,
        lambda: kernels.scatter_add_(into, indices, values),
        torch_name="index_add_",
        torch_run=lambda: into.index_add_(0, indices, values),
    )
    yield Case(
        "permuted_indices 0.01",
        4 * k,
        lambda: kernels.permuted_indices(1, n, k, x.device),
        lambda: reference.permuted_indices(1, n, k, x.device),
        "randperm",
        lambda: torch.randperm(n, device=x.device)[:k],
    )


def packing(x: Tensor) -> Iterator[Case]:
    n = x.numel()
    for bits in (1, 2, 4, 5, 8):
        codes = torch.randint(2**bits, x.shape, dtype=torch.uint8, device=x.device)
        packed, _ = wire(x, bits, n)
        nbytes = n + packed.numel()
        yield Case(
            f"pack_bits {bits}",
            nbytes,
            lambda c=codes, b=bits, p=packed: kernels.pack_bits(c, b, p),
            lambda c=codes, b=bits, p=packed: reference.pack_bits(c, b, p),
        )
        yield Case(
            f"unpack_bits {bits}",
            nbytes,
            lambda b=bits, p=packed: kernels.unpack_bits(p, b, n),
            lambda b=bits, p=packed: reference.unpack_bits(p, b, n),
        )


def block_int(x: Tensor) -> Iterator[Case]:
    into = torch.zeros_like(x)
    for bits, key in ((2, None), (4, None), (5, None), (8, None), (4, 1), (8, 1)):
        p, s = wire(x, bits, 256)
        least = 4 * x.numel() + p.numel() + 4 * s.numel()
        name = f"{bits}{' stochastic' if key else ''}"
        quantize = bits == 8 and key is None
        yield Case(
            f"block_int_encode {name}",
            least,
            lambda b=bits, k=key, p=p, s=s: kernels.block_int_encode(x, b, 256, k, p, s),
            lambda b=bits, k=key, p=p, s=s: reference.block_int_encode(x, b, 256, k, p, s),
            "quantize_per_tensor" if quantize else "",
            (lambda: torch.quantize_per_tensor(x, 0.03, 0, torch.qint8)) if quantize else None,
        )
        yield Case(
            f"block_int_encode_keeping {name}",
            least + 4 * x.numel(),
            lambda b=bits, k=key, p=p, s=s: kernels.block_int_encode(into, b, 256, k, p, s, keep=True),
        )
    for bits in (2, 4, 5, 8):
        p, s = wire(x, bits, 256)
        least = 4 * x.numel() + p.numel() + 4 * s.numel()
        yield Case(
            f"block_int_decode {bits}",
            least,
            lambda b=bits, p=p, s=s: kernels.block_int_decode(p, s, b, 256, into),
            lambda b=bits, p=p, s=s: reference.block_int_decode(p, s, b, 256, into),
        )
        yield Case(
            f"block_int_decode {bits}, added",
            least + 4 * x.numel(),
            lambda b=bits, p=p, s=s: kernels.block_int_decode(p, s, b, 256, into, 1.0),
        )


def norms(x: Tensor) -> Iterator[Case]:
    into = torch.zeros_like(x)
    p, s = wire(x, 1, 4096)
    least = 4 * x.numel() + p.numel() + 4 * s.numel()
    yield Case(
        "sign_encode",
        least,
        lambda: kernels.sign_encode(x, 4096, p, s),
        lambda: reference.sign_encode(x, 4096, p, s),
    )
    yield Case("sign_decode, added", least + 4 * x.numel(), lambda: kernels.sign_decode(p, s, 4096, into, 1.0))
    for levels in (1, 15, 255):
        q, t = wire(x, kernels.qsgd_bits(levels), 512)
        least = 4 * x.numel() + q.numel() + 4 * t.numel()
        yield Case(
            f"qsgd_encode {levels}",
            least,
            lambda a=levels, q=q, t=t: kernels.qsgd_encode(x, a, 512, 1, q, t),
            lambda a=levels, q=q, t=t: reference.qsgd_encode(x, a, 512, 1, q, t),
        )
        yield Case(
            f"qsgd_decode {levels}, added",
            least + 4 * x.numel(),
            lambda a=levels, q=q, t=t: kernels.qsgd_decode(q, t, a, 512, into, 1.0),
        )


def factors(x: Tensor) -> Iterator[Case]:
    """Batches of PowerSGD's factors: as many matrices of 4096 rows as make up a hundredth of x."""
    for rank in (2, 4, 32):
        batch = max(1, x.numel() // 100 // (4096 * rank))
        a = torch.randn(batch, rank, 4096, device=x.device)
        yield Case(
            f"orthonormalise {batch} x {rank} x 4096",
            8 * a.numel(),
            lambda a=a: low_rank.orthonormalise(a),
            torch_name="linalg.qr",
            torch_run=functools.partial(torch.linalg.qr, a.mT.contiguous()),
        )
        out = torch.empty(1, max(1, x.numel() // 4096), 4096, device=x.device)
        Pt = torch.randn(1, rank, out.shape[1], device=x.device)
        yield Case(
            f"low_rank_ {rank} x 4096",
            4 * out.numel(),
            lambda out=out, Pt=Pt, a=a: low_rank.low_rank_(out, Pt, a[:1]),
            torch_name="bmm",
            torch_run=lambda out=out, Pt=Pt, a=a: torch.bmm(Pt.mT, a[:1], out=out),
        )


# Measuring --------------------------------------------------------------------------------------------------


def optional_ms(run: Run | None) -> float | None:
    """The time, or None where there is nothing to time or this PyTorch cannot do it on a GPU."""
    try:
        return None if run is None else median_ms(run)
    except (RuntimeError, NotImplementedError, AttributeError) as error:  # PyTorch without torch.quantize_*
        print(f"  not measured: {str(error).splitlines()[0]}")
        return None


def row(case: Case, copy_ms: float, copied_bytes: int) -> dict[str, Any]:
    took_ms = median_ms(case.run)
    return {
        "kernel": case.name,
        "ms": took_ms,
        "copies": took_ms / copy_ms,
        "share_of_copy_bandwidth": (case.nbytes / took_ms) / (copied_bytes / copy_ms),
        "reference_ms": optional_ms(case.plain),
        "torch_function": case.torch_name or None,
        "torch_ms": optional_ms(case.torch_run),
    }


def told(figures: dict[str, Any]) -> str:
    def other(ms: float | None) -> str:
        return f"{ms:10.3f}" if ms is not None else f"{'-':>10}"

    return (
        f"{figures['kernel']:32} {figures['ms']:8.3f} {figures['copies']:7.2f} "
        f"{figures['share_of_copy_bandwidth']:6.0%} {other(figures['reference_ms'])} {other(figures['torch_ms'])} "
        f"{figures['torch_function'] or ''}"
    )


def measure(numel: int, only: str) -> dict[str, Any]:
    x = torch.randn(numel, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    target = torch.empty_like(x)
    copy_ms, nbytes = median_ms(lambda: target.copy_(x)), 2 * 4 * numel
    print(f"\n{numel:,} float32; a copy takes {copy_ms:.3f} ms, {nbytes / copy_ms / 1e6:,.0f} GB/s")
    print(f"{'kernel':32} {'ms':>8} {'copies':>7} {'share':>6} {'reference':>10} {'torch':>10}")
    rows: list[dict[str, Any]] = []
    for cases in (selection, packing, block_int, norms, factors):
        for case in cases(x):
            if only in case.name:
                rows.append(row(case, copy_ms, nbytes))
                print(told(rows[-1]), flush=True)
    return {"numel": numel, "copy_ms": copy_ms, "copy_bytes_per_s": nbytes / copy_ms * 1e3, "kernels": rows}


def device() -> dict[str, Any]:
    """What the figures were measured on."""
    import triton

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "driver": driver,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numel", nargs="*", type=int, default=list(NUMELS), help="sizes of the tensor")
    parser.add_argument("--only", default="", help="kernels whose name has this in it; nothing is saved then")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here, so there is nothing to measure: run this on a machine with a GPU")
        return 2
    about = device()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    sizes = [measure(numel, arguments.only) for numel in arguments.numel]
    if not arguments.only:
        print(save_result("gpu", {"gpu": about, "rounds": ROUNDS, "sizes": sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
