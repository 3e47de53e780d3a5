"""Kernels of low-rank methods: plain torch and numba give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import low_rank
from kernel_sets import everything_in

cpu_lowrank, reference_lowrank = everything_in("cpu"), everything_in("reference")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1.0, 1e-42, 1e-20, 1e37])
def test_unit_rows(size: float) -> None:
    Q = normal(6, 33) * size
    Q[2], Q[4, 1:] = 0, 0
    Q[4, 0] = 2.0**-149
    fast, slow = Q.clone(), Q.clone()
    cpu_lowrank.unit_rows_(fast, 5)
    reference_lowrank.unit_rows_(slow, 5)
    assert torch.equal(fast, slow)
    largest = fast.abs().amax(1)[[0, 1, 3, 5]]
    assert bool((largest < 2).all())
    assert bool((largest >= (1 if size > 1e-30 else 0)).all())
    assert bool(fast[2].any())
    assert bool(fast[4, 0] > 0)


def test_unit_rows_keep_what_is_not_finite() -> None:
    for module in (cpu_lowrank, reference_lowrank):
        Q = torch.tensor([[1.0, float("nan")], [float("inf"), 0.0], [3.0, 0.0]])
        module.unit_rows_(Q, 1)
        assert torch.isfinite(Q).all(1).tolist() == [False, False, True]


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        low_rank.unit_rows_(torch.zeros(2, 2, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="contiguous"):
        low_rank.unit_rows_(torch.zeros(2, 3).mT, 1)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, 1023, 70_000, 300_001])
def test_count_sketch(rows: int, numel: int) -> None:
    x = normal(numel)
    columns = max(1, numel // 20)
    fast, slow = torch.empty(rows, columns), torch.empty(rows, columns)
    cpu_lowrank.count_sketch(x, 7, fast)
    reference_lowrank.count_sketch(x, 7, slow)
    assert torch.equal(fast, slow)
    a, b = torch.empty(numel), torch.empty(numel)
    cpu_lowrank.count_unsketch(fast, 7, a)
    reference_lowrank.count_unsketch(fast, 7, b)
    assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_heavy_hitter_is_found(rows: int) -> None:
    """What is beyond |x| sqrt(8 / columns) is estimated to within that."""
    x = normal(20_000)
    x[[5, 19_999]] = torch.tensor([80.0, -90.0])
    sketch, out = torch.empty(rows, 2000), torch.empty(20_000)
    kernels.count_sketch(x, 3, sketch)
    kernels.count_unsketch(sketch, 3, out)
    bound = float(x.norm()) * (8 / 2000) ** 0.5
    assert bool(((out - x)[[5, 19_999]].abs() <= bound).all())
    if rows > 1:
        assert set(out.abs().topk(2).indices.tolist()) == {5, 19_999}


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_not_a_number_stays_in_its_estimates(rows: int) -> None:
    x = normal(100)
    x[7] = float("nan")
    for module in (cpu_lowrank, reference_lowrank):
        sketch, out = torch.empty(rows, 50), torch.empty(100)
        module.count_sketch(x, 3, sketch)
        module.count_unsketch(sketch, 3, out)
        assert bool(out[7].isnan())


def test_hashes_spread_evenly_and_signs_balance() -> None:
    """Chi-square of 256 columns over 2^18 elements, and the sum of signs, within 5.5 standard deviations."""
    numel, columns = 1 << 18, 256
    counts, signs = torch.empty(3, columns), torch.empty(3, 1)
    kernels.count_sketch(torch.ones(numel), 11, signs)
    assert bool((signs.abs() <= 5.5 * numel**0.5).all())
    for j, words in enumerate(reference_lowrank.sketch_words(11, 3)):
        column, _ = reference_lowrank.hashed(numel, columns, words, torch.device("cpu"))
        counts[j] = torch.bincount(column, minlength=columns)
    chi = ((counts - numel / columns) ** 2 / (numel / columns)).sum(1)
    assert bool(((chi - columns).abs() <= 5.5 * (2 * columns) ** 0.5).all())


@pytest.mark.parametrize(("columns", "k"), [(8, 1), (64, 4), (64, 64), (256, 9)])
@pytest.mark.parametrize("rows", [0, 1, 17, 5000])
def test_rows(rows: int, columns: int, k: int) -> None:
    x = (4 * normal(rows, columns)).round() / 4  # with ties
    if rows:
        x[0, 3], x[rows // 2, 1] = float("nan"), float("-inf")
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    basis = normal(columns, columns, seed=1)
    for module in (cpu_lowrank, reference_lowrank):
        values, codes = torch.empty(rows * k), torch.empty(rows * k, dtype=torch.uint8)
        module.topk_rows(x, k, values, codes)
        out = torch.empty(rows, columns)
        module.combine_rows(values, codes, basis, out)
        found.append((values, codes, out))
    fast, slow = found
    assert torch.equal(fast[1], slow[1])
    assert torch.equal(fast[0].nan_to_num(), slow[0].nan_to_num())
    assert torch.equal(fast[2].nan_to_num(), slow[2].nan_to_num())
    if k == columns:
        assert torch.equal(fast[0].nan_to_num(), x.view(-1).nan_to_num())


@pytest.mark.parametrize("numel", [0, 1, 1000, 600_000])
def test_bf16_memory(numel: int) -> None:
    x = normal(numel)
    if numel > 8:
        x[:7] = torch.tensor([3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"), 0.0, 1e-40])
    halves = [torch.empty(numel, dtype=torch.bfloat16) for _ in range(2)]
    cpu_lowrank.round_bf16(x, 5, halves[0])
    reference_lowrank.round_bf16(x, 5, halves[1])
    assert torch.equal(halves[0].view(torch.int16), halves[1].view(torch.int16))
    fine = torch.isfinite(x)
    assert torch.equal(torch.isfinite(halves[0]), fine)
    # it moves to one of the two neighbours: off by less than a spacing, 2^-7 of the power of two below
    error = (halves[0].double() - x.double())[fine].abs()
    assert bool((error <= 2.0**-7 * x[fine].double().abs() + 2.0**-133).all())
    sums = [x.clone(), x.clone()]
    cpu_lowrank.add_bf16_(sums[0], halves[0], 0.7)
    reference_lowrank.add_bf16_(sums[1], halves[0], 0.7)
    assert torch.equal(sums[0].view(torch.int32)[fine], sums[1].view(torch.int32)[fine])


def test_rounding_to_bf16_is_unbiased() -> None:
    x, draws = normal(50), 4000
    out = torch.empty(50, dtype=torch.bfloat16)
    total = torch.zeros(50, dtype=torch.float64)
    for bits in range(draws):
        kernels.round_bf16(x, bits, out)
        total += out.double()
    # Each draw is off by less than a spacing, 2^-7 |x|; 5.5 standard deviations of the mean.
    assert bool(((total / draws - x.double()).abs() <= 5.5 * 2.0**-7 * x.abs() / 2 / draws**0.5).all())


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 300_001])
@pytest.mark.parametrize("block", [1, 2, 8, 1024])
def test_hadamard(numel: int, block: int) -> None:
    x, chosen = normal(numel), torch.randperm(block, generator=torch.Generator().manual_seed(1))[: max(1, block // 3)]
    chosen = chosen.to(torch.int32)
    found: list[tuple[Tensor, Tensor]] = []
    for module in (cpu_lowrank, reference_lowrank):
        values, into = torch.empty(-(-numel // block) * chosen.numel()), x.clone()
        module.hadamard_encode(x, block, 3, chosen, values)
        module.hadamard_accumulate(values, block, 3, chosen, into, -0.3)
        found.append((values, into))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
