"""What memories other than a float32 residual promise beyond the laws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import Lockstep, parse
from gradwire.codecs import BF16, QSGD, BlockInt, Identity, TopK
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grain import ParameterSpec, flat_grain, matrix_grain
from gradwire.core.state import walk
from gradwire.reducers import (
    EF21,
    AllGatherExchange,
    AllReduceExchange,
    CompressionWarmUp,
    ErrorFeedback,
    FactoredErrorFeedback,
    Guard,
    Hierarchical,
    LeanErrorFeedback,
    PowerSGD,
    Reducer,
    TwoShot,
)

from .checks import Z, check_means, check_non_finite, norm
from .subjects import CPU, DTYPES, grain_for, sample


def test_a_lean_residual_takes_half_the_memory() -> None:
    (lean,) = (leaf for _, leaf in walk(Lockstep(parse("topk:0.1,residual=bf16"), flat_grain(100), 1).states[0]))
    assert (lean.tensor.dtype, lean.owed) == (torch.bfloat16, True)
    with pytest.raises(SpecError, match="bf16"):
        parse("topk:0.1,residual=bf61")


def test_a_factored_residual_takes_two_factors() -> None:
    reducer = parse("topk:0.1,residual=factored:2")
    sizes = [leaf.tensor.numel() for _, leaf in walk(Lockstep(reducer, matrix_grain(30, 50, batch=3), 1).states[0])]
    assert sum(sizes) == 3 * (30 + 50) * 2
    assert reducer.assign(ParameterSpec("b", (30,), torch.float32, CPU)) == Guard(
        ErrorFeedback(AllGatherExchange(TopK(0.1)))
    )
    for wrong, why in (
        ("factored:0", "remembers nothing"),
        ("factored:x", "whole number"),
        ("factored", "whole number"),
    ):
        with pytest.raises((CompositionError, SpecError), match=why):
            parse(f"topk:0.1,residual={wrong}")


def test_factors_keep_a_projection_of_the_residual() -> None:
    """What is lost is orthogonal to what is kept; of full rank, nothing is."""
    grain, inner, x = matrix_grain(20, 30), AllGatherExchange(TopK(0.02)), sample("normal", (1, 20, 30), seed=3)
    ranks = Lockstep(FactoredErrorFeedback(inner, rank=2), grain, 1)
    (result,) = ranks.reduce([x])
    left = x.clone()
    result.sent.subtract_from(left)
    kept = ranks.states[0].tensor("Pt").mT @ ranks.states[0].tensor("Qt")
    assert 0 < norm(kept) < norm(left)
    # every inner product below is of 600 terms in float32
    assert abs(float((kept * (left - kept)).sum())) <= 600 * 2.0**-23 * norm(left) ** 2
    whole, plain = Lockstep(FactoredErrorFeedback(inner, rank=20), grain, 1), Lockstep(ErrorFeedback(inner), grain, 1)
    for _ in range(5):
        (mean,), (want,) = whole.step([x]), plain.step([x])
        assert norm(mean - want) <= 600 * 2.0**-23 * norm(want)


def total_owed(reducer: Reducer, x: Tensor, steps: int) -> Tensor:
    """What is owed after some equal steps less what must be: steps * x - sum of means."""
    lockstep = Lockstep(reducer, flat_grain(x.numel()), world_size=1)
    sent = torch.stack([lockstep.step([x])[0].double() for _ in range(steps)]).sum(0)
    (owed,) = (leaf.tensor.double() for _, leaf in walk(lockstep.states[0]))
    return owed - (steps * x.double() - sent)


def test_small_gradients_are_not_lost_on_a_large_residual() -> None:
    """Rounded to nearest, adding 1 to 300 in bfloat16 gives 300 for ever; stochastically it counts on average."""
    x, steps = torch.ones(4000), 1000
    x[0] = 1e6  # top-k sends nothing else
    off = total_owed(LeanErrorFeedback(AllGatherExchange(TopK(1 / 4000))), x, steps)[1:]
    # Each step rounds up to steps by a spacing of 2^-7 of them at most, so by half that with a standard deviation
    deviation = 2.0**-7 * steps / 2 * steps**0.5
    assert abs(float(off.mean())) <= Z * deviation / off.numel() ** 0.5
    assert norm(total_owed(ErrorFeedback(AllGatherExchange(TopK(1 / 4000))), x, 10)[1:]) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [AllGatherExchange(TopK(0.1)), TwoShot(BlockInt(4)), PowerSGD(2)], ids=repr)
def test_estimates_find_a_gradient_that_stays(inner: Reducer, dtype: torch.dtype) -> None:
    grain = grain_for(inner, 500, dtype)
    xs = [sample("normal", grain.shape, dtype, seed) for seed in (1, 2, 3)]
    lockstep = Lockstep(EF21(inner), grain, world_size=3)
    results = [lockstep.reduce(xs) for _ in range(150)]
    for result in results[::50]:
        check_means(result, xs)
    want = torch.stack(xs).double().mean(0)
    assert norm(results[-1][0].value.double() - want) <= 4 * torch.finfo(dtype).eps * norm(want) + 1e-2 * norm(want)
    left = xs[0].float().clone()
    results[-1][0].sent.subtract_from(left)
    assert norm(left) <= 0.05 * norm(xs[0])


def test_a_bad_step_leaves_estimates_alone() -> None:
    reducer, grain = Guard(EF21(AllGatherExchange(TopK(0.1)))), matrix_grain(10, 10)
    clean = [sample("normal", grain.shape, seed=seed) for seed in (1, 2)]
    bad = [x.clone() for x in clean]
    bad[1].view(-1)[5] = float("inf")
    check_non_finite(Lockstep(reducer, grain, 2), clean, bad, all_nan=True)


def test_estimates_refuse_what_error_feedback_refuses() -> None:
    with pytest.raises(CompositionError, match="contraction"):
        EF21(AllGatherExchange(QSGD(15)))
    with pytest.raises(CompositionError, match="one memory"):
        EF21(ErrorFeedback(AllGatherExchange(TopK(0.1))))
    halves = AllReduceExchange(BF16()), PowerSGD(2, factors="bf16")
    for inner in (*halves, Hierarchical(halves[0], 2), CompressionWarmUp(PowerSGD(2, factors="fp16"), halves[1], 3)):
        with pytest.raises(CompositionError, match="sums in 16 bits"):
            EF21(inner)


@pytest.mark.parametrize(
    "inner",
    [AllReduceExchange(Identity()), Hierarchical(AllGatherExchange(TopK(0.1)), 2), AllGatherExchange(TopK(0.1))],
    ids=repr,
)
def test_estimates_find_a_constant_gradient_through_any_exchange(inner: Reducer) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(600, generator=generator) for _ in range(4)]
    ranks = Lockstep(EF21(inner), flat_grain(600), 4)
    mean = torch.zeros(600)
    for _ in range(200):
        mean = ranks.step([x.clone() for x in xs])[0]
    torch.testing.assert_close(mean, torch.stack(xs).mean(0), rtol=1e-4, atol=1e-5)
