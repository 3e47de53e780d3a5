"""Time of each kernel in copies of the same tensor: `python benchmarks/kernels.py [numel] [filter]`.

Copying a tensor (read all, write all) is the least that touching a gradient costs, so a multiple says the
same on a slow and a fast machine. Each figure is the best of several runs, in turn with the copy, since
neighbours disturb.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradwire import kernels

ROUNDS = 7
Case = tuple[str, Callable[[], object]]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def selection(x: Tensor) -> Iterator[Case]:
    n, into, cpu = x.numel(), torch.zeros_like(x), x.device
    yield "all_finite", lambda: kernels.all_finite(x)
    for density in (0.001, 0.01, 0.1):
        k = int(density * n)
        yield f"torch.topk {density}", lambda k=k: torch.topk(x.abs(), k, sorted=False)
        yield f"topk_indices {density}", lambda k=k: kernels.topk_indices(x, k)
    k = n // 100
    indices = kernels.topk_indices(x, k)
    values = kernels.gather(x, indices)
    yield "gather 0.01", lambda: kernels.gather(x, indices)
    yield "check_indices 0.01", lambda: kernels.check_indices(indices, n)
    yield "scatter_add_ 0.01", lambda: kernels.scatter_add_(into, indices, values)
    yield "permuted_indices 0.01", lambda: kernels.permuted_indices(1, n, k, cpu)


def packing(x: Tensor) -> Iterator[Case]:
    for bits in (1, 2, 4, 5, 8):
        codes = torch.randint(2**bits, x.shape, dtype=torch.uint8)
        packed = torch.empty(kernels.packed_nbytes(x.numel(), bits), dtype=torch.uint8)
        kernels.pack_bits(codes, bits, packed)
        yield f"pack_bits {bits}", lambda c=codes, b=bits, p=packed: kernels.pack_bits(c, b, p)
        yield f"unpack_bits {bits}", lambda b=bits, p=packed: kernels.unpack_bits(p, b, x.numel())


def rounding(x: Tensor) -> Iterator[Case]:
    into = torch.zeros_like(x)
    for bits in (2, 4, 5, 8):
        p, s = wire(x, bits, 256)
        yield (
            f"block_int_encode {bits}",
            lambda b=bits, p=p, s=s: kernels.block_int_encode(x, b, 256, None, p, s),
        )
        yield (
            f"block_int_encode {bits} stochastic",
            lambda b=bits, p=p, s=s: kernels.block_int_encode(x, b, 256, 1, p, s),
        )
        yield (
            f"block_int_decode {bits}, added",
            lambda b=bits, p=p, s=s: kernels.block_int_decode(p, s, b, 256, into, 1.0),
        )
        yield (
            f"block_int_decode {bits}",
            lambda b=bits, p=p, s=s: kernels.block_int_decode(p, s, b, 256, into),
        )
    p1, s1 = wire(x, 1, 4096)
    yield "sign_encode", lambda: kernels.sign_encode(x, 4096, p1, s1)
    yield "sign_decode, added", lambda: kernels.sign_decode(p1, s1, 4096, into, 1.0)
    yield "sign_decode", lambda: kernels.sign_decode(p1, s1, 4096, into)
    for levels in (1, 7, 15, 127, 255):
        p, s = wire(x, kernels.qsgd_bits(levels), 512)
        yield f"qsgd_encode {levels}", lambda a=levels, p=p, s=s: kernels.qsgd_encode(x, a, 512, 1, p, s)
        yield (
            f"qsgd_decode {levels}, added",
            lambda a=levels, p=p, s=s: kernels.qsgd_decode(p, s, a, 512, into, 1.0),
        )
        yield f"qsgd_decode {levels}", lambda a=levels, p=p, s=s: kernels.qsgd_decode(p, s, a, 512, into)


def wire(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    packed = torch.zeros(kernels.packed_nbytes(x.numel(), bits), dtype=torch.uint8)
    return packed, torch.ones(-(-x.numel() // block))


def main() -> None:
    numel = int(sys.argv[1]) if len(sys.argv) > 1 else 25_000_000
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    kernels.warm_up()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    copy = torch.empty_like(x)
    backend = os.environ.get("GRADWIRE_KERNELS", "numba")
    print(f"{numel:,} float32, {torch.get_num_threads()} threads, torch {torch.__version__}, kernels: {backend}")
    print(f"{'kernel':32} {'ms':>8} {'copies':>7}")
    for cases in (selection, packing, rounding):
        for name, run in cases(x):
            if wanted in name:
                run()
                best, base = (
                    min(each)
                    for each in zip(
                        *((seconds(run), seconds(lambda: copy.copy_(x))) for _ in range(ROUNDS)), strict=True
                    )
                )
                print(f"{name:32} {best * 1e3:8.2f} {best / base:7.2f}", flush=True)


if __name__ == "__main__":
    main()
