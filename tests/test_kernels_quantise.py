"""Laws of the quantisers' kernels: what each computes, and that numba and plain torch compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import PayloadError
from gradwire.kernels import packed_nbytes, unpack_bits
from kernel_sets import everything_in
from test_kernels import HUGE, assert_same, sample, tensors

pytest.importorskip("numba")
reference = everything_in("reference")

keys = st.integers(0, 2**64 - 1)
few = settings(max_examples=30, deadline=None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Family:
    """An encoder and its decoder, with the wire in the order that the decoder takes it.

    `sizes` maps numel to (dtype, elements) of each tensor of the wire; `exact` says that no scale is a sum.
    """

    name: str
    sizes: Callable[[int], list[tuple[torch.dtype, int]]]
    encode: Callable[[Any, Tensor, int, list[Tensor]], None]
    options: tuple[Any, ...] = ()
    exact: bool = True

    def wire(self, numel: int) -> list[Tensor]:
        """Filled with rubbish, so that a byte which is not written is found."""
        return [torch.full((count,), 0xA5, dtype=torch.uint8).to(dtype) for dtype, count in self.sizes(numel)]

    def decoded(self, module: Any, wire: list[Tensor], numel: int) -> Tensor:
        out = torch.full((numel,), 9.0)
        getattr(module, f"{self.name}_decode")(*wire, *self.options, out)
        return out

    def accumulated(self, module: Any, wire: list[Tensor], into: Tensor, alpha: float) -> Tensor:
        out = into.clone()
        getattr(module, f"{self.name}_decode")(*wire, *self.options, out, alpha)
        return out


U8, F32 = torch.uint8, torch.float32


def blocks(numel: int, block: int) -> int:
    return -(-numel // (block or max(1, numel)))


def float8(name: str, block: int) -> Family:
    dtype = kernels.FLOAT8[name]
    return Family(
        "float8",
        lambda n: [(U8, n), (U8, blocks(n, block))],
        lambda m, x, _, w: m.float8_encode(x, dtype, block, *w),
        (dtype, block),
    )


def ternary(clip: float, block: int, digits: int) -> Family:
    def encode(m: Any, x: Tensor, key: int, w: list[Tensor]) -> None:
        m.ternary_scales(x, clip, block, w[1])
        m.ternary_encode(x, w[1], key, block, digits, w[0])
        packed, scales = (torch.full_like(part, 7) for part in w)
        m.ternary_encode(x, scales, key, block, digits, packed, clip)
        assert torch.equal(packed, w[0])
        assert torch.equal(scales.view(torch.int32), w[1].view(torch.int32))

    def sizes(n: int) -> list[tuple[torch.dtype, int]]:
        return [(U8, -(-n // digits)), (F32, blocks(n, block))]

    return Family("ternary", sizes, encode, (block, digits), exact=math.isinf(clip))


def one_bit(block: int) -> Family:
    return Family(
        "one_bit",
        lambda n: [(U8, packed_nbytes(n, 1)), (F32, 2 * blocks(n, block))],
        lambda m, x, _, w: m.one_bit_encode(x, block, *w),
        (block,),
        exact=False,
    )


def affine(block: int) -> Family:
    return Family(
        "affine",
        lambda n: [(F32, blocks(n, block)), (U8, blocks(n, block)), (U8, n)],
        lambda m, x, _, w: m.affine_encode(x, block, *w),
        (block,),
    )


NATURAL = Family(
    "natural",
    lambda n: [(U8, n), (U8, packed_nbytes(n, 1))],
    lambda m, x, key, w: m.natural_encode(x, key, *w),
)
FAMILIES = [
    *(float8(name, block) for name in kernels.FLOAT8 for block in (8, 256)),
    NATURAL,
    *(ternary(clip, block, digits) for clip in (1.0, math.inf) for block, digits in ((40, 4), (40, 5), (6560, 5))),
    one_bit(8),
    one_bit(256),
    *(affine(block) for block in (0, 7, 256)),
]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name}{f.options}{'' if f.exact else '~'}")


def check_agreement(family: Family, x: Tensor, key: int) -> None:
    mine, theirs = family.wire(x.numel()), family.wire(x.numel())
    family.encode(kernels, x, key, mine)
    family.encode(reference, x, key, theirs)
    for a, b in zip(mine, theirs, strict=True):
        if family.exact or (a.dtype == torch.uint8 and family.name == "one_bit"):
            assert_same(a, b)
        elif a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=2**-23, atol=2e-45, equal_nan=True)
    assert_same(family.decoded(kernels, mine, x.numel()), family.decoded(reference, mine, x.numel()))
    for alpha in (1.0, -0.3):
        assert_same(family.accumulated(kernels, mine, x, alpha), family.accumulated(reference, mine, x, alpha))


@each_family
@few
@given(x=tensors, key=keys)
def test_numba_agrees_with_torch(family: Family, x: Tensor, key: int) -> None:
    check_agreement(family, x, key)


@pytest.mark.usefixtures("threads")
@each_family
@pytest.mark.parametrize("kind", ["normal", "heavy", "denormal"])
def test_numba_agrees_with_torch_on_many(family: Family, kind: str) -> None:
    check_agreement(family, sample(kind, HUGE), 5)


@each_family
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_where_it_is_and_in_no_other_block(family: Family, bad: float) -> None:
    x = sample("normal", 7000)
    x[6700] = bad
    for module in (kernels, reference):
        wire = family.wire(x.numel())
        family.encode(module, x, 1, wire)
        finite = family.decoded(module, wire, x.numel()).isfinite()
        assert not bool(finite[6700])
        if family.options != (0,):
            assert bool(finite[:6560].all())


@each_family
def test_a_wire_of_another_size_is_refused(family: Family) -> None:
    for damaged in range(len(family.sizes(1000))):
        wire = family.wire(1000)
        wire[damaged] = wire[damaged][:-1]
        with pytest.raises(PayloadError, match="needed"):
            family.decoded(kernels, wire, 1000)


@pytest.mark.parametrize("name", kernels.FLOAT8)
def test_every_number_of_a_format_is_kept_and_what_lies_between_goes_to_the_nearest(name: str) -> None:
    dtype = kernels.FLOAT8[name]
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, torch.nextafter(between, numbers[1:]), torch.nextafter(between, numbers[:-1])])
    family = float8(name, 4096)
    wire = family.wire(x.numel())
    family.encode(kernels, x, 0, wire)
    assert wire[1].tolist() == [127]  # scale 1
    assert torch.equal(family.decoded(kernels, wire, x.numel()), torch.cat([numbers, numbers[1:], numbers[:-1]]))


@pytest.mark.parametrize("name", kernels.FLOAT8)
@given(largest=st.floats(2.0**-100, 2.0**127, width=32))
def test_no_float8_saturates_and_half_the_range_is_used(name: str, largest: float) -> None:
    most = torch.finfo(kernels.FLOAT8[name]).max
    codes, exponents = float8(name, 8).wire(1)
    kernels.float8_encode(torch.tensor([largest]), kernels.FLOAT8[name], 8, codes, exponents)
    assert most / 2 < largest * 2.0 ** (127 - int(exponents)) <= most


@few
@given(x=tensors, key=keys)
def test_natural_takes_a_neighbouring_power_of_two(x: Tensor, key: int) -> None:
    wire = NATURAL.wire(x.numel())
    NATURAL.encode(kernels, x, key, wire)
    y = NATURAL.decoded(kernels, wire, x.numel())
    assert bool((y.sign() * x.sign() >= 0).all())
    normal = x.abs() >= torch.finfo(torch.float32).tiny
    below = torch.exp2(torch.frexp(x[normal].double()).exponent - 1.0)
    up = y[normal].abs().double() / below
    assert bool(((up == 1) | (up == 2)).all())
    assert bool((up[x[normal].abs() == below] == 1).all())
    assert bool(((y[~normal] == 0) | (y[~normal].abs() == 2.0**-126)).all())


def test_natural_at_the_ends_of_float32() -> None:
    x = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, math.inf, -math.inf])
    for key in range(20):
        wire = NATURAL.wire(x.numel())
        NATURAL.encode(kernels, x, key, wire)
        y = NATURAL.decoded(kernels, wire, x.numel())
        assert_same(y, torch.tensor([0.0, -0.0, 2.0**127, -(2.0**127), math.inf, -math.inf]))


def test_subnormal_numbers_are_rounded_without_bias() -> None:
    x, draws, unit = torch.full((1000,), 0.3 * 2.0**-126), 40, 2.0**-126
    for encode in (_natural, _bfloat16):
        seen = torch.stack([encode(x, key) for key in range(draws)]).double() / unit
        assert abs(float(seen.mean()) - 0.3) < 5.5 * float(seen.std()) / math.sqrt(seen.numel())


def _natural(x: Tensor, key: int) -> Tensor:
    wire = NATURAL.wire(x.numel())
    NATURAL.encode(kernels, x, key, wire)
    return NATURAL.decoded(kernels, wire, x.numel())


def _bfloat16(x: Tensor, key: int) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.bfloat16)
    kernels.bfloat16_encode(x, key, out)
    return out.float()


@few
@given(x=tensors, key=keys)
def test_stochastic_bfloat16(x: Tensor, key: int) -> None:
    mine, theirs = (torch.empty(x.numel(), dtype=torch.bfloat16) for _ in range(2))
    kernels.bfloat16_encode(x, key, mine)
    reference.bfloat16_encode(x, key, theirs)
    assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert bool(((mine.float() == below) | (mine.float() == above)).all())
    assert bool((mine.float() == x)[below == x].all())


def test_no_rounding_makes_a_number_of_what_is_none() -> None:
    """Adding a fraction to the bits of a NaN could carry into the sign."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    for key in range(50):
        for encode in (_natural, _bfloat16):
            assert not encode(bits.view(torch.float32), key).isfinite().any()
        assert _bfloat16(bits.view(torch.float32), key).isnan().tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(("digits", "base"), [(5, 3), (4, 4)])
@pytest.mark.parametrize("numel", [1, 4, 39, 40, 41, 97, 400])
def test_ternary_digits_lie_as_described(digits: int, base: int, numel: int) -> None:
    x = sample("integers", numel)
    scales = torch.full((blocks(numel, 40),), 1e-9)  # all but zeros go to +-s whatever is drawn
    packed = torch.empty(-(-numel // digits), dtype=torch.uint8)
    kernels.ternary_encode(x, scales, 1, 40, digits, packed)
    wanted: list[int] = []
    for part in x.split(40):
        nbytes = -(-part.numel() // digits)
        digit = [int(v) + 1 for v in part.sign()] + [0] * (nbytes * digits - part.numel())
        wanted += [sum(base**p * digit[p * nbytes + j] for p in range(digits)) for j in range(nbytes)]
    assert packed.tolist() == wanted


def test_a_clipped_ternary_scale_is_so_many_root_mean_squares() -> None:
    x = torch.cat([sample("heavy", 40), torch.full((40,), -0.7), torch.zeros(40)])
    scales = torch.empty(3)
    kernels.ternary_scales(x, 2.5, 40, scales)
    rms = float(x[:40].double().square().mean().sqrt())
    assert rms * 2.5 < float(x[:40].abs().max())
    torch.testing.assert_close(scales, torch.tensor([2.5 * rms, 0.7, 0.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("voters", [1, 2, 3, 4, 126, 127, 128, 200])
def test_the_majority_is_that_of_most(voters: int) -> None:
    generator = torch.Generator().manual_seed(voters)
    ballots = torch.randint(256, (voters, 5000), generator=generator, dtype=torch.uint8)
    ballots[: voters // 2, :100], ballots[voters // 2 :, :100] = 255, 0  # a tie where their number is even
    votes = torch.stack([unpack_bits(ballot, 1, 40_000) for ballot in ballots]).int()
    for casting in {0, voters - 1}:
        double = 2 * votes.sum(0) + votes[casting]
        for module in (kernels, reference):
            out = torch.full((5000,), 0xA5, dtype=torch.uint8)
            module.majority(ballots, casting, out)
            assert torch.equal(unpack_bits(out, 1, 40_000).bool(), double > voters)


@pytest.mark.usefixtures("threads")
def test_the_majority_of_many() -> None:
    ballots = torch.randint(256, (3, HUGE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    mine, theirs = torch.empty(HUGE, dtype=torch.uint8), torch.empty(HUGE, dtype=torch.uint8)
    kernels.majority(ballots, 1, mine)
    reference.majority(ballots, 1, theirs)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("casting", [-1, 3])
def test_only_a_voter_breaks_ties(casting: int) -> None:
    with pytest.raises(ValueError, match="casting"):
        kernels.majority(torch.zeros(3, 2, dtype=torch.uint8), casting, torch.empty(2, dtype=torch.uint8))


@few
@given(x=tensors.filter(lambda x: bool(x.numel())), block=st.sampled_from([0, 7, 256]))
def test_an_affine_grid_holds_zero_and_both_ends(x: Tensor, block: int) -> None:
    family = affine(block)
    wire = family.wire(x.numel())
    family.encode(kernels, x, 0, wire)
    y = family.decoded(kernels, wire, x.numel())
    assert not y[x == 0].any()
    step = wire[0].repeat_interleave(block or x.numel())[: x.numel()].double()
    slack = 255 * 2.0**-22 * step + 255 * 2.0**-149
    assert bool(((x.double() - y.double()).abs() <= step * 1.0 + slack).all())
    assert bool(((x.double() - y.double()).abs() <= 0.5 * step + slack)[(x >= 0) & (y < x.max())].all())
