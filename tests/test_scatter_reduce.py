"""The two halves of a two-shot, each alone: shards of the mean for their owners, and shards for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gradwire import CompositionError, Lockstep
from gradwire.codecs import BF16, FP16, BlockInt, Chain, Codec, Identity, Natural, OneBit, Sign, TopK
from gradwire.core.grain import Grain, flat_grain
from gradwire.core.key import Key
from gradwire.core.state import State
from gradwire.drivers.cost import specs_of
from gradwire.drivers.interpreter import Interpreter, Script, Traffic, run_program
from gradwire.drivers.lockstep import Meeting, VirtualTransport, run_lockstep, together
from gradwire.drivers.plan import plan
from gradwire.reducers import (
    EF21,
    CompressionWarmUp,
    ErrorFeedback,
    Gather,
    Guard,
    Hierarchical,
    Reduced,
    Reducer,
    Scatter,
    ScatterReduce,
    Scheduled,
    ShardGather,
    ShardwiseGather,
    ShardwiseScatterReduce,
    SparseTwoShot,
    Step,
    TwoShot,
    WorkerMomentum,
    scatter_reduce,
)
from gradwire.reducers.sharding import CutPayload, ShardedPayload, ShardPayloads, Shards

CODECS: list[Codec] = [
    *(Identity(), BF16(), FP16(), BlockInt(4), BlockInt(8, block=16, stochastic=True), Sign(64), OneBit(64)),
    *(Natural(), TopK(0.1), Chain(TopK(0.2), BlockInt(8))),
]
CUTTABLE = [codec for codec in CODECS if codec.granularity]
HALVES: list[Scatter] = [
    *(ScatterReduce(codec) for codec in CUTTABLE),
    *(ShardwiseScatterReduce(codec) for codec in CODECS),
]
GATHERS: list[ShardGather] = [Gather(BlockInt(4)), ShardwiseGather(TopK(0.1)), ShardwiseGather(BlockInt(4))]
EXCHANGES: list[TwoShot | SparseTwoShot] = [
    *(TwoShot(BlockInt(4)), TwoShot(Natural()), TwoShot(BF16(), BlockInt(8)), SparseTwoShot(TopK(0.1))),
]
TOLD = [half for half in HALVES if half.codec in (Identity(), FP16(), BlockInt(4), Sign(64), TopK(0.1))]
CONTRACTIONS = [half for half in HALVES if not half.lossless and half.contraction(flat_grain(1000))]
SIZES = [(1, 1), (1, 3), (3, 2), (257, 3), (1001, 2), (1001, 5)]


def tensors(ranks: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Standard normal numbers for each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


def owned(reducer: Reducer, grain: Grain, ranks: int) -> list[slice]:
    """The elements that each rank's result holds."""
    return [reducer.owned(grain, Step(0, rank, ranks)) for rank in range(ranks)]


# The cut --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numel", "count", "unit"), [(0, 3, 1), (1, 3, 1), (10, 3, 4), (12, 3, 4), (1000, 7, 256)])
def test_shards_are_equal_and_make_up_the_whole(numel: int, count: int, unit: int) -> None:
    shards, x = Shards(numel, count, unit), torch.arange(float(numel))
    assert shards.size % unit == 0
    assert torch.equal(torch.cat([x[shards.of(rank)] for rank in range(count)]), x)
    assert [shards.size_of(rank) for rank in range(count)] == [len(x[shards.of(rank)]) for rank in range(count)]
    rows = shards.rows(x)
    assert torch.equal(shards.joined(rows, like=x), x)
    for rank in range(count):
        received = torch.stack([rows[rank], rows[rank]])
        values = shards.values(received, x.dtype)
        assert torch.equal(values, shards.padded(x[shards.of(rank)]).expand(2, -1))


@pytest.mark.parametrize("made", [CutPayload, ShardPayloads])
@pytest.mark.parametrize("codec", CUTTABLE, ids=repr)
@pytest.mark.parametrize(("numel", "count"), SIZES)
def test_a_sharded_payload_says_of_each_shard_what_was_encoded(
    made: Callable[[Codec, Shards, torch.dtype], ShardedPayload], codec: Codec, numel: int, count: int
) -> None:
    shards, key = Shards(numel, count, codec.granularity), Key(seed=3)
    sharded, (x,) = made(codec, shards, torch.float32), tensors(1, numel)
    rows, sent = sharded.encode(x, key, codec.encode_into)
    assert rows.shape == (count, sharded.nbytes)
    lost = x.clone()
    sent.subtract_from(lost)
    for rank in range(count):
        found = torch.zeros(shards.size_of(rank))
        sharded.accumulate(rows[rank], rank, found, key, alpha=1.0)
        torch.testing.assert_close(found, (x - lost)[shards.of(rank)])


# The first half -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [ScatterReduce(Identity()), ShardwiseScatterReduce(Identity())], ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_identity_is_exact(half: Scatter, ranks: int) -> None:
    """Whole numbers and divisors that are powers of two: no float32 sum of them is rounded."""
    grain = flat_grain(1001)
    xs = [x.mul_(1000).round_() for x in tensors(ranks, grain.numel)]
    mean = torch.stack(xs).double().mean(0)
    for shard, here in zip(Lockstep(half, grain, ranks).step(xs), owned(half, grain, ranks), strict=True):
        assert torch.equal(shard.double(), mean[here])


@pytest.mark.parametrize("half", HALVES, ids=repr)
@pytest.mark.parametrize(("numel", "ranks"), SIZES)
def test_each_rank_ends_with_its_shard_of_the_mean(half: Scatter, numel: int, ranks: int) -> None:
    """It is off by no more than the codec's error on each rank, which is what `sent` leaves, and the sum's rounding."""
    grain, xs = flat_grain(numel), tensors(ranks, numel)
    mean = torch.stack(xs).double().mean(0)
    results = Lockstep(half, grain, ranks).reduce(xs)
    lost = [x.clone() for x in xs]
    for left, result in zip(lost, results, strict=True):
        result.sent.subtract_from(left)
    error = torch.stack(lost).double().mean(0)
    sizes = (torch.stack(xs).abs() + torch.stack(lost).abs()).sum(0)
    rounding = 4 * (ranks + 2) * torch.finfo(torch.float32).eps * sizes
    for result, here in zip(results, owned(half, grain, ranks), strict=True):
        assert result.value.shape == (here.stop - here.start,)
        assert bool(((mean - error)[here] - result.value.double()).abs().le(rounding[here]).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_shard_has_the_dtype_of_the_tensor(dtype: torch.dtype) -> None:
    xs = tensors(3, 100, dtype=dtype)
    shards = Lockstep(ScatterReduce(Identity()), flat_grain(100, dtype=dtype), 3).step(xs)
    assert {shard.dtype for shard in shards} == {dtype}
    exact = torch.stack(xs).double()
    off = (torch.cat(shards).double() - exact.mean(0)).abs()
    assert bool((off <= 4 * torch.finfo(dtype).eps * exact.abs().mean(0)).all())  # three products, three sums, a cast


@pytest.mark.parametrize("half", [ScatterReduce(BlockInt(4)), ShardwiseScatterReduce(TopK(0.01))], ids=repr)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_sends_all_but_one_shard_of_a_payload(half: Scatter, ranks: int) -> None:
    grain, meeting = flat_grain(256 * 800), Meeting(ranks)
    traffic = [Traffic() for _ in range(ranks)]

    def script(rank: int) -> Script[list[Reduced]]:
        program = half.reduce(grain, torch.ones(grain.numel), State(), Step(0, rank, ranks))
        return Interpreter[Reduced](VirtualTransport(meeting, rank), traffic[rank]).script(1, lambda _: [program])

    together([script(rank) for rank in range(ranks)])
    payload = half.codec.payload_bytes(grain.numel)
    headers = 36 * ranks if isinstance(half, ShardwiseScatterReduce) else 0
    for each in traffic:
        assert 0 <= each.wire_bytes - payload * (ranks - 1) // ranks <= headers


@pytest.mark.parametrize("half", HALVES, ids=repr)
def test_the_tensor_is_left_as_it_is(half: Scatter) -> None:
    xs = tensors(3, 1001)
    before = [x.clone() for x in xs]
    run_lockstep([half.reduce(flat_grain(1001), x, State(), Step(0, rank, 3)) for rank, x in enumerate(xs)])
    assert all(torch.equal(x, b) for x, b in zip(xs, before, strict=True))


@pytest.mark.parametrize("half", HALVES, ids=repr)
def test_keeping_in_one_pass_is_subtracting_afterwards(half: Scatter) -> None:
    grain, xs = flat_grain(1001), tensors(3, 1001)
    steps = [Step(2, rank, 3) for rank in range(3)]
    results = run_lockstep([half.reduce(grain, x, State(), step) for x, step in zip(xs, steps, strict=True)])
    left = [x.clone() for x in xs]
    kept = run_lockstep([half.reduce_keeping(grain, x, State(), step) for x, step in zip(left, steps, strict=True)])
    for x, mine, result, other in zip(xs, left, results, kept, strict=True):
        result.sent.subtract_from(x)
        assert torch.equal(x, mine)
        assert torch.equal(result.value, other.value)


@pytest.mark.parametrize("half", CONTRACTIONS, ids=repr)
def test_error_feedback_around_the_first_half_loses_nothing(half: Scatter) -> None:
    """What was given is what all shards received, and what the ranks still owe."""
    ranks, grain = 3, flat_grain(1001)
    lockstep = Lockstep(ErrorFeedback(half), grain, ranks)
    given = got = torch.zeros(grain.numel, dtype=torch.float64)
    sizes = torch.zeros(())
    for index in range(20):
        xs = tensors(ranks, grain.numel, seed=index)
        given = given + torch.stack(xs).double().sum(0)
        shards = lockstep.step(xs)
        got = got + ranks * torch.cat(shards).double()
        sizes = sizes + torch.stack(xs).abs().sum(0).max() + torch.cat(shards).abs().max()
    owed = torch.stack([state.tensor("residual") for state in lockstep.states])
    lost = given - got - owed.double().sum(0)
    rounding = 4 * (ranks + 2) * torch.finfo(torch.float32).eps * float(sizes + owed.abs().sum(0).max())
    assert float(owed.abs().max()) > 10 * rounding  # something is owed, so there was something to lose
    assert float(lost.abs().max()) <= rounding


def test_a_constant_gradient_arrives_whole_in_the_end() -> None:
    ranks, numel, steps = 4, 400, 400
    lockstep = Lockstep(ErrorFeedback(ShardwiseScatterReduce(TopK(0.05))), flat_grain(numel), ranks)
    xs = tensors(ranks, numel)
    total = sum(torch.cat(lockstep.step(xs)) for _ in range(steps))
    assert isinstance(total, Tensor)
    # each entry waits at most while the others drain: a few rounds of 1/density steps
    off = (total / steps - torch.stack(xs).mean(0)).abs().max()
    assert float(off) <= 3 / 0.05 / steps * float(torch.stack(xs).abs().max())


# A guard ----------------------------------------------------------------------------------------------------------


def test_no_half_says_that_every_rank_sees_what_is_not_finite() -> None:
    assert not any(half.shows_non_finite for half in HALVES)
    assert any(half.codec.shows_non_finite for half in HALVES)
    assert not Guard(ErrorFeedback(ScatterReduce(BlockInt(4)))).inner.shows_non_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("half", TOLD, ids=repr)
def test_a_guard_tells_every_rank_of_a_value_in_another_ranks_shard(half: Scatter, bad: float) -> None:
    """Rank 0 has it in the shard that rank 2 owns, so rank 1 neither has it nor receives it."""
    ranks, grain = 3, flat_grain(3000)
    inner = ErrorFeedback(half) if half in CONTRACTIONS else half
    guarded, plain = Lockstep(Guard(inner), grain, ranks), Lockstep(inner, grain, ranks)
    clean = tensors(ranks, grain.numel)
    guarded.step(clean)
    before = [[state.tensor("residual").clone()] if "residual" in state else [] for state in guarded.states]
    spoiled = [x.clone() for x in clean]
    spoiled[0][owned(half, grain, ranks)[2].start] = bad
    assert bool(plain.step(spoiled)[1].isfinite().all())
    results = guarded.reduce(spoiled)
    assert all(result.bad is not None and bool(result.bad) for result in results)
    assert all(bool(result.value.isnan().all()) for result in results)
    after = [[state.tensor("residual")] if "residual" in state else [] for state in guarded.states]
    assert all(torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
    assert all(bool(shard.isfinite().all()) for shard in guarded.step(clean))


def test_a_guard_tells_every_rank_of_a_mean_that_overflows_in_one_shard() -> None:
    grain, xs = flat_grain(4), [torch.tensor([1.0, 1.0, 1.0, 3e38])] * 2
    first, second = Lockstep(Guard(ScatterReduce(FP16())), grain, 2).step(xs)
    assert bool(first.isnan().all())
    assert bool(second.isnan().all())


# The second half --------------------------------------------------------------------------------------------------


def gathered(
    half: ShardGather, grain: Grain, ys: Sequence[Tensor], states: Sequence[State], index: int
) -> tuple[list[State], Tensor]:
    """Run the second half alone; return the new states, and the whole, which is the same on all ranks."""
    steps = [Step(index, rank, len(ys)) for rank in range(len(ys))]
    given = zip(ys, states, steps, strict=True)
    wholes = run_lockstep([half.gather(grain, y.clone(), state, step) for y, state, step in given])
    assert all(torch.equal(whole.tensor, wholes[0].tensor) for whole in wholes)
    return [whole.state for whole in wholes], wholes[0].tensor


@pytest.mark.parametrize("half", GATHERS, ids=repr)
def test_what_an_owner_did_not_send_it_owes(half: ShardGather) -> None:
    ranks, grain = 3, flat_grain(1001)
    cut = half.sharded(grain.numel, ranks, torch.float32).shards
    states = [half.init(grain, Step(0, rank, ranks)) for rank in range(ranks)]
    given = got = torch.zeros(grain.numel, dtype=torch.float64)
    for index in range(10):
        (x,) = tensors(1, grain.numel, seed=index)
        states, whole = gathered(half, grain, [x[cut.of(rank)] for rank in range(ranks)], states, index)
        given, got = given + x.double(), got + whole.double()
    owed = torch.cat([states[rank].tensor("owner")[: cut.size_of(rank)] for rank in range(ranks)])
    assert float(owed.abs().max()) > 0.01
    torch.testing.assert_close(got + owed.double(), given, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
def test_a_two_shot_is_its_halves_one_after_the_other(exchange: TwoShot | SparseTwoShot) -> None:
    ranks, grain = 3, flat_grain(1001)
    whole = Lockstep(exchange, grain, ranks)
    states = [exchange.gather.init(grain, Step(0, rank, ranks)) for rank in range(ranks)]
    first = Lockstep(exchange.scatter, grain, ranks)
    for index in range(4):
        xs = tensors(ranks, grain.numel, seed=index)
        states, mean = gathered(exchange.gather, grain, first.step(xs), states, index)
        assert torch.equal(whole.step(xs)[0], mean)
    for found, want in zip(states, whole.states, strict=True):
        assert found.keys() == want.keys()
        assert all(torch.equal(found.tensor(name), want.tensor(name)) for name in want)


def test_one_rank_runs_a_half_through_the_interpreter_alone() -> None:
    x, grain, step = torch.tensor([1.0, 2.0, 3.0]), flat_grain(3), Step(0, 0, 1)
    result = run_program(ScatterReduce(Identity()).reduce(grain, x, State(), step), VirtualTransport(Meeting(1), 0))
    assert torch.equal(result.value, x)


# Refusals ---------------------------------------------------------------------------------------------------------


def test_what_needs_the_whole_mean_refuses_a_shard_of_it() -> None:
    half, model = scatter_reduce(TopK(0.1)), specs_of(torch.nn.Linear(3, 3))
    stages = ((3, ScatterReduce(FP16())), (0, ScatterReduce(FP16())))
    for needs in (
        lambda: plan(model, ErrorFeedback(half)),
        lambda: Hierarchical(half, 2),
        lambda: EF21(half),
        lambda: WorkerMomentum(half),
        lambda: CompressionWarmUp(half, half, 1),
        lambda: Scheduled(stages),
    ):
        with pytest.raises(CompositionError, match=r"its own shard of the mean, .* needs all of it"):
            needs()


def test_payloads_that_cannot_be_cut_are_refused() -> None:
    for half in (ScatterReduce, Gather):
        with pytest.raises(CompositionError, match="cannot be cut into shards"):
            half(TopK(0.1))
