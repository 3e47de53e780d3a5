"""Laws of some quantisers only: a bounded variance, a majority, exact sums; and mutants that break them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs import FP8, QSGD, Codec, Natural, OneBit, Scaled, Sign, StochasticBF16, TernGrad
from gradwire.core.errors import CompositionError
from gradwire.core.grain import flat_grain
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import MajorityVote, ScaledFP16, TernarySum, TwoShot

from . import checks
from .subjects import KINDS, codecs, kinds, sample, seeds

X = sample("normal", (257,), seed=4)


# A bounded variance ---------------------------------------------------------------------------------------------


def check_variance(codec: Codec, x: Tensor, draws: int = 300) -> None:
    """E||C(x) - x||^2 <= omega ||x||^2, to `Z` standard errors."""
    omega = codec.omega()
    assert omega is not None
    if checks.norm(x) == 0:
        assert checks.norm(checks.decoded(codec, x)) == 0
        return
    errors = [checks.decoded(codec, x, Key(seed=s)).double() - x.double() for s in range(draws)]
    ratios = torch.tensor([checks.norm(error) ** 2 for error in errors]) / checks.norm(x) ** 2
    slack = checks.Z * float(ratios.std()) / draws**0.5 + 8 * checks.unit_roundoff()
    assert float(ratios.mean()) <= omega + slack, f"variance {float(ratios.mean())} beyond {omega}"


BOUNDED = [codec for codec in codecs() if codec.omega() is not None]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("codec", BOUNDED, ids=repr)
def test_variance_is_bounded_as_declared(codec: Codec, kind: str) -> None:
    check_variance(codec, sample(kind, (257,)))


def test_only_unbiased_codecs_declare_a_variance() -> None:
    assert all(codec.unbiased for codec in BOUNDED)
    assert {type(codec) for codec in BOUNDED} >= {QSGD, Natural, TernGrad, StochasticBF16}


def worst_for_ternary(block: int) -> Tensor:
    x = torch.full((block,), 1 / (1 + block**0.5))
    x[3] = 1.0
    return x


TIGHT: list[tuple[Codec, Tensor]] = [
    (Natural(), torch.full((2000,), 4 / 3)),
    (StochasticBF16(), torch.full((2000,), 1 + 2.0**-8)),
    (TernGrad(0, 400), worst_for_ternary(400)),
]


@pytest.mark.parametrize(("codec", "worst"), TIGHT, ids=repr)
def test_no_smaller_variance_could_be_declared(codec: Codec, worst: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    check_variance(codec, worst)
    bound = codec.omega()
    assert bound is not None

    def boast(codec: Codec) -> float:
        return 0.85 * bound

    monkeypatch.setattr(type(codec), "omega", boast)
    with pytest.raises(AssertionError, match="variance"):
        check_variance(codec, worst)


def test_nothing_can_be_scaled_by_a_variance_that_is_not_known() -> None:
    for codec in (TernGrad(), OneBit(), FP8()):
        with pytest.raises(CompositionError, match="nothing to scale by"):
            Scaled(codec)


# A majority -----------------------------------------------------------------------------------------------------


def check_majority(ranks: Lockstep, xs: Sequence[Tensor]) -> Tensor:
    """Each element has the sign of most ranks, that of rank (step mod n) at a tie, and the size of the median scale."""
    assert isinstance(ranks.reducer, MajorityVote)
    n, casting, block = len(xs), ranks.index % len(xs), ranks.reducer.block
    results = ranks.reduce(xs)
    checks.check_means(results, xs)
    up = torch.stack([x >= 0 for x in xs]).int()
    won = 2 * up.sum(0) + up[casting] > n
    assert torch.equal(results[0].value >= 0, won | (results[0].value == 0)), "not the majority"
    sizes = torch.stack([torch.stack([part.double().abs().mean() for part in x.split(block)]) for x in xs])
    sizes = sizes.quantile(0.5, 0)
    want = sizes.repeat_interleave(block)[: won.numel()]
    u = checks.unit_roundoff(results[0].value.dtype)
    assert bool(((results[0].value.double().abs() - want).abs() <= (n + 4) * u * want).all())
    return results[0].value


def test_no_rank_sways_the_size_of_a_vote() -> None:
    xs = [torch.full((8,), size) for size in (1.0, 2.0, 3.0, 1e6, 1e6)]
    assert Lockstep(MajorityVote(8), flat_grain(8), 5).step(xs)[0].tolist() == [3.0] * 8


@given(numel=st.sampled_from([1, 7, 257, 1000]), ranks=st.integers(1, 6), kind=kinds, seed=seeds.map(lambda s: s // 2))
def test_most_ranks_decide(numel: int, ranks: int, kind: str, seed: int) -> None:
    lockstep = Lockstep(MajorityVote(64), flat_grain(numel), ranks)
    for step in range(3):
        check_majority(lockstep, [sample(kind, (numel,), seed=seed + ranks * step + rank) for rank in range(ranks)])


def test_no_rank_outvotes_the_others() -> None:
    xs = [torch.full((100,), -1e6), torch.ones(100), torch.ones(100)]
    assert bool((Lockstep(MajorityVote(), flat_grain(100), 3).step(xs)[0] > 0).all())


def test_ties_favour_no_sign_and_no_rank() -> None:
    lockstep, up = Lockstep(MajorityVote(), flat_grain(8), 2), torch.ones(8)
    means = [check_majority(lockstep, [up, -up]) for _ in range(6)]
    assert torch.equal(torch.stack(means).sum(0), torch.zeros(8))


# Sums of ternary digits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 100, 1000])
def test_ternary_sums_are_the_mean_of_what_was_sent(numel: int, ranks: int) -> None:
    """Scales are shared and whole numbers add up exactly, so the only error is that of the first rounding."""
    grain = flat_grain(numel)
    xs = [sample("heavy", (numel,), seed=rank) for rank in range(ranks)]
    results = Lockstep(TernarySum(2.5, 40), grain, ranks).reduce(xs)
    sent: list[Tensor] = []
    for x, result in zip(xs, results, strict=True):
        left = x.clone()
        result.sent.subtract_from(left)
        sent.append(x.double() - left.double())
    mean = results[0].value.double()
    sizes = torch.stack(xs).double().abs().sum(0) + torch.stack(sent).abs().sum(0)
    assert bool(((mean - sum(sent) / ranks).abs() <= 4 * checks.unit_roundoff() * sizes).all())
    steps = results[0].value.view(-1)[mean != 0].split(40)
    assert all(bool(torch.isfinite(step).all()) for step in steps)


def test_ternary_sums_are_unbiased_without_clipping() -> None:
    grain, draws = flat_grain(600), 300
    xs = [sample("heavy", (600,), seed=rank) for rank in range(3)]
    want = torch.stack(xs).double().mean(0)
    lockstep = Lockstep(TernarySum(0, 40), grain, 3)
    errors = torch.stack([lockstep.step(xs)[0].double() - want for _ in range(draws)])
    seen = errors @ torch.stack([want, torch.ones_like(want)]).T
    rounding = 8 * checks.unit_roundoff() * float(want.abs().sum() * want.abs().max().clamp(min=1))
    assert bool((seen.mean(0).abs() <= checks.Z * seen.std(0) / draws**0.5 + rounding).all())


def test_ternary_sums_are_nearer_than_two_roundings() -> None:
    xs = [sample("normal", (6560,), seed=rank) for rank in range(4)]
    want = torch.stack(xs).mean(0)
    once, twice = (
        sum(checks.norm(ranks.step(xs)[0] - want) ** 2 for _ in range(10))
        for ranks in (Lockstep(r, flat_grain(6560), 4) for r in (TernarySum(), TwoShot(TernGrad())))
    )
    assert once < 0.6 * twice


# Halves in the range that is needed -----------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-140, -126, -60, 0, 60, 120])
def test_scaled_halves_keep_eleven_bits_wherever_the_gradient_is(exponent: int) -> None:
    xs = [sample("normal", (300,), seed=rank).double() * 2.0**exponent for rank in range(3)]
    grain = flat_grain(300, dtype=torch.float64)
    mean = Lockstep(ScaledFP16(), grain, 3).step(xs)[0]
    sizes = torch.stack(xs).abs().sum(0) / 3
    least = 2.0**-149 + max(float(x.abs().max()) for x in xs) * 2.0**-38
    assert bool(((mean - sum(xs) / 3).abs() <= 6 * 2.0**-11 * sizes + 3 * least).all())


# Mutants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlwaysUp(Natural):
    """Rounds with one key, so that the mean over keys is not x."""

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        super().encode_into(x, Key(seed=5), out)


@dataclass(frozen=True)
class DeniesClipping(TernGrad):
    @property
    def unbiased(self) -> bool:
        return True


@dataclass(frozen=True)
class Saturates(FP8):
    """The scale of the microscaling formats: the largest elements do not fit."""

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        super().encode_into(x.clamp(-2.0, 2.0), key, out)


@dataclass(frozen=True)
class SwapsMeans(OneBit):
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        super().decode_into((payload[0].view(-1, 2).flip(1).reshape(-1), payload[1]), out, key)


@dataclass(frozen=True)
class ForgetsToScale(Scaled):
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        self.codec.decode_into(payload, out, key)


SPIKE = sample("heavy", (257,), seed=2)
BROKEN: list[tuple[Codec, Callable[[Codec], None]]] = [
    (AlwaysUp(), lambda c: checks.check_unbiased(c, X)),
    (DeniesClipping(1.0, 40), lambda c: checks.check_unbiased(c, SPIKE)),
    (Saturates(), lambda c: checks.check_contraction(c, SPIKE)),
    (SwapsMeans(64), lambda c: checks.check_contraction(c, X)),
    (ForgetsToScale(QSGD(1, 64)), lambda c: checks.check_contraction(c, X[:61])),
]


@pytest.mark.parametrize(("codec", "law"), BROKEN, ids=lambda value: repr(value) if isinstance(value, Codec) else "")
def test_a_broken_quantiser_fails_its_law(codec: Codec, law: Callable[[Codec], None]) -> None:
    if not isinstance(codec, DeniesClipping):  # whose parent never claimed the law
        law(type(codec).__mro__[1](**codec.config()))
    with pytest.raises(AssertionError):
        law(codec)


def test_votes_by_weight_are_no_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a two-shot of scaled signs does: the largest gradient wins."""
    weighed = TwoShot(Sign(64))
    xs = [torch.full((100,), -1e6), torch.ones(100), torch.ones(100)]
    lockstep = Lockstep(MajorityVote(64), flat_grain(100), 3)
    check_majority(lockstep, xs)
    monkeypatch.setattr(lockstep, "reduce", Lockstep(weighed, flat_grain(100), 3).reduce)
    with pytest.raises(AssertionError, match="majority"):
        check_majority(lockstep, xs)
