"""What every Triton kernel must do, on any device: in the interpreter on CPU tensors, and on a GPU.

Each check runs a kernel on `device` and compares with the reference on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from kernel_sets import everything_in

pytest.importorskip("gradwire.kernels.triton.tiles", reason="triton cannot be imported", exc_type=ImportError)
reference, cuda = everything_in("reference"), everything_in("cuda")

KINDS = ("normal", "heavy", "constant", "zeros", "denormal", "spike", "integers", "huge values", "not finite")
Wire = tuple[Tensor, Tensor]


def sample(kind: str, numel: int, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    spike, bad = torch.zeros(numel), x.clone()
    spike[numel // 2 : numel // 2 + 1] = -3.0
    bad[numel // 3 : numel // 3 + 1] = float("nan")
    bad[numel - 1 :] = float("-inf")
    return {
        "normal": x,
        "heavy": torch.sign(x) * torch.exp(8 * x.abs()),
        "constant": torch.full((numel,), -0.7),
        "zeros": torch.copysign(torch.zeros(numel), x),
        "denormal": x * 1e-41,
        "spike": spike,
        "integers": (x * 3).round(),
        "huge values": x.clamp(-1, 1) * 3e38,
        "not finite": bad,
    }[kind]


def guarded(numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A tensor full of rubbish, and with it what stands behind it, where nothing may be written."""
    whole = torch.full((numel + 64,), 90, dtype=dtype, device=device)
    return whole[:numel], whole[numel:]


def wire(numel: int, bits: int, block: int, device: torch.device) -> tuple[Wire, Wire]:
    packed, after_packed = guarded(kernels.packed_nbytes(numel, bits), torch.uint8, device)
    scales, after_scales = guarded(-(-numel // block), torch.float32, device)
    return (packed, scales), (after_packed, after_scales)


def assert_same(mine: Tensor, theirs: Tensor) -> None:
    """The same bits, but that one NaN is as good as another."""
    mine, theirs = mine.cpu(), theirs.cpu()
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    if mine.dtype == torch.float32:
        number = ~mine.isnan()
        assert torch.equal(mine[number].view(torch.int32), theirs[number].view(torch.int32))


def assert_untouched(*behind: Tensor) -> None:
    assert all(bool((part == 90).all()) for part in behind)


# Random bits and packing


def check_permutation(device: torch.device, key: int, numel: int, k: int) -> None:
    drawn = cuda.permuted_indices(key, numel, k, device)
    assert_same(drawn, reference.permuted_indices(key, numel, k, torch.device("cpu")))


def gathered(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    out = torch.empty(indices.numel(), device=x.device)
    cuda.gather(x, indices, out)
    return out


def check_strata(device: torch.device, key: int, numel: int, k: int) -> None:
    drawn = cuda.stratified_indices(key, numel, k, device)
    assert_same(drawn, reference.stratified_indices(key, numel, k, torch.device("cpu")))


def check_packing(device: torch.device, bits: int, numel: int) -> None:
    codes = torch.randint(2**bits, (numel,), generator=torch.Generator().manual_seed(bits))
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32)
    packed, behind = guarded(kernels.packed_nbytes(numel, bits), torch.uint8, device)
    expected = torch.empty(packed.shape, dtype=torch.uint8)
    cuda.pack_bits(codes.to(device), bits, packed)
    reference.pack_bits(codes, bits, expected)
    assert_same(packed, expected)
    assert_untouched(behind)
    assert_same(cuda.unpack_bits(packed, bits, numel), codes)


# Blocks


def check_block_int(device: torch.device, x: Tensor, bits: int, block: int, key: int | None) -> None:
    mine, behind = wire(x.numel(), bits, block, device)
    theirs, _ = wire(x.numel(), bits, block, torch.device("cpu"))
    y = x.to(device, copy=True)
    cuda.block_int_encode(y, bits, block, key, *mine)
    reference.block_int_encode(x, bits, block, key, *theirs)
    assert_same(y, x)
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a, b)
    mine[0].fill_(7)
    cuda.block_int_encode(y, bits, block, key, *mine, keep=True)
    left = x.clone()
    reference.block_int_decode(*theirs, bits, block, left, -1.0)
    assert_same(mine[0], theirs[0])
    assert_same(y, left)
    assert_untouched(*behind)
    out, decoded = torch.full_like(x, 9.0, device=device), torch.full_like(x, 8.0)
    cuda.block_int_decode(*mine, bits, block, out)
    reference.block_int_decode(*theirs, bits, block, decoded)
    assert_same(out, decoded)
    into, sum_ = x.to(device, copy=True), x.clone()
    cuda.block_int_decode(*mine, bits, block, into, -0.3)
    reference.block_int_decode(*theirs, bits, block, sum_, -0.3)
    assert_same(into, sum_)


def on_cpu(pair: Wire) -> Wire:
    return pair[0].cpu(), pair[1].cpu()


def check_sign(device: torch.device, x: Tensor, block: int) -> None:
    mine, behind = wire(x.numel(), 1, block, device)
    theirs, _ = wire(x.numel(), 1, block, torch.device("cpu"))
    cuda.sign_encode(x.to(device), block, *mine)
    reference.sign_encode(x, block, *theirs)
    assert_same(mine[0], theirs[0])
    torch.testing.assert_close(mine[1].cpu(), theirs[1], rtol=1e-6, atol=1e-44, equal_nan=True)
    y, left = x.to(device, copy=True), x.clone()
    cuda.sign_encode(y, block, *mine, keep=True)
    reference.sign_decode(*on_cpu(mine), block, left, -1.0)
    assert_same(y, left)
    assert_untouched(*behind)
    out, decoded = torch.full_like(x, 9.0, device=device), torch.full_like(x, 8.0)
    cuda.sign_decode(*mine, block, out)
    reference.sign_decode(*on_cpu(mine), block, decoded)
    assert_same(out, decoded)
    into, sum_ = x.to(device, copy=True), x.clone()
    cuda.sign_decode(*mine, block, into, 0.3)
    reference.sign_decode(*on_cpu(mine), block, sum_, 0.3)
    assert_same(into, sum_)


def check_qsgd(device: torch.device, x: Tensor, levels: int, block: int, key: int) -> None:
    bits = kernels.qsgd_bits(levels)
    mine, behind = wire(x.numel(), bits, block, device)
    theirs, _ = wire(x.numel(), bits, block, torch.device("cpu"))
    cuda.qsgd_encode(x.to(device), levels, block, key, *mine)
    reference.qsgd_encode(x, levels, block, key, *theirs)
    norms = mine[1].cpu()
    torch.testing.assert_close(norms, theirs[1], rtol=1e-6, atol=1e-44, equal_nan=True)
    # Codes follow from the norm, which is a sum: where it is the same bit for bit they are.
    alike = (norms == theirs[1]) | (norms.isnan() & theirs[1].isnan())
    codes = [kernels.unpack_bits(packed.cpu(), bits, x.numel()).int() for packed, _ in (mine, theirs)]
    each = alike.repeat_interleave(block)[: x.numel()]
    assert_same(codes[0][each], codes[1][each])
    assert alike.double().mean() > 0.9 or not x.numel()
    y, left = x.to(device, copy=True), x.clone()
    cuda.qsgd_encode(y, levels, block, key, *mine, keep=True)
    reference.qsgd_decode(*on_cpu(mine), levels, block, left, -1.0)
    assert_same(y, left)
    assert_untouched(*behind)
    out, decoded = torch.full_like(x, 9.0, device=device), torch.full_like(x, 8.0)
    cuda.qsgd_decode(*mine, levels, block, out)
    reference.qsgd_decode(*on_cpu(mine), levels, block, decoded)
    assert_same(out, decoded)
    into, sum_ = x.to(device, copy=True), x.clone()
    cuda.qsgd_decode(*mine, levels, block, into, 0.3)
    reference.qsgd_decode(*on_cpu(mine), levels, block, sum_, 0.3)
    assert_same(into, sum_)


# Selection


def check_finite(device: torch.device, x: Tensor) -> None:
    found = cuda.all_finite(x.to(device))
    assert found.dtype == torch.bool
    assert found.shape == ()
    assert bool(found) == bool(x.isfinite().all())


def check_topk(device: torch.device, x: Tensor, k: int) -> None:
    expected = reference.topk_indices(x, k)
    assert_same(cuda.topk_indices(x.to(device), k), expected)
    values, behind_values = guarded(k, torch.float32, device)
    indices, behind_indices = guarded(k, torch.int32, device)
    y, left = x.to(device, copy=True), x.clone()
    cuda.topk_encode_keeping(y, values, indices)
    assert_same(indices, expected)
    assert_same(values, x[expected.long()])
    left[expected.long()] -= x[expected.long()]
    assert_same(y, left)
    assert_untouched(behind_values, behind_indices)


def check_sparse(device: torch.device, x: Tensor, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    indices = torch.randperm(x.numel(), generator=generator)[:k].sort().values.int()
    values = torch.randn(k, generator=generator)
    assert_same(gathered(x.to(device), indices.to(device)), x[indices.long()])
    for numbers in (values, values.half()):
        into, sum_ = x.to(device, copy=True), x.clone()
        cuda.scatter_add_(into, indices.to(device), numbers.to(device), -0.3)
        reference.scatter_add_(sum_, indices, numbers, -0.3)
        assert_same(into, sum_)


def check_damaged_indices(device: torch.device) -> None:
    """They reach nothing outside."""
    into, behind = guarded(100, torch.float32, device)
    bad = torch.tensor([-1, 3, 100, 2**31 - 1], dtype=torch.int32, device=device)
    cuda.scatter_add_(into, bad, torch.ones(4, device=device))
    assert_untouched(behind)
    assert gathered(into, bad).isnan().tolist() == [True, False, True, True]


# Matrices


def check_matrices(device: torch.device, batch: int, rows: int, columns: int, rank: int) -> None:
    """Products and orthonormal rows, bit for bit as the reference has them."""
    generator = torch.Generator().manual_seed(rows)
    Pt, Qt = (torch.randn(batch, rank, length, generator=generator) for length in (rows, columns))
    for alpha, add in ((1.0, False), (-1 / 3, True)):
        out = torch.randn(batch, rows, columns, generator=generator)
        expected, found = out.clone(), out.to(device)
        reference.low_rank_(expected, Pt, Qt, alpha, add)
        cuda.low_rank_(found, Pt.to(device), Qt.to(device), alpha, add)
        assert torch.equal(found.cpu(), expected)
    if rank <= rows:
        assert torch.equal(cuda.orthonormalise(Pt.to(device)).cpu(), reference.orthonormalise(Pt))


def check_degenerate(device: torch.device) -> None:
    """Dependent rows vanish, zeros stay zeros, NaN stays NaN: as in the reference."""
    a = torch.randn(3, 4, 200, generator=torch.Generator().manual_seed(1))
    a[0, 2] = 2 * a[0, 0] - a[0, 1]
    a[1] = 0
    a[2, 1, 3] = float("nan")
    small = a[:1] * torch.tensor([2.0**-120, 2.0**-127, 1.0, 2.0**100])[None, :, None]
    assert torch.equal(cuda.orthonormalise(small.to(device)).cpu(), reference.orthonormalise(small))
    q = cuda.orthonormalise(a.to(device)).cpu()
    assert torch.equal(q[:2], reference.orthonormalise(a)[:2])
    assert q[0].square().sum(1).round(decimals=3).tolist() == [1, 1, 0, 1]
    assert not q[2].isfinite().all()
