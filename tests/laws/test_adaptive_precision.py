"""What the choice of a format promises beyond the laws: it fits, and all ranks make the same one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import CompositionError, Lockstep, parse
from gradwire.core.collective import AllReduce
from gradwire.core.grain import Grain, Segment, flat_grain
from gradwire.reducers import AdaptivePrecision, Reducer

from .checks import Spied
from .subjects import CPU, sample

HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16


def two_parameters(numel: int = 1000) -> Grain:
    """A grain of two parameters of equal size."""
    segments = (Segment("a", 0, numel, 0), Segment("b", 0, numel, numel))
    return Grain("a..b", segments, (2 * numel,), torch.float32, CPU)


def reduced(reducer: Reducer, grain: Grain, xs: list[Tensor]) -> tuple[Tensor, torch.dtype]:
    """The mean, and what it travelled in; every rank asks for the same."""
    spied = Spied(reducer)
    mean, *others = Lockstep(spied, grain, len(xs)).step(xs)
    assert all(torch.equal(mean, other) for other in others)
    asked, *by_others = (
        [(r.tensor.dtype, r.nbytes) for r in of_rank if isinstance(r, AllReduce)] for of_rank in spied.asked.values()
    )
    assert all(each == asked for each in by_others), "ranks asked for different collectives"
    return mean, asked[-1][0]


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e5, 1e30])
def test_a_narrow_range_fits_wherever_it_lies(size: float) -> None:
    xs = [size * sample("normal", (1000,), seed=seed) for seed in (1, 2, 3)]
    mean, dtype = reduced(AdaptivePrecision(), flat_grain(1000), xs)
    assert dtype == HALF
    want = torch.stack(xs).double().mean(0)
    # Each third is rounded once, and so is each of two sums: by 2^-11 of its size, or where it is subnormal by 2^-25 of
    # 2^k, which is at most 2^-39 of the largest magnitude.
    largest = max(float(x.abs().max()) for x in xs)
    slack = 5 * (2.0**-11 * torch.stack(xs).double().abs().mean(0) + 2.0**-38 * largest)
    assert bool(((mean.double() - want).abs() <= slack).all())


@pytest.mark.parametrize(("wide", "dtype"), [("fp32", FULL), ("bf16", BRAIN)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_far_below_another_is_not_lost(wide: str, dtype: torch.dtype, rank: int) -> None:
    """2^-43 of its neighbour, and on one rank only: `fp16_scaled` sends nothing of it."""
    grain = two_parameters()
    xs = [torch.zeros(2000), torch.zeros(2000)]
    xs[rank][:1000] = sample("normal", (1000,), seed=1)
    xs[rank][1000:] = 2.0**-43 * sample("normal", (1000,), seed=2)
    mean, sent_in = reduced(parse(f"adaptive:{wide}"), grain, xs)
    assert sent_in == dtype
    assert bool(((mean - xs[rank] / 2).abs() <= torch.finfo(dtype).eps * xs[rank].abs()).all())
    lost, _ = reduced(parse("fp16_scaled"), grain, xs)
    assert not bool(lost[1000:].any())


def test_what_fits_is_decided_at_the_edge() -> None:
    """The largest magnitude 1 is scaled by 2^14, so on 2 ranks a mean magnitude of 2^-27 is the least that fits."""
    for smallest, dtype in ((2.0**-27, HALF), (2.0**-27 * 0.999, FULL), (0.0, HALF)):
        x = torch.cat([torch.ones(1000), torch.full((1000,), smallest)])
        mean, sent_in = reduced(AdaptivePrecision(), two_parameters(), [x, x])
        assert sent_in == dtype
        assert torch.equal(mean, x)


def test_sums_do_not_overflow() -> None:
    """The largest finite half on each of 5 ranks, of which a sum before dividing would not fit."""
    xs = [torch.full((10,), 65504.0)] * 5
    mean, dtype = reduced(AdaptivePrecision(), flat_grain(10), xs)
    assert dtype == HALF
    assert bool(((mean - 65504.0).abs() <= 65504 * 9 * 2.0**-11).all())


def test_an_infinity_on_one_rank_is_shown_to_all() -> None:
    xs = [torch.ones(10), torch.ones(10)]
    xs[1][3] = float("inf")
    mean, dtype = reduced(AdaptivePrecision(), flat_grain(10), xs)
    assert dtype == FULL
    assert bool(mean[3].isinf())


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(CompositionError, match="fp32, bf16"):
        parse("adaptive:fp8")
