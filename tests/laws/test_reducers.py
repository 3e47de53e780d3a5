"""Laws of reducers, on virtual ranks: one mean, nothing lost, nothing bad kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, flat_grain
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import AllGatherExchange, AllReduceExchange, Reducer, TwoShot
from gradwire.reducers.aggregate import Sharded

from . import checks
from .subjects import (
    DTYPES,
    HUGE,
    KINDS,
    codecs,
    codecs_of,
    dtypes,
    grain_for,
    guarded,
    kinds,
    parts,
    ranks_for,
    reducers,
    sample,
    seeds,
)

REDUCERS = reducers()
each_reducer = pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS.keys())
numels = st.sampled_from([0, 1, 2, 7, 257, 1000])


def serving(reducer: Reducer, numel: int, dtype: torch.dtype) -> tuple[Reducer, Grain]:
    grain = grain_for(reducer, numel, dtype)
    return checks.Spied(reducer), grain


def inputs(grain: Grain, ranks: int, kind: str, seed: int) -> list[Tensor]:
    return [sample(kind, grain.shape, grain.dtype, seed + rank) for rank in range(ranks)]


@each_reducer
@given(
    numel=numels,
    dtype=dtypes,
    ranks=st.integers(1, 5),
    kind=kinds,
    seed=seeds.map(lambda s: s // 2),
)
def test_one_mean_and_nothing_lost(
    reducer: Reducer, numel: int, dtype: torch.dtype, ranks: int, kind: str, seed: int
) -> None:
    spied, grain = serving(reducer, numel, dtype)
    ranks = ranks_for(reducer, ranks)
    lockstep = Lockstep(spied, grain, ranks, seed=seed)
    for step in range(2):
        xs = inputs(grain, ranks, kind, seed + 10 * step)
        results = checks.check_conservation(lockstep, xs) if reducer.conserves_sum else lockstep.reduce(xs)
        checks.check_means(results, xs)


@each_reducer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_huge_grain(reducer: Reducer, dtype: torch.dtype) -> None:
    spied, grain = serving(reducer, HUGE, dtype)
    ranks = ranks_for(reducer, 3)
    lockstep = Lockstep(spied, grain, ranks)
    xs = inputs(grain, ranks, "heavy", 1)
    results = checks.check_conservation(lockstep, xs) if reducer.conserves_sum else lockstep.reduce(xs)
    checks.check_means(results, xs)


EXCHANGES = list(
    dict.fromkeys(
        part
        for reducer in REDUCERS.values()
        for part in parts(reducer)
        if isinstance(part, Reducer) and not part.keeps_input
    )
)
each_exchange = pytest.mark.parametrize("reducer", EXCHANGES, ids=repr)


@each_exchange
@given(numel=numels, dtype=dtypes, kind=kinds, seed=seeds)
def test_what_is_not_consumed_is_left_alone(
    reducer: Reducer, numel: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    grain = grain_for(reducer, numel, dtype)
    xs = inputs(grain, ranks_for(reducer, 3), kind, seed)
    checks.check_leaves_input(reducer, grain, xs)
    if reducer.conserves_sum:
        checks.check_conservation(Lockstep(checks.Spied(reducer), grain, len(xs)), xs)


@pytest.mark.parametrize("reducer", [r for r in EXCHANGES if r.lossless and r.averages], ids=repr)
@given(dtype=dtypes, ranks=st.integers(1, 5), kind=kinds)
def test_lossless_means_are_the_mean(reducer: Reducer, dtype: torch.dtype, ranks: int, kind: str) -> None:
    grain = flat_grain(257, dtype=dtype)
    xs = inputs(grain, ranks, kind, 0)
    want = sum(x.double() for x in xs) / ranks
    sizes = sum(x.double().abs() for x in xs) / ranks
    for mean in Lockstep(reducer, grain, ranks).step(xs):
        # a division and n - 1 sums, each rounded once
        slack = ranks * checks.unit_roundoff(dtype) * sizes + ranks * torch.finfo(dtype).tiny
        assert bool(((mean.double() - want).abs() <= slack).all())


CONTRACTING = [
    r
    for r in EXCHANGES
    if r.scope == "flat"
    and r.contraction(flat_grain(100))
    and not r.keyed
    and not any(codec.keyed for codec in codecs_of(r))
    and r.rank_multiple == 1  # of nodes it holds for the sum over their ranks: test_what_a_node_owes_contracts
]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("numel", [1, 10, 257, 5000])
@pytest.mark.parametrize("reducer", CONTRACTING, ids=repr)
def test_exchanges_contract_as_declared(reducer: Reducer, numel: int, kind: str) -> None:
    """What is sent is as near to x as declared, however the exchange cuts it: error feedback rests on it."""
    grain = flat_grain(numel)
    ranks = ranks_for(reducer, 3)
    xs = inputs(grain, ranks, kind, 5)
    delta = reducer.contraction(grain)
    assert delta is not None
    for x, result in zip(xs, Lockstep(reducer, grain, ranks).reduce(xs), strict=True):
        left = x.clone()
        result.sent.subtract_from(left)
        # x / n is rounded before it is encoded, and the decoded value once or twice after
        assert checks.norm(left) <= (1 - delta) ** 0.5 * checks.norm(x) * (1 + 2.0**-12) + 2.0**-21 * checks.norm(x)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("reducer", [r for r in EXCHANGES if r.keyed], ids=repr)
def test_keyed_exchanges_contract_in_the_mean_over_keys(reducer: Reducer, kind: str) -> None:
    """As declared, for ranks that agree: drawn anew each step, so the mean over steps is one over keys."""
    grain, draws = grain_for(reducer, 300), 200
    delta = reducer.contraction(grain)
    x = inputs(grain, 1, kind, 5)[0]
    if delta is None or not checks.norm(x):
        return
    lockstep, ratios = Lockstep(reducer, grain, 2), list[float]()
    for _ in range(draws):
        left = x.clone()
        lockstep.reduce([x, x])[0].sent.subtract_from(left)
        ratios.append((checks.norm(left) / checks.norm(x)) ** 2)
    # Bernstein's inequality, as for codecs
    chance = checks.Z * (delta * (1 - delta) / draws) ** 0.5 + checks.Z**2 / (3 * draws)
    assert sum(ratios) / draws <= 1 - delta + chance + 8 * checks.unit_roundoff()


@pytest.mark.parametrize(("bad", "where"), [(math.nan, "zeros"), (math.inf, "start"), (-math.inf, "end")])
@each_reducer
def test_non_finite_gradients(reducer: Reducer, bad: float, where: str) -> None:
    grain = grain_for(reducer, 1000)
    ranks = ranks_for(reducer, 3)
    clean = inputs(grain, ranks, "normal", 1)
    spoiled = [x.clone() for x in clean]
    if where == "zeros":
        spoiled[1].zero_()
    spoiled[1].view(-1)[0 if where == "start" else -1] = bad
    lockstep = Lockstep(reducer, grain, ranks)
    if any(isinstance(part, Sharded) for part in parts(reducer)):
        checks.check_left_out(lockstep, clean, spoiled)
        return
    checks.check_non_finite(lockstep, clean, spoiled, all_nan=guarded(reducer))


@each_reducer
def test_overflow_in_half_precision_is_seen(reducer: Reducer) -> None:
    """A finite gradient whose mean does not fit either comes out finite or is seen, and never stays in a residual."""
    grain = grain_for(reducer, 500, torch.float16)
    ranks = ranks_for(reducer, 2)
    clean, large = inputs(grain, ranks, "normal", 1), [torch.full(grain.shape, 6e4, dtype=torch.float16)] * ranks
    lockstep = Lockstep(reducer, grain, ranks)
    for xs in (clean, large, large, large):
        lockstep.step(xs)
    for state in checks.snapshot(lockstep.states):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


class KeepsKeys(Codec):
    """A codec that notes every key it is given to encode with."""

    def __init__(self, inner: Codec) -> None:
        self.inner, self.used = inner, list[Key]()

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    def layout(self, numel: int, dtype: torch.dtype = torch.float32):
        return self.inner.layout(numel, dtype)

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        self.used.append(key)
        self.inner.encode_into(x, key, out)

    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        self.inner.decode_into(payload, out, key)


@pytest.mark.parametrize("codec", [c for c in codecs() if c.keyed and not c.additive], ids=repr)
def test_every_rounding_has_a_key_of_its_own(codec: Codec) -> None:
    """Reusing the key of the first shot in the second would correlate their errors."""
    for exchange in (TwoShot, AllGatherExchange):
        if exchange is TwoShot and not codec.granularity:
            continue
        keeper = KeepsKeys(codec)
        lockstep = Lockstep(exchange(keeper), flat_grain(5000), 3)
        for step in range(2):
            lockstep.step(inputs(lockstep.grain, 3, "normal", step))
        assert len({key.stream_seed for key in keeper.used}) == len(keeper.used)


UNBIASED = {
    spec: r
    for spec, r in REDUCERS.items()
    if r.averages and not r.keeps_input and codecs_of(r) and all(c.unbiased for c in codecs_of(r))
}


@pytest.mark.parametrize("reducer", UNBIASED.values(), ids=UNBIASED.keys())
@pytest.mark.draw(5)
def test_means_of_unbiased_codecs_are_unbiased(reducer: Reducer) -> None:
    grain, steps = flat_grain(600), 300
    xs = inputs(grain, 3, "heavy", 2)
    want = torch.stack(xs).double().mean(0)
    lockstep = Lockstep(reducer, grain, 3)
    errors = torch.stack([lockstep.step(xs)[0].double() - want for _ in range(steps)])
    seen = errors @ torch.stack([want, torch.ones_like(want)]).T
    rounding = (
        8
        * checks.unit_roundoff()
        * (want.abs() + errors.abs().mean(0))
        @ torch.stack([want.abs(), torch.ones_like(want)]).T
    )
    assert bool((seen.mean(0).abs() <= checks.Z * seen.std(0) / steps**0.5 + rounding).all())


FED = {spec: r for spec, r in REDUCERS.items() if r.keeps_input}


@pytest.mark.parametrize("reducer", FED.values(), ids=FED.keys())
@pytest.mark.draw(3)
def test_residuals_stay_bounded(reducer: Reducer) -> None:
    """Over 500 steps of noise around a constant gradient, what is owed levels off.

    The constant part is of one magnitude: where entries differ, a sign with one scale for all of them levels off only
    once the small ones owe as much as the largest, after thousands of steps.

    An absolute bound holds by itself. With ||e'|| <= q (||e|| + G), q = sqrt(1 - delta), it can never exceed
    G q / (1 - q). Worker momentum, which owes what it averages, declares neither. And it must not drift: a residual
    that grows with t would be 4 times larger in the last fifth than in the second, one that grows as a random walk
    twice.
    """
    grain, ranks = grain_for(reducer, 2000), ranks_for(reducer, 2)
    lockstep = Lockstep(reducer, grain, ranks)
    drift = sample("normal", grain.shape, seed=0).sign()
    sizes: list[float] = []
    largest = 0.0
    for step in range(500):
        xs = [drift + x for x in inputs(grain, ranks, "normal", 2 * step + 1)]
        lockstep.step(xs)
        largest = max(largest, *(checks.norm(x) for x in xs))
        if step % 5:
            continue
        owed = checks.owed(lockstep.states, grain)
        sizes.append(max(checks.norm(e) for e in owed.e) + checks.norm(owed.s))
    delta, absolute = reducer.contraction(grain), reducer.absolute_error(grain)
    if absolute is not None:
        assert max(sizes) <= absolute * grain.numel**0.5
    elif delta is not None:
        q = (1 - delta) ** 0.5
        assert max(sizes) <= 2 * 2 * largest * q / (1 - q)
    second, last = sum(sizes[20:40]), sum(sizes[80:])
    assert last <= 1.4 * second, (second, last)


@each_reducer
def test_a_default_dtype_changes_nothing(reducer: Reducer) -> None:
    grain, ranks = grain_for(reducer, 300), ranks_for(reducer, 2)
    xs = inputs(grain, ranks, "normal", 1)
    wanted = Lockstep(reducer, grain, ranks).step(xs)[0]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = Lockstep(reducer, grain, ranks).step(xs)[0]
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == wanted.dtype
    assert not reducer.repeatable or torch.equal(found, wanted)


@each_reducer
def test_too_few_ranks_are_refused(reducer: Reducer) -> None:
    """At the latest when its state is made, which is before any message."""
    if reducer.fewest_ranks > 1:
        with pytest.raises(CompositionError, match=f"at least {reducer.fewest_ranks} ranks, and this run has"):
            Lockstep(reducer, grain_for(reducer, 10), reducer.fewest_ranks - 1)


def test_an_exchange_says_what_it_conserves() -> None:
    for codec in codecs():
        if codec.granularity:
            assert TwoShot(codec).conserves_sum == (codec.lossless or codec.contraction(1) is not None)
        if codec.additive:
            assert AllReduceExchange(codec).conserves_sum
