"""What ACP-SGD promises beyond the laws: one factor and one collective a step, in turn, and an exact resume between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import Lockstep, cost, parse
from gradwire.core.collective import AllReduce
from gradwire.core.errors import CompositionError
from gradwire.core.grain import ParameterSpec, matrix_grain
from gradwire.core.state import State, walk
from gradwire.reducers import ACPSGD

from .checks import Spied, norm, repeated, same_state, snapshot, unit_roundoff
from .subjects import CPU, DTYPES, bits, low_rank, normal

GRAIN = matrix_grain(20, 30)


def factors(state: State) -> dict[str, Tensor]:
    """P and Q, by their names in the state."""
    return {path.rpartition("/")[2]: leaf.tensor for path, leaf in walk(state) if leaf.kind == "matrix"}


def changed(lockstep: Lockstep, xs: list[Tensor]) -> set[str]:
    """Which factors a step changes, alike on all ranks."""
    before = [factors(state) for state in lockstep.states]
    lockstep.step(xs)
    after = [factors(state) for state in lockstep.states]
    found = [
        {name for name in b if not torch.equal(bits(b[name]), bits(a[name]))}
        for b, a in zip(before, after, strict=True)
    ]
    assert all(names == found[0] for names in found)
    return found[0]


# What travels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factors_in", "size"), [("own", 4), ("fp16", 2)])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_step_sends_one_factor_in_one_collective(rank: int, factors_in: str, size: int) -> None:
    shapes = {"a": (40, 24), "b": (40, 24), "c": (8, 16, 3, 3), "bias": (40,), "scale": ()}
    model = [ParameterSpec(name, shape, torch.float32, CPU) for name, shape in shapes.items()]
    rows, columns, flat = 40 + 40 + 8, 24 + 24 + 144, 40 + 1
    for step in range(4):
        found = cost(parse(f"acpsgd:{rank},factors={factors_in}"), model, world_size=4, step=step)
        assert found.payload_bytes == size * rank * (columns if step % 2 else rows) + 4 * flat
        # Biases in another dtype than the factors' cannot travel in the same buffer.
        assert found.collectives == (1 if size == 4 else 2)


def test_two_steps_send_what_one_of_power_sgd_does() -> None:
    model = [ParameterSpec("w", (40, 24), torch.float32, CPU), ParameterSpec("bias", (24,), torch.float32, CPU)]
    both = sum(cost("acpsgd:3", model, 2, step=step).payload_bytes for step in range(2))
    once = cost("powersgd:3,guard=off", model, 2).payload_bytes
    assert both - 2 * 24 * 4 == once - 24 * 4


def test_every_step_asks_for_one_all_reduce() -> None:
    spied = Spied(parse("acpsgd:2"))
    lockstep = Lockstep(spied, GRAIN, world_size=1)
    for step in range(4):
        lockstep.step([normal(GRAIN.shape, step)])
        assert [type(request) for request in spied.seen] == [AllReduce] * (step + 1)
        assert spied.seen[-1].nbytes == 4 * 2 * (30 if step % 2 else 20)


def test_two_factors_of_two_steps_are_what_must_be_smaller_than_the_matrix() -> None:
    square = ParameterSpec("w", (64, 64), torch.float32, CPU)
    assert ACPSGD(63).assign(square) == ACPSGD(63)
    assert ACPSGD(64).assign(square) != ACPSGD(64)
    assert ACPSGD(32, min_compression_rate=2.0).assign(square) != ACPSGD(32, min_compression_rate=2.0)
    assert ACPSGD(31, min_compression_rate=2.0).assign(square) == ACPSGD(31, min_compression_rate=2.0)


# What is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_two_steps_of_a_mean_of_low_rank_are_exact(rank: int) -> None:
    """P of the first step spans the columns of the mean, so the second loses nothing, nor does any after it."""
    grain = matrix_grain(24, 17, batch=2)
    mean = low_rank(24, 17, rank, seed=1, batch=2)
    apart = normal(grain.shape, 5)
    lockstep = Lockstep(ACPSGD(rank), grain, world_size=2)
    first, *later = (lockstep.step([mean + apart, mean - apart])[0] for _ in range(5))
    assert norm(first - mean) > 0.1 * norm(mean)
    for found in later:
        assert norm(found - mean) <= 64 * unit_roundoff() * norm(apart)


@pytest.mark.parametrize("rank", [1, 3])
def test_it_approaches_the_best_approximation(rank: int) -> None:
    """Repeated on one matrix two steps are one of subspace iteration, which converges to the truncated SVD."""
    x = normal((1, 24, 17), 3)
    mean = repeated(Lockstep(ACPSGD(rank), matrix_grain(24, 17), world_size=1), [x], 400)
    s = torch.linalg.svdvals(x[0].double())
    best = float(s[rank:].square().sum().sqrt())
    assert best * (1 - 1e-5) <= norm(x - mean) <= 1.01 * best


@pytest.mark.parametrize(("true_rank", "owed"), [(2, 1.0), (20, 12.0)])
def test_of_a_constant_gradient_a_bounded_part_is_owed(true_rank: int, owed: float) -> None:
    """Means add up to the gradient times the steps, less what is owed: of low rank what the first step missed, which
    is no more than the gradient; of full rank what waits for its turn."""
    x = low_rank(20, 30, true_rank, seed=4)
    lockstep = Lockstep(parse("acpsgd:2"), GRAIN, world_size=2)
    total = torch.zeros(GRAIN.shape, dtype=torch.float64)
    for step in range(1, 401):
        total += lockstep.step([x, x])[0]
        assert norm(total - step * x.double()) <= (owed + step * 64 * unit_roundoff()) * norm(x)


def test_error_feedback_turns_what_is_held_away() -> None:
    """What the last step owed is in this one's gradient, so of a constant gradient of low rank the factor that is held
    next leans to the other side of it: odd steps miss a part, and the even ones after them send it all."""
    x = low_rank(20, 30, 2, seed=4)
    lockstep, total, missed = Lockstep(parse("acpsgd:2"), GRAIN, world_size=2), torch.zeros(GRAIN.shape), list[float]()
    for step in range(1, 21):
        total += lockstep.step([x, x])[0]
        missed.append(norm(total - step * x) / norm(x))
    assert max(missed[1::2]) <= 20 * 64 * unit_roundoff()
    assert min(missed[::2]) > 0.01
    assert missed[::2] == sorted(missed[::2], reverse=True)


def test_factors_alternate() -> None:
    lockstep = Lockstep(parse("acpsgd:2"), GRAIN, world_size=2)
    found = [changed(lockstep, [normal(GRAIN.shape, step), normal(GRAIN.shape, 50 + step)]) for step in range(6)]
    assert found == [{"Pt"}, {"Qt"}] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_layer_without_gradient_comes_back(rank: int, dtype: torch.dtype, steps: int) -> None:
    grain = matrix_grain(20, 30, dtype=dtype)
    lockstep = Lockstep(parse(f"acpsgd:{rank}"), grain, world_size=2)
    for _ in range(steps):
        for mean in lockstep.step([torch.zeros(grain.shape, dtype=dtype)] * 2):
            assert not bool(mean.any())
    x = low_rank(20, 30, 1, seed=5).to(dtype)
    total = sum(lockstep.step([x, x])[0].double() for _ in range(6)) / 6
    # What the first step missed came with the second.
    assert norm(total - x) <= 64 * unit_roundoff(dtype) * norm(x)


def test_columns_are_redrawn_from_the_key() -> None:
    """Of the step and the seed, the same on every rank."""

    def after_zeros(seed: int, steps: int) -> Tensor:
        lockstep = Lockstep(parse("acpsgd:2"), GRAIN, world_size=2, seed=seed)
        for _ in range(steps):
            lockstep.step([torch.zeros(GRAIN.shape)] * 2)
        own, other = (factors(state)["Pt"] for state in lockstep.states)
        assert torch.equal(own, other)
        assert own.unique().numel() == own.numel()
        return own

    drawn = after_zeros(0, 1)
    assert torch.equal(drawn, after_zeros(0, 2))
    assert not torch.equal(drawn, after_zeros(0, 3))
    assert not torch.equal(drawn, after_zeros(1, 1))


def test_rank_deficient_matrices_stay_finite() -> None:
    """And columns that had nothing to find find what there is as soon as there is something."""
    lockstep = Lockstep(parse("acpsgd:4,ef=off"), GRAIN, world_size=2)
    for step in range(20):
        for mean in lockstep.step([low_rank(20, 30, 1, seed=step)] * 2):
            assert bool(torch.isfinite(mean).all())
    x = low_rank(20, 30, 4, seed=99)
    assert norm(repeated(lockstep, [x, x], 3) - x) <= 1e-4 * norm(x)


def test_half_precision_carries_large_gradients() -> None:
    """The held factor is orthonormal, so M Q is of the size of M."""
    x = (500 * low_rank(20, 30, 2, seed=1)).half()
    mean = repeated(Lockstep(parse("acpsgd:2,ef=off"), matrix_grain(20, 30, dtype=torch.float16), 2), [x, x], 4)
    assert norm(mean - x) <= 0.01 * norm(x)


# What is no number, and what goes on later ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clean", [0, 1, 2, 3])
def test_what_is_not_finite_shows_by_itself_on_odd_and_even_steps(clean: int, bad: float) -> None:
    """In the mean, without a flag: wherever it stands, though the factors be zero there."""
    grain = matrix_grain(6, 8)
    for place in (0, 21, 47):
        lockstep = Lockstep(ACPSGD(2), grain, world_size=2)
        x = torch.zeros(grain.shape)
        for _ in range(clean):
            x[0, 2, 3] = 1.0
            lockstep.step([x, x])
        spoiled = x.clone()
        spoiled.view(-1)[place] = bad
        for reduced in lockstep.reduce([x, spoiled]):
            assert not bool(torch.isfinite(reduced.value).all())


@pytest.mark.parametrize("spec", ["acpsgd:2", "acpsgd:2,ef=off"])
@pytest.mark.parametrize("clean", [0, 1, 2, 3])
def test_a_step_that_is_not_kept_leaves_both_factors(clean: int, spec: str) -> None:
    x = low_rank(20, 30, 2, seed=6)
    lockstep = Lockstep(parse(spec), GRAIN, world_size=2)
    for _ in range(clean):
        lockstep.step([x, x])
    before = snapshot(lockstep.states)
    for mean in lockstep.step([x, torch.full(GRAIN.shape, math.nan)]):
        assert bool(mean.isnan().all())
    assert same_state(lockstep.states, before)
    assert changed(lockstep, [normal(GRAIN.shape, 7)] * 2) == ({"Pt"} if clean % 2 else {"Qt"})


@pytest.mark.parametrize("clean", [0, 1])
def test_it_finds_its_way_from_an_older_factor(clean: int) -> None:
    """The step after one that was not kept holds what nobody has found, and the next after that is exact."""
    x = low_rank(20, 30, 2, seed=6)
    lockstep = Lockstep(parse("acpsgd:2,ef=off"), GRAIN, world_size=2)
    for _ in range(clean):
        lockstep.step([x, x])
    lockstep.step([x, torch.full(GRAIN.shape, math.nan)])
    assert norm(repeated(lockstep, [x, x], 1) - x) > 0.1 * norm(x)
    assert norm(repeated(lockstep, [x, x], 1) - x) <= 64 * unit_roundoff() * norm(x)


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("after", [2, 3, 1])
def test_a_run_goes_on_with_the_factor_that_is_due(steps: int, after: int) -> None:
    """On as many ranks it is the same run; on others all ranks still hold the same factors, and the other's turn is
    next."""
    lockstep = Lockstep(parse("acpsgd:2"), GRAIN, world_size=2)
    for step in range(steps):
        lockstep.step([normal(GRAIN.shape, 2 * step), normal(GRAIN.shape, 2 * step + 1)])
    states = lockstep.state_dicts()
    again = Lockstep(parse("acpsgd:2"), GRAIN, world_size=after)
    again.load_state_dicts(states if after == 2 else gradwire.reshard(states, after))
    held = factors(lockstep.states[0])
    assert all(torch.equal(found, held[name]) for state in again.states for name, found in factors(state).items())
    xs = [normal(GRAIN.shape, 90), normal(GRAIN.shape, 91), normal(GRAIN.shape, 92)]
    if after == 2:
        for _ in range(3):
            for mean, other in zip(lockstep.step(xs[:2]), again.step(xs[:2]), strict=True):
                assert torch.equal(bits(mean), bits(other))
    else:
        assert changed(again, xs[:after]) == ({"Qt"} if steps % 2 else {"Pt"})


def test_a_warm_up_of_odd_length_begins_with_q() -> None:
    lockstep = Lockstep(parse("acpsgd:2,ef=off,warmup=1"), GRAIN, world_size=2)
    x = low_rank(20, 30, 2, seed=8)
    assert changed(lockstep, [x, x]) == set()
    assert [changed(lockstep, [x, x]) for _ in range(2)] == [{"Qt"}, {"Pt"}]
    assert norm(repeated(lockstep, [x, x], 4) - x) <= 64 * unit_roundoff() * norm(x)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank"),
        ({"min_compression_rate": 0.0}, "min_compression_rate"),
        ({"factors": "int8"}, "one all-reduce.*powersgd has factors=int8"),
        ({"factors": "fp8"}, "none of own, bf16, fp16"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(CompositionError, match=says):
        ACPSGD(**options)
    with pytest.raises(CompositionError, match=says):
        parse("acpsgd," + ",".join(f"{name}={value}" for name, value in options.items()))
