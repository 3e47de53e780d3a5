"""Laws of the kernels: what each computes, and that numba and plain torch compute the same."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import PayloadError, SpecError
from gradwire.kernels import dispatch
from gradwire.kernels.runtime import pool
from kernel_sets import everything_in

pytest.importorskip("numba")
selection_on_cpu = importlib.import_module("gradwire.kernels.selection.cpu")
reference, cpu = everything_in("reference"), everything_in("cpu")

CPU = torch.device("cpu")
HUGE = 300_001  # above the pool's threshold, and odd
SIZES = (0, 1, 7, 8, 9, 31, 255, 256, 257, 1023, 4099)
KINDS = ("normal", "heavy", "constant", "zeros", "denormal", "spike", "integers", "huge values")
BLOCKS = (8, 24, 256)


def sample(kind: str, numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    spike = torch.zeros(numel)
    spike[numel // 2 : numel // 2 + 1] = -3.0
    return {
        "normal": x,
        "heavy": torch.sign(x) * torch.exp(8 * x.abs()),
        "constant": torch.full((numel,), -0.7),
        "zeros": torch.copysign(torch.zeros(numel), x),
        "denormal": x * 1e-41,
        "spike": spike,
        "integers": (x * 3).round(),
        "huge values": x.clamp(-1, 1) * 3e38,
    }[kind]


tensors = st.builds(sample, st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 99))
keys = st.integers(0, 2**64 - 1)
few = settings(max_examples=40, deadline=None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def wire(numel: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Filled with rubbish, so that a byte which is not written is found."""
    packed = torch.full((kernels.packed_nbytes(numel, bits),), 0xA5, dtype=torch.uint8)
    return packed, torch.full((-(-numel // block),), float("nan"))


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if a.dtype == torch.float32:  # -0.0 is not 0.0
        finite = ~a.isnan()
        assert torch.equal(a[finite].view(torch.int32), b[finite].view(torch.int32))


# Selection


def check_topk(x: Tensor, k: int) -> None:
    order = torch.sort(reference.magnitude_bits(x), descending=True, stable=True).indices
    expected = order[:k].sort().values.to(torch.int32)
    assert_same(kernels.topk_indices(x, k), expected)
    assert_same(reference.topk_indices(x, k), expected)
    for each in (kernels, reference):
        indices, values = each.topk(x, k)
        assert_same(indices, expected)
        torch.testing.assert_close(values, x[expected.long()], rtol=0, atol=0, equal_nan=True)
    check_scatter(x.numel(), expected, values)


def check_scatter(numel: int, indices: Tensor, values: Tensor) -> None:
    expected = torch.zeros(numel).index_put_((indices.long(),), values, accumulate=True)
    none = torch.full((3,), numel, dtype=torch.int32)
    padded = torch.cat([indices, none]), torch.cat([values, torch.zeros(3)])
    for each in (kernels, reference):
        for at, what in ((indices, values), padded):
            out = torch.full((numel,), float("nan"))
            each.scatter_(out, at, what)
            assert_same(out, expected)


@few
@given(tensors, st.floats(0, 1))
def test_topk_takes_the_largest_and_of_equals_the_first(x: Tensor, density: float) -> None:
    check_topk(x, round(density * x.numel()))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 300, 18_750, 18_751, 100_001, HUGE])
def test_topk_of_many(kind: str, k: int) -> None:
    check_topk(sample(kind, HUGE), k)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("k", [3, 3000, 30_000])
@pytest.mark.parametrize("stride", [61, 499])
def test_topk_does_not_rely_on_what_its_sample_says(stride: int, k: int) -> None:
    for sampled in (0.0, 100.0):
        x = sample("normal", HUGE)
        x[::stride] = sampled
        check_topk(x, k)
    first = torch.zeros(HUGE)
    first[: 2 * k] = sample("normal", 2 * k)
    check_topk(first, k)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", [64, 1000, HUGE])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 1.0])
def test_topk_of_many_nan(numel: int, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scattered, together = sample("normal", numel), sample("normal", numel)
    scattered[torch.rand(numel, generator=generator) < share] = float("nan")
    together[: round(share * numel)] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    for x in (scattered, together):
        for k in (1, numel // 100 + 1, numel // 10, numel // 2, numel):
            check_topk(x, k)


@pytest.mark.usefixtures("threads")
def test_those_that_are_none_may_stand_anywhere() -> None:
    for numel in (10, HUGE):
        for at in ([5, numel, 2], [numel, 3, 4], [5, 2, numel], [numel, numel]):
            values = torch.tensor([0.0 if i == numel else float(i) for i in at])
            expected = torch.zeros(numel + 1).index_put_((torch.tensor(at),), values)[:numel]
            for each in (kernels, reference):
                out = torch.full((numel,), float("nan"))
                each.scatter_(out, torch.tensor(at, dtype=torch.int32), values)
                assert_same(out, expected)


@pytest.mark.usefixtures("threads")
def test_scatter_takes_indices_that_do_not_increase() -> None:
    for numel in (10, HUGE):
        check_scatter(numel, torch.tensor([7, 2, 2, 9, 0], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0, -0.0, 5.0]))


@pytest.mark.usefixtures("threads")
def test_distinct_places_may_be_added_to_at_once() -> None:
    at, values = kernels.permuted_indices(3, HUGE, 200_000, CPU), sample("normal", 200_000)
    ours, theirs = sample("normal", HUGE, 1), sample("normal", HUGE, 1)
    kernels.scatter_add_(ours, at, values, 0.5, distinct=True)
    reference.scatter_add_(theirs, at, values, 0.5)
    assert_same(ours, theirs)


def test_topk_holds_nan_for_largest_whatever_its_bits() -> None:
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([1.0, float("inf")]), nans, torch.tensor([float("-inf")])])
    for each in (kernels, reference):
        assert each.topk_indices(x, 2).tolist() == [2, 3]
        assert each.topk_indices(x, 4).tolist() == [1, 2, 3, 4]


@few
@given(tensors)
def test_all_finite(x: Tensor) -> None:
    assert bool(kernels.all_finite(x))
    for bad in (float("nan"), float("inf"), float("-inf")):
        for i in {0, x.numel() // 2, x.numel() - 1} if x.numel() else ():
            y = x.clone()
            y[i] = bad
            assert not bool(kernels.all_finite(y))
            assert not bool(reference.all_finite(y))


def test_all_finite_takes_any_shape_and_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(3, 5, dtype=dtype)
        assert bool(kernels.all_finite(x))
        assert bool(kernels.all_finite(x.t()))
        x[1, 2] = float("inf")
        assert not bool(kernels.all_finite(x.t()))
    assert bool(kernels.all_finite(torch.tensor(1.0)))


@few
@given(tensors, st.integers(0, 99), st.sampled_from([1.0, -1.0, 0.3]))
def test_gather_and_scatter(x: Tensor, seed: int, alpha: float) -> None:
    k = x.numel() // 2
    indices = torch.randint(max(1, x.numel()), (k,), generator=torch.Generator().manual_seed(seed)).int()
    assert_same(kernels.gather(x, indices), x[indices])
    for values in (sample("normal", k), sample("normal", k).to(torch.bfloat16)):
        a, b = x.clone(), x.clone()
        kernels.scatter_add_(a, indices, values, alpha)
        reference.scatter_add_(b, indices, values, alpha)
        assert_same(a, b)


@pytest.mark.parametrize("bad", [-1, 5, -(2**31), 2**31 - 1])
def test_indices_outside_are_refused(bad: int) -> None:
    kernels.check_indices(torch.tensor([0, 4], dtype=torch.int32), 5)
    kernels.check_indices(torch.empty(0, dtype=torch.int32), 0)
    with pytest.raises(PayloadError, match="outside"):
        kernels.check_indices(torch.tensor([0, bad, 4], dtype=torch.int32), 5)


# Random bits


@few
@given(keys, st.sampled_from([*SIZES, HUGE]), st.sampled_from([0, 1, 2**31 - 5, 2**32 - HUGE]))
def test_uniform_is_a_function_of_key_and_place(bits: int, numel: int, start: int) -> None:
    u = reference.uniform(bits, numel, CPU, start)
    assert_same(u[3:], reference.uniform(bits, max(0, numel - 3), CPU, start + 3))
    assert ((u >= 0) & (u < 1)).all()


def chi_square(counts: Tensor, expected: float) -> float:
    """Standard deviations from what chance gives."""
    freedom = counts.numel() - 1
    chi2 = float(((counts.double() - expected) ** 2 / expected).sum())
    return (chi2 - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("bits", [0, 1, 2**32, 0xDEADBEEFCAFE])
def test_uniform_is_uniform_and_uncorrelated(bits: int) -> None:
    u = reference.uniform(bits, 1_000_000, CPU)
    assert abs(chi_square(torch.histc(u, 1000, 0, 1), 1000)) < 5
    for lag in (1, 2, 8, 256):
        pairs = (u[:-lag] * 32).int() * 32 + (u[lag:] * 32).int()
        assert abs(chi_square(torch.bincount(pairs, minlength=1024), pairs.numel() / 1024)) < 5
    low = (u * 2**24).int() & 255  # the low bits are as good as the high
    assert abs(chi_square(torch.bincount(low, minlength=256), u.numel() / 256)) < 5


@pytest.mark.parametrize("other", [1, 2**32, 2**63])
def test_streams_of_near_keys_have_nothing_in_common(other: int) -> None:
    a, b = reference.uniform(0, 100_000, CPU) - 0.5, reference.uniform(other, 100_000, CPU) - 0.5
    for shift in (0, 1, 2, 3):
        r = float((a[shift:] * b[: b.numel() - shift]).mean()) * 12 * math.sqrt(a.numel())
        assert abs(r) < 5


@few
@given(keys, st.integers(0, 5000), st.floats(0, 1))
def test_permuted_indices_are_distinct(bits: int, numel: int, part: float) -> None:
    k = round(part * numel)
    drawn = kernels.permuted_indices(bits, numel, k, CPU)
    assert_same(drawn, reference.permuted_indices(bits, numel, k, CPU))
    assert drawn.unique().numel() == k
    kernels.check_indices(drawn, numel)
    assert_same(drawn, kernels.permuted_indices(bits, numel, numel, CPU)[:k])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", [HUGE, 2**20, 2**20 + 1, 46_340**2 + 1, 2**31 - 1])
def test_permuted_indices_of_many(numel: int) -> None:
    k = min(numel, HUGE)
    drawn = kernels.permuted_indices(11, numel, k, CPU)
    assert_same(drawn, reference.permuted_indices(11, numel, k, CPU))
    assert drawn.unique().numel() == k
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < numel


@pytest.mark.parametrize("numel", [2, 3, 5, 10, 101, 1000])
def test_permuted_indices_cover_evenly(numel: int) -> None:
    k, draws = max(1, numel // 4), 3000
    drawn = torch.stack([kernels.permuted_indices(bits, numel, k, CPU) for bits in range(draws)]).long()
    inclusion = torch.bincount(drawn.flatten(), minlength=numel)
    # Drawing without replacement: counts vary less than independent ones by (numel - k) / (numel - 1).
    mean = draws * k / numel
    spread = (inclusion - mean) * math.sqrt((numel - 1) / (numel - k)) + mean
    assert abs(chi_square(spread, mean)) < 5
    assert (inclusion.double() / draws - k / numel).abs().max() < 6 * math.sqrt(k / numel / draws)
    if k > 1:  # neighbours of the draw: their distance is uniform over 1 .. numel - 1
        steps = torch.bincount((drawn[:, 1] - drawn[:, 0]) % numel, minlength=numel)[1:]
        assert abs(chi_square(steps, draws / (numel - 1))) < 5


@few
@given(keys, st.integers(0, 5000), st.floats(0, 1))
def test_stratified_indices_increase_and_are_of_all_strata(bits: int, numel: int, part: float) -> None:
    k = round(part * numel)
    drawn = kernels.stratified_indices(bits, numel, k, CPU)
    assert_same(drawn, reference.stratified_indices(bits, numel, k, CPU))
    kernels.check_indices(drawn, numel)
    gaps = (drawn.roll(-1) - drawn) % numel if k > 1 else torch.ones(0)
    assert bool((drawn[1:] > drawn[:-1]).all())
    assert bool((gaps < 2 * -(-numel // max(1, k))).all())  # no stratum is left out


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", [HUGE, 2**20 + 1, 2**31 - 1])
def test_stratified_indices_of_many(numel: int) -> None:
    for k in (1, min(numel // 3, HUGE), min(numel, HUGE)):
        drawn = kernels.stratified_indices(11, numel, k, CPU)
        assert_same(drawn, reference.stratified_indices(11, numel, k, CPU))
        assert bool((drawn[1:] > drawn[:-1]).all())
        assert 0 <= int(drawn[0]) <= int(drawn[-1]) < numel


@pytest.mark.parametrize(("numel", "k"), [(2, 1), (5, 2), (10, 7), (101, 25), (1000, 300)])
def test_each_index_is_as_likely_as_others(numel: int, k: int) -> None:
    draws = 6000
    drawn = torch.stack([kernels.stratified_indices(bits, numel, k, CPU) for bits in range(draws)]).long()
    inclusion = torch.bincount(drawn.flatten(), minlength=numel).double() / draws
    assert (inclusion - k / numel).abs().max() < 5 * math.sqrt(k / numel * (1 - k / numel) / draws)


# Packing


@few
@given(st.integers(1, 16), st.sampled_from(SIZES), st.integers(0, 99))
def test_packing_round_trips_and_lays_bits_in_order(bits: int, numel: int, seed: int) -> None:
    dtype = torch.uint8 if bits <= 8 else torch.int32
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (numel,), generator=generator).to(dtype)
    packed, _ = wire(numel, bits, 8)
    expected = packed.clone()
    kernels.pack_bits(codes, bits, packed)
    reference.pack_bits(codes, bits, expected)
    assert_same(packed, expected)
    stream = sum(int(c) << (bits * i) for i, c in enumerate(codes[:64]))
    count = min(64, numel) * bits // 8
    assert packed[:count].tolist() == list(stream.to_bytes(count + 2 + bits * 8, "little")[:count])
    assert_same(kernels.unpack_bits(packed, bits, numel), codes)
    assert_same(reference.unpack_bits(packed, bits, numel), codes)


# Blocks


def check_block_int(x: Tensor, bits: int, block: int, key: int | None) -> None:
    mine, theirs = wire(x.numel(), bits, block), wire(x.numel(), bits, block)
    kernels.block_int_encode(x, bits, block, key, *mine)
    reference.block_int_encode(x, bits, block, key, *theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a, b)
    a, b = torch.full_like(x, 9.0), torch.full_like(x, 8.0)
    kernels.block_int_decode(*mine, bits, block, a)
    reference.block_int_decode(*mine, bits, block, b)
    assert_same(a, b)
    for alpha in (1.0, -0.3):
        a, b = x.clone(), x.clone()
        kernels.block_int_decode(*mine, bits, block, a, alpha)
        reference.block_int_decode(*mine, bits, block, b, alpha)
        assert_same(a, b)


@few
@given(tensors, st.integers(2, 8), st.sampled_from(BLOCKS), st.none() | keys)
def test_block_int_agrees(x: Tensor, bits: int, block: int, key: int | None) -> None:
    check_block_int(x, bits, block, key)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["normal", "heavy", "denormal"])
@pytest.mark.parametrize("key", [None, 5])
def test_block_int_of_many_agrees(kind: str, key: int | None) -> None:
    check_block_int(sample(kind, HUGE), 4, 256, key)


@few
@given(tensors, st.integers(2, 8), st.sampled_from(BLOCKS))
def test_block_int_errs_by_half_a_level_and_not_at_the_largest(x: Tensor, bits: int, block: int) -> None:
    packed, scales = wire(x.numel(), bits, block)
    kernels.block_int_encode(x, bits, block, None, packed, scales)
    decoded = torch.empty_like(x)
    kernels.block_int_decode(packed, scales, bits, block, decoded)
    levels = 2 ** (bits - 1) - 1
    for part, back, scale in zip(x.split(block), decoded.split(block), scales, strict=False):
        largest = float(part.abs().max())
        if math.isfinite(levels / largest if largest else math.inf) and largest > levels / 3e38:
            assert float(scale) == largest
            assert ((part.double() - back).abs() <= 0.5001 * largest / levels + 1e-44).all()
        elif largest < levels / 3.5e38:
            assert not back.any()


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    x, draws = sample("normal", 4096), 400
    packed, scales = wire(x.numel(), bits, 256)
    mean = torch.zeros_like(x)
    for key in range(draws):
        kernels.block_int_encode(x, bits, 256, key, packed, scales)
        kernels.block_int_decode(packed, scales, bits, 256, mean, 1 / draws)
    step = scales.repeat_interleave(256) / (2 ** (bits - 1) - 1)
    error = (mean - x) / (step * 0.5 / math.sqrt(draws))  # half a step is the most a draw deviates
    assert error.abs().max() < 5.5
    assert abs(float(error.mean())) < 5 / math.sqrt(x.numel())


def check_sign(x: Tensor, block: int) -> None:
    mine, theirs = wire(x.numel(), 1, block), wire(x.numel(), 1, block)
    kernels.sign_encode(x, block, *mine)
    reference.sign_encode(x, block, *theirs)
    assert_same(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-44)
    a, b = torch.empty_like(x), torch.empty_like(x)
    kernels.sign_decode(*mine, block, a)
    reference.sign_decode(*mine, block, b)
    assert_same(a, b)
    assert_same(a >= 0, (x >= 0) | (a == 0))
    a, b = x.clone(), x.clone()
    kernels.sign_decode(*mine, block, a, 0.3)
    reference.sign_decode(*mine, block, b, 0.3)
    assert_same(a, b)


@few
@given(tensors, st.sampled_from(BLOCKS))
def test_sign_agrees(x: Tensor, block: int) -> None:
    check_sign(x, block)


@pytest.mark.usefixtures("threads")
def test_sign_of_many_agrees() -> None:
    check_sign(sample("heavy", HUGE), 4096)


@few
@given(tensors, st.sampled_from(BLOCKS))
def test_sign_scale_is_the_mean_magnitude(x: Tensor, block: int) -> None:
    packed, scales = wire(x.numel(), 1, block)
    kernels.sign_encode(x, block, packed, scales)
    means = [float(part.double().abs().mean()) for part in x.split(block) if part.numel()]
    torch.testing.assert_close(scales.double(), torch.tensor(means, dtype=torch.float64), rtol=1e-6, atol=1e-44)


def check_qsgd(x: Tensor, levels: int, block: int, key: int) -> None:
    bits = kernels.qsgd_bits(levels)
    mine, theirs = wire(x.numel(), bits, block), wire(x.numel(), bits, block)
    kernels.qsgd_encode(x, levels, block, key, *mine)
    reference.qsgd_encode(x, levels, block, key, *theirs)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-44)
    # Codes follow from the norm that is stored: where it is the same they are, elsewhere by a level at most.
    codes = [kernels.unpack_bits(packed, bits, x.numel()).int() for packed, _ in (mine, theirs)]
    same = (mine[1] == theirs[1]).repeat_interleave(block)[: x.numel()]
    assert_same(codes[0][same], codes[1][same])
    level = [c & (2 ** (bits - 1) - 1) for c in codes]
    assert ((level[0] - level[1]).abs() <= 1).all()
    assert (level[0] <= levels).all()
    a, b = torch.empty_like(x), torch.empty_like(x)
    kernels.qsgd_decode(*mine, levels, block, a)
    reference.qsgd_decode(*mine, levels, block, b)
    assert_same(a, b)
    a, b = x.clone(), x.clone()
    kernels.qsgd_decode(*mine, levels, block, a, 0.3)
    reference.qsgd_decode(*mine, levels, block, b, 0.3)
    assert_same(a, b)


@few
@given(
    tensors.filter(lambda x: not x.numel() or float(x.abs().max()) < 1e38),
    st.sampled_from([1, 2, 3, 4, 7, 15, 63, 127, 128, 255, 1000, 32767]),
    st.sampled_from(BLOCKS),
    keys,
)
def test_qsgd_agrees(x: Tensor, levels: int, block: int, key: int) -> None:
    check_qsgd(x, levels, block, key)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("levels", [15, 255])
def test_qsgd_of_many_agrees(levels: int) -> None:
    check_qsgd(sample("normal", HUGE), levels, 512, 3)


@pytest.mark.parametrize("levels", [1, 15, 300])
def test_qsgd_is_unbiased(levels: int) -> None:
    x, draws = sample("normal", 2048), 600
    packed, norms = wire(x.numel(), kernels.qsgd_bits(levels), 256)
    mean, square = torch.zeros_like(x), 0.0
    for key in range(draws):
        one = torch.empty_like(x)
        kernels.qsgd_encode(x, levels, 256, key, packed, norms)
        kernels.qsgd_decode(packed, norms, levels, 256, one)
        mean += one / draws
        square += float((one - x).square().sum()) / draws
    bound = min(256 / levels**2, math.sqrt(256) / levels) * float(x.square().sum())
    assert square <= bound * 1.05
    assert float((mean - x).square().sum()) < 1.3 * square / draws


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_block_and_only_there(bad: float) -> None:
    x = sample("normal", 64)
    x[11] = bad
    for each in (kernels, reference):
        out = torch.empty_like(x)
        for key in (None, 1):
            packed, scales = wire(64, 4, 16)
            each.block_int_encode(x, 4, 16, key, packed, scales)
            each.block_int_decode(packed, scales, 4, 16, out)
            assert out.isfinite().tolist() == [False] * 16 + [True] * 48
        packed, scales = wire(64, 1, 16)
        each.sign_encode(x, 16, packed, scales)
        each.sign_decode(packed, scales, 16, out)
        assert out.isfinite().tolist() == [False] * 16 + [True] * 48
        packed, scales = wire(64, 5, 16)
        each.qsgd_encode(x, 15, 16, 1, packed, scales)
        each.qsgd_decode(packed, scales, 15, 16, out)
        assert out.isfinite().tolist() == [False] * 16 + [True] * 48


# The house


def test_meta_tensors_go_through() -> None:
    x = torch.empty(1000, device="meta")
    indices = kernels.topk_indices(x, 10)
    assert indices.shape == (10,)
    assert indices.dtype == torch.int32
    kernels.check_indices(indices, 1000)
    kernels.scatter_add_(x, indices, kernels.gather(x, indices))
    assert kernels.permuted_indices(1, 1000, 10, x.device).shape == (10,)
    assert kernels.all_finite(x).shape == ()
    for bits, block in ((4, 256), (5, 8)):
        packed, scales = (t.to("meta") for t in wire(1000, bits, block))
        kernels.block_int_encode(x, bits, block, 1, packed, scales)
        kernels.block_int_decode(packed, scales, bits, block, x, 1.0)
        kernels.block_int_decode(packed, scales, bits, block, x)
    packed, scales = (t.to("meta") for t in wire(1000, 1, 8))
    kernels.sign_encode(x, 8, packed, scales)
    kernels.sign_decode(packed, scales, 8, x, 1.0)
    kernels.sign_decode(packed, scales, 8, x)
    packed, scales = (t.to("meta") for t in wire(1000, 9, 8))
    kernels.qsgd_encode(x, 255, 8, 1, packed, scales)
    kernels.qsgd_decode(packed, scales, 255, 8, x, 1.0)
    kernels.qsgd_decode(packed, scales, 255, 8, x)


def test_misuse_is_told() -> None:
    x = torch.zeros(16)
    packed, scales = wire(16, 4, 8)
    with pytest.raises(TypeError, match=r"float16.*float32 only.*float64"):
        kernels.topk_indices(x.half(), 1)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.topk_indices(torch.zeros(4, 4), 1)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.topk_indices(torch.zeros(4, 4)[:, 0], 1)
    with pytest.raises(ValueError, match="k 17"):
        kernels.topk_indices(x, 17)
    with pytest.raises(ValueError, match="multiple of 8"):
        kernels.block_int_encode(x, 4, 12, None, packed, scales)
    with pytest.raises(ValueError, match="bits 9"):
        kernels.block_int_encode(x, 9, 8, None, packed, scales)
    with pytest.raises(PayloadError, match="packed has 7"):
        kernels.block_int_decode(packed[:7], scales, 4, 8, x, 1.0)
    with pytest.raises(PayloadError, match="scales has 1"):
        kernels.sign_decode(packed[:2], scales[:1], 8, x)
    with pytest.raises(PayloadError):
        kernels.unpack_bits(packed, 4, 18)
    with pytest.raises(ValueError, match="levels 0"):
        kernels.qsgd_decode(packed, scales, 0, 8, x)


def test_pool_waits_for_all_and_passes_errors_on() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    for tasks in ([fail, lambda: done.append(1)], [lambda: done.append(1), fail]):
        with pytest.raises(ZeroDivisionError):
            pool.run(tasks)
    assert done == [1, 1]


@given(st.integers(0, 10**7), st.sampled_from([1, 8, 24, 4096]))
def test_chunks_tile_the_range(numel: int, granule: int) -> None:
    cuts = pool.chunks(numel, granule)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == numel
    assert all(a[1] == b[0] and b[0] % granule == 0 for a, b in itertools.pairwise(cuts))


def in_child(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRADWIRE_KERNELS": "auto", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.returncode, result.stderr
    return result.stdout


@pytest.mark.one_draw_in(3)
def test_numba_is_imported_at_first_use_and_not_if_unwanted() -> None:
    code = (
        "import sys, torch; from gradwire import kernels; print('numba' in sys.modules); "
        "kernels.topk_indices(torch.ones(300_000), 1); print('numba' in sys.modules)"
    )
    assert in_child(code).split() == ["False", "True"]
    assert in_child(code, GRADWIRE_KERNELS="reference").split() == ["False", "False"]


def test_a_misspelt_choice_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = dispatch.implementations.__wrapped__
    for kind in ("cpu", "cuda"):
        for choice in ("refrence", "numba", "1"):
            monkeypatch.setenv("GRADWIRE_KERNELS", choice)
            with pytest.raises(SpecError, match=f"GRADWIRE_KERNELS='{choice}' names no kernels: set it to 'reference'"):
                uncached("gradwire.kernels.selection", kind)
    for choice, wanted in (("auto", selection_on_cpu), ("", selection_on_cpu), ("reference", None)):
        monkeypatch.setenv("GRADWIRE_KERNELS", choice)
        assert uncached("gradwire.kernels.selection", "cpu") is wanted


def test_missing_numba_is_told_once_and_only_for_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_KERNELS", "auto")
    monkeypatch.setattr(dispatch, "implementations", lambda _package, _kind: None)  # pyright: ignore[reportUnknownLambdaType]
    dispatch.warn_slow.cache_clear()
    kernels.topk_indices(torch.ones(10), 1)
    with pytest.warns(kernels.SlowKernelsWarning, match="numba"):
        kernels.all_finite(torch.ones(HUGE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.all_finite(torch.ones(HUGE))


@pytest.mark.parametrize("kernel", dispatch.KERNELS, ids=lambda kernel: kernel.name)
def test_what_a_kernel_declares_is_there_and_nothing_else(kernel: dispatch.Kernel[..., object]) -> None:
    for kind in ("cpu", "cuda", "meta"):
        file = Path(importlib.import_module(kernel.package).__file__ or "").parent / f"{kind}.py"
        functions = re.findall(r"^(?:def |from .* import )(.*)$", file.read_text(), re.M) if file.exists() else []
        there = any(re.search(rf"\b{kernel.name}\b", line.split("(")[0]) for line in functions)
        assert there == (kind in kernel.devices)


def test_kernels_have_different_names() -> None:
    names = [kernel.name for kernel in dispatch.KERNELS]
    assert len(names) == len(set(names))
