"""Laws of aggregation rules, which are no means: agreement, no favourites, and bad gradients kept within reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwire
from gradwire.codecs import BlockInt, Identity, TopK
from gradwire.core.errors import CompositionError
from gradwire.core.grain import flat_grain, matrix_grain
from gradwire.core.state import walk
from gradwire.drivers.lockstep import Lockstep
from gradwire.drivers.virtual import VirtualRanks
from gradwire.reducers import (
    EF21,
    AllGatherExchange,
    AllReduceExchange,
    CompressionWarmUp,
    ErrorFeedback,
    FactoredErrorFeedback,
    Guard,
    LeanErrorFeedback,
    MomentumCorrection,
    Partition,
    Reducer,
    Scheduled,
    TwoShot,
)
from gradwire.reducers.aggregate import (
    Adasum,
    Bulyan,
    CenteredClipping,
    Gathered,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    PrivateMean,
    Rule,
    Sharded,
    TrimmedMean,
    Weighted,
    Weights,
    epsilon,
)
from gradwire.reducers.aggregate.private import system_normal

from . import checks
from .subjects import DTYPES, normal, parts, reducers

NUMEL = 300


def rules() -> list[Rule]:
    """Every rule that a registered example uses."""
    found = (part for reducer in reducers().values() for part in every_part(reducer))
    return list(dict.fromkeys(part for part in found if isinstance(part, Rule)))


def every_part(reducer: Reducer) -> Sequence[object]:
    return [rule for part in parts(reducer) for rule in (part, getattr(part, "rule", None))]


RULES = [*rules(), TrimmedMean(2), Krum(2), MultiKrum(2, keep=2), Bulyan(2), Krum(0), GeometricMedian(3)]
each_rule = pytest.mark.parametrize("rule", list(dict.fromkeys(RULES)), ids=repr)
LIMITED = [rule for rule in dict.fromkeys(RULES) if rule.reach(11) is not None]


def ranks_of(rule: Rule) -> int:
    """A world with some room, of which an odd part is bad."""
    return max(rule.fewest_ranks, 5) + 2


def result(rule: Rule, xs: Sequence[Tensor]) -> Tensor:
    return Lockstep(Sharded(rule), flat_grain(xs[0].numel(), dtype=xs[0].dtype), len(xs)).step(xs)[0]


def around(n: int, seed: int = 0, spread: float = 0.1) -> list[Tensor]:
    """Gradients that agree on the whole."""
    return [normal((NUMEL,), seed) + spread * normal((NUMEL,), seed + 1 + i) for i in range(n)]


@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_all_agree_on_is_the_result(rule: Rule, dtype: torch.dtype) -> None:
    x = normal((NUMEL,), 3).to(dtype)
    if rule.remembers:  # which needs steps to get there: see its own test
        return
    seen = result(rule, [x] * ranks_of(rule))
    # weights that add up to one, a sum of as many, and a division
    slack = 2 * (ranks_of(rule) + 2) * checks.unit_roundoff(dtype) * x.double().abs()
    assert bool(((seen.double() - x.double()).abs() <= slack).all())


@each_rule
@given(order=st.randoms(use_true_random=False), seed=st.integers(0, 999))
def test_no_rank_is_favoured(rule: Rule, order: object, seed: int) -> None:
    xs = around(ranks_of(rule), seed, spread=1.0)
    mixed = xs[:]
    order.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = result(rule, xs), result(rule, mixed)
    sizes = sum(x.double().abs() for x in xs)
    # distances are summed in another order, and weights depend on them smoothly or not at all
    assert bool(((one.double() - other.double()).abs() <= 64 * len(xs) * checks.unit_roundoff() * sizes).all())


ATTACKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "negated": lambda good, i: -10 * good,
    "huge": lambda good, i: 1e6 * normal((NUMEL,), 90 + i),
    "alike": lambda good, i: good + 3.0,
    "zero": lambda good, i: torch.zeros_like(good),
    "one entry": lambda good, i: good.index_fill(0, torch.tensor([7]), 1e4),
    "far out": lambda good, i: torch.full_like(good, 1e30),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("rule", LIMITED, ids=repr)
def test_bad_gradients_move_the_result_within_reach(rule: Rule, attack: Callable[[Tensor, int], Tensor]) -> None:
    n = ranks_of(rule)
    bad = rule.tolerates(n)
    good = around(n - bad, seed=5)
    center = torch.stack(good).double().mean(0)
    spoiled = [attack(good[0], i) for i in range(bad)]
    diameter = max((checks.norm(a.double() - b.double()) for a, b in itertools.combinations(good, 2)), default=0.0)
    reach = rule.reach(n)
    assert reach is not None
    seen = result(rule, [*spoiled, *good])
    assert checks.norm(seen.double() - center) <= reach * diameter * (1 + 1e-5)


def test_the_mean_has_no_such_reach() -> None:
    good = around(6, seed=5)
    center = torch.stack(good).double().mean(0)
    seen = Lockstep(AllReduceExchange(Identity()), flat_grain(NUMEL), 7).step([-1e6 * good[0], *good])[0]
    assert checks.norm(seen - center) > 1e5


@each_rule
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_without_a_guard_what_is_not_finite_counts_as_bad(rule: Rule, value: float) -> None:
    n = ranks_of(rule)
    if not rule.tolerates(n):
        return
    xs = around(n, seed=8)
    xs[1] = xs[1].index_fill(0, torch.tensor([0, 50]), value)
    seen = result(rule, xs)
    assert bool(seen.isfinite().all())
    assert checks.norm(seen - xs[0]) <= 2 * n * checks.norm(xs[0])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 20), nn.Linear(20, 20), nn.Linear(20, 3))


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    return {name: normal(p.shape, seed + i) for i, (name, p) in enumerate(model.named_parameters())}


@pytest.mark.parametrize("spec", ["krum:1", "multikrum:1", "bulyan:1", "rfa", "clip:0.5", "dp:0.5,noise=0", "median"])
def test_a_rule_sees_the_whole_model_however_it_is_cut(spec: str) -> None:
    """Gradients that are random at each layer: the choice of one grain would be another than that of the model."""
    n, means = 7, list[Tensor]()
    for grain_numel in (50, 10_000):
        model = small_model()
        ranks = VirtualRanks(gradwire.parse(spec), model, n, grain_numel=grain_numel)
        assert (len(ranks.plan.units) > 5) == (grain_numel == 50)
        for step in range(2):
            ranks.step(
                [
                    {
                        name: normal(p.shape, 100 * step + 10 * r + i)
                        for i, (name, p) in enumerate(model.named_parameters())
                    }
                    for r in range(n)
                ]
            )
        means.append(torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(means[0], means[1], rtol=1e-5, atol=1e-6)


# Each rule against its definition ------------------------------------------------------------------------------


def krum_scores(xs: Sequence[Tensor], bad: int) -> list[float]:
    X = torch.stack(list(xs)).double()
    return [sum(sorted(float((X[j] - x).square().sum()) for j in range(len(X)) if j != i)[: len(X) - bad - 2])
            for i, x in enumerate(X)]  # fmt: skip


def krum_order(xs: Sequence[Tensor], bad: int) -> list[int]:
    scores = krum_scores(xs, bad)
    return sorted(range(len(xs)), key=lambda i: (scores[i], i))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_krum_is_its_definition(bad: int) -> None:
    xs = around(9, seed=bad, spread=1.0)
    order = krum_order(xs, bad)
    assert torch.equal(result(Krum(bad), xs), xs[order[0]])
    for keep in (1, 3, 9 - bad - 2):
        want = torch.stack([xs[i] for i in order[:keep]]).double().mean(0)
        torch.testing.assert_close(result(MultiKrum(bad, keep), xs).double(), want, rtol=1e-6, atol=1e-6)


def bulyan(xs: Sequence[Tensor], bad: int) -> Tensor:
    left, chosen = list(xs), list[Tensor]()
    while len(chosen) < len(xs) - 2 * bad:
        X = torch.stack(left).double()
        D = (X[:, None] - X[None]).square().sum(-1).fill_diagonal_(math.inf)
        scores = D.sort(dim=1).values[:, : max(1, len(left) - bad - 2)].sum(1)
        from_all = D.where(D.isfinite(), 0.0).sum(1)
        chosen.append(left.pop(min(range(len(left)), key=lambda i: (float(scores[i]), float(from_all[i])))))
    v = torch.stack(chosen).double()
    middle = v.sort(0).values[(len(v) - 1) // 2 : len(v) // 2 + 1].mean(0)
    nearest = (v - middle).abs().argsort(0)[: len(v) - 2 * bad]
    return v.gather(0, nearest).mean(0)


@pytest.mark.parametrize(("bad", "n"), [(1, 7), (1, 9), (2, 11)])
def test_bulyan_is_its_definition(bad: int, n: int) -> None:
    xs = around(n, seed=n, spread=1.0)
    torch.testing.assert_close(result(Bulyan(bad), xs).double(), bulyan(xs, bad), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("iterations", [1, 3, 8, 100])
def test_the_geometric_median_is_weiszfelds(iterations: int) -> None:
    xs = [*around(6, seed=1, spread=1.0), 50 * normal((NUMEL,), 77)]
    X = torch.stack(xs).double()
    medoid = X[int(torch.cdist(X, X).sum(1).argmin())]
    v = X[(X - medoid).norm(dim=1).argsort()[:4]].mean(0)
    for _ in range(iterations):
        b = 1 / (X - v).norm(dim=1).clamp(min=1e-6)
        v = (b[:, None] * X).sum(0) / b.sum()
    seen = result(GeometricMedian(iterations), xs).double()
    torch.testing.assert_close(seen, v, rtol=1e-5, atol=1e-5)
    pull = (X - seen) / (X - seen).norm(dim=1, keepdim=True)
    left = checks.norm(pull.sum(0)) / len(xs)
    assert iterations < 8 or left < 1e-2, "no minimum: the unit vectors to all points must cancel"


def test_centred_clipping_is_its_definition_step_after_step() -> None:
    rule, n = CenteredClipping(radius=2.0, iterations=2), 5
    ranks, v = Lockstep(Sharded(rule), flat_grain(NUMEL), n), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(4):
        xs = around(n, seed=40 + step, spread=0.3)
        before = v
        for _ in range(2):
            away = torch.stack(xs).double() - v
            v = v + (away * (2.0 / away.norm(dim=1, keepdim=True)).clamp(max=1.0)).mean(0)
        seen = ranks.step(xs)[0].double()
        torch.testing.assert_close(seen, v, rtol=1e-5, atol=1e-5)
        assert checks.norm(seen - before) <= 2 * 2.0 * (1 + 1e-5)


def test_centred_clipping_arrives_at_what_all_agree_on() -> None:
    x = normal((NUMEL,), 3)
    ranks = Lockstep(Sharded(CenteredClipping(radius=2.0)), flat_grain(NUMEL), 3)
    steps = math.ceil(checks.norm(x) / 2.0) + 1
    seen = [ranks.step([x, x, x])[0] for _ in range(steps)][-1]
    torch.testing.assert_close(seen, x, rtol=1e-5, atol=1e-5)


def test_median_and_trimmed_mean_are_their_definitions() -> None:
    for n in (1, 2, 5, 8):
        xs = around(n, seed=n, spread=1.0)
        ordered = torch.stack(xs).double().sort(0).values
        middle = ordered[(n - 1) // 2 : n // 2 + 1].mean(0)
        torch.testing.assert_close(result(Median(), xs).double(), middle, rtol=1e-6, atol=1e-6)
        for bad in range((n + 1) // 2):
            want = ordered[bad : n - bad].mean(0)
            torch.testing.assert_close(result(TrimmedMean(bad), xs).double(), want, rtol=1e-5, atol=1e-6)


# Rules over codecs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Median(), Krum(1), GeometricMedian()], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rule_over_a_codec_is_the_rule_of_what_it_decodes(rule: Rule, dtype: torch.dtype) -> None:
    xs = [x.to(dtype) for x in around(7, seed=2, spread=1.0)]
    grain = flat_grain(NUMEL, dtype=dtype)
    seen = Lockstep(Gathered(rule, TopK(0.2)), grain, 7).reduce(xs)
    checks.check_means(seen, xs)
    codec = TopK(0.2)
    want = result(rule, [checks.decoded(codec, x) for x in xs])
    torch.testing.assert_close(seen[0].value, want, rtol=4 * checks.unit_roundoff(dtype), atol=1e-6)
    exact = Lockstep(Gathered(rule, Identity()), grain, 7).step(xs)[0]
    torch.testing.assert_close(exact, result(rule, xs), rtol=4 * checks.unit_roundoff(dtype), atol=1e-6)


@pytest.mark.parametrize("spec", ["krum:1+topk:0.05", "trimmed:1+int4", "median+sign", "rfa+topk:0.1+int8"])
def test_specs_of_rules_over_codecs(spec: str) -> None:
    reducer = gradwire.parse(f"{spec},ef=off")
    assert any(isinstance(part, Gathered) for part in parts(reducer))
    ranks = Lockstep(reducer, flat_grain(NUMEL), 5)
    for step in range(5):
        xs = around(5, seed=step, spread=0.1)
        checks.check_means(ranks.reduce(xs), xs)


EVERY_WRAPPER: dict[str, Callable[[Reducer], Reducer]] = {
    "alone": lambda inner: inner,
    "guard": Guard,
    "warm-up": lambda inner: CompressionWarmUp(AllReduceExchange(Identity()), inner, 3),
    "schedule": lambda inner: Scheduled(((3, AllReduceExchange(Identity())), (0, inner))),
    "policy": lambda inner: Partition((("*bias", AllReduceExchange(Identity())),), inner),
    "rule of a policy": lambda inner: Partition((("*bias", inner),), AllGatherExchange(TopK(0.1))),
}


@pytest.mark.parametrize("wrapped", EVERY_WRAPPER.values(), ids=EVERY_WRAPPER.keys())
@pytest.mark.parametrize("memory", [ErrorFeedback, LeanErrorFeedback, FactoredErrorFeedback, EF21, MomentumCorrection])
def test_memory_of_what_a_rule_drops_is_refused(
    memory: Callable[[Reducer], Reducer], wrapped: Callable[[Reducer], Reducer]
) -> None:
    """However deep the rule lies; around the same of a mean it is not refused."""
    memory(wrapped(Gathered(TrimmedMean(0), TopK(0.1))))
    for rule in (Median(), Krum(1), GeometricMedian()):
        with pytest.raises(CompositionError, match="does not add up"):
            memory(wrapped(Gathered(rule, TopK(0.1))))


@pytest.mark.parametrize("rule", [rule for rule in dict.fromkeys(RULES) if not rule.linear], ids=repr)
def test_estimates_under_a_rule_are_refused_whatever_travels(rule: Rule) -> None:
    with pytest.raises(CompositionError, match="ef=off"):
        EF21(Sharded(rule))


@pytest.mark.parametrize("rule", list(dict.fromkeys([*RULES, TrimmedMean(0)])), ids=repr)
def test_a_rule_is_linear_where_it_says_so(rule: Rule) -> None:
    """Results of two parts of some gradients against the result of their sum."""
    xs, ys = (around(ranks_of(rule), seed, spread=1.0) for seed in (1, 50))
    if rule.remembers:
        assert not rule.linear
        return
    apart = result(rule, xs).double() + result(rule, ys).double()
    whole = result(rule, [x + y for x, y in zip(xs, ys, strict=True)]).double()
    assert (checks.norm(apart - whole) <= 1e-6 * checks.norm(whole)) == rule.linear


def test_what_does_not_fit_together_is_refused() -> None:
    for spec, what in {
        "clip:1+int4": "keeps its last result",
        "krum:1+powersgd:2": "only codecs can follow",
        "median,exchange=twoshot": "messages of its own",
        "krum:-1": "0 or more",
        "multikrum:1,keep=-2": "1 or more",
        "rfa:0": "1 or more",
        "rfa,smoothing=0": "positive",
        "clip:0": "positive",
        "dp:-1": "positive",
        "dp:1,noise=-1": "0 or more",
        "median,weights=1/2": "no mean",
        "topk:0.1,weights=0/0": "all weights are zero",
        "none,weights=1/-2": "finite and 0 or more",
        "none,weights=1/x": "expected a number",
    }.items():
        with pytest.raises(ValueError, match=what):
            gradwire.parse(spec)


# Adasum --------------------------------------------------------------------------------------------------------


def adasum(xs: Sequence[Tensor]) -> Tensor:
    if len(xs) == 1:
        return xs[0]
    half = (len(xs) + 1) // 2
    a, b = adasum(xs[:half]), adasum(xs[half:])
    both = float((a * b).sum())
    share_a = 1 - both / (2 * float(a.square().sum())) if a.any() else 1.0
    share_b = 1 - both / (2 * float(b.square().sum())) if b.any() else 1.0
    return a * share_a + b * share_b


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_adasum_is_its_definition_layer_by_layer(n: int) -> None:
    grain = matrix_grain(7, 11, batch=3)
    xs = [normal(grain.shape, seed) for seed in range(n)]
    xs[0][1] = 0.0
    seen = Lockstep(Adasum(), grain, n).step(xs)[0]
    want = torch.stack([adasum([x[layer].double() for x in xs]) for layer in range(3)])
    torch.testing.assert_close(seen.double(), want, rtol=1e-5, atol=1e-5)


def pair_at(cosine: float, ratio: float) -> tuple[Tensor, Tensor]:
    """Two vectors at an angle, the second one `ratio` times as long as the first."""
    sine = (1 - cosine**2) ** 0.5
    return torch.tensor([[[1.0, 0.0, 0.0]]]), ratio * torch.tensor([[[cosine, sine, 0.0]]])


@pytest.mark.parametrize("ratio", [1.0, 0.7, 5.0])
@pytest.mark.parametrize("cosine", [-1.0, -0.99, -0.8, -0.5, -0.1, 0.0, 0.1, 0.5, 0.9, 1.0])
def test_adasum_of_two_is_as_long_as_its_text_says(cosine: float, ratio: float) -> None:
    a, b = pair_at(cosine, ratio)
    seen = Lockstep(Adasum(), matrix_grain(1, 3), 2).step([a, b])[0]
    square = (1 + ratio**2) * (1 - 3 * cosine**2 / 4) + ratio * cosine**3 / 2
    assert float(seen.square().sum()) == pytest.approx(square, abs=1e-5)
    assert square <= 1 + ratio**2
    length, mean, total = (float(x.norm()) for x in (seen, (a + b) / 2, a + b))
    assert mean - 1e-6 <= length
    if cosine >= 0:
        assert length <= total + 1e-6
    elif ratio == 1.0:
        assert length == pytest.approx((1 - cosine / 2) * total, abs=1e-5)
    if abs(cosine) == 1.0:
        torch.testing.assert_close(seen, (a + b) / 2)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("lean", [-1.0, -0.3, 0.0, 1.0])
def test_adasum_is_no_longer_than_gradients_at_right_angles_would_be(n: int, lean: float) -> None:
    """At obtuse angles as well: every second gradient leans against the others, or all lean the same way."""
    common = normal((1, 5, 8), 99)
    for seed in range(20):
        xs = [normal((1, 5, 8), 100 * seed + i) + lean * common * (-1) ** i for i in range(n)]
        seen = Lockstep(Adasum(), matrix_grain(5, 8), n).step(xs)[0]
        assert float(seen.square().sum()) <= sum(float(x.square().sum()) for x in xs) * (1 + 1e-6)


def test_adasum_of_parallel_gradients_is_their_mean_and_of_orthogonal_ones_their_sum() -> None:
    x = normal((1, 6, 6), 1)
    assert torch.equal(Lockstep(Adasum(), matrix_grain(6, 6), 4).step([x] * 4)[0], x)
    apart = [torch.zeros(1, 6, 6).index_fill(1, torch.tensor([i]), 1.0 + i) for i in range(4)]
    assert torch.equal(Lockstep(Adasum(), matrix_grain(6, 6), 4).step(apart)[0], sum(apart[1:], start=apart[0]))
    nothing = [torch.zeros(1, 6, 6)] * 4
    assert not bool(Lockstep(Adasum(), matrix_grain(6, 6), 4).step(nothing)[0].any())


# Privacy -------------------------------------------------------------------------------------------------------


def test_the_private_mean_clips_each_worker_to_the_whole_norm() -> None:
    xs = [0.01 * normal((NUMEL,), 1), 30 * normal((NUMEL,), 2), torch.zeros(NUMEL)]
    clipped = [x * min(1.0, 0.5 / max(checks.norm(x), 1e-30)) for x in xs]
    seen = Lockstep(PrivateMean(0.5, noise=0.0), flat_grain(NUMEL), 3).step(xs)[0]
    torch.testing.assert_close(seen, torch.stack(clipped).mean(0), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("n", [1, 4])
def test_the_private_mean_has_the_noise_it_says(n: int) -> None:
    grain, clip, noise = flat_grain(40_000), 2.0, 1.5
    zero = [torch.zeros(grain.shape)] * n
    seen = Lockstep(PrivateMean(clip, noise), grain, n).step(zero)[0].double()
    want = noise * clip / n
    deviations = checks.Z / (2 * grain.numel) ** 0.5
    assert abs(float(seen.std()) / want - 1) <= deviations
    assert abs(float(seen.mean())) <= checks.Z * want / grain.numel**0.5
    assert abs(float((seen / want).pow(4).mean()) - 3) <= checks.Z * (96 / grain.numel) ** 0.5


def test_noise_is_never_drawn_twice() -> None:
    grain = flat_grain(50)
    draws = [Lockstep(PrivateMean(1.0), grain, 2, seed=1).step([torch.zeros(50)] * 2)[0] for _ in range(3)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(draws, 2))
    assert not bool((system_normal(1000) == system_normal(1000)).any())
    assert system_normal(0).numel() == 0
    assert system_normal(7).shape == (7,)


def test_epsilon_is_what_the_library_publishes() -> None:
    """dp-accounting's own test (`rdp_privacy_accountant_test.py`, `test_compute_epsilon_delta_gaussian`).

    It states that a Gaussian with noise multiplier 4.530877117 is exactly (1, 1e-6)-private, on a fine grid of orders;
    the library's default orders, which we take, can only give more.
    """
    accounting = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    assert 1.0 <= epsilon(4.530877117, steps=1, delta=1e-6) <= 1.0005
    accountant = rdp.RdpAccountant()
    accountant.compose(accounting.PoissonSampledDpEvent(0.01, accounting.GaussianDpEvent(1.1)), 1000)
    assert epsilon(1.1, steps=1000, delta=1e-5, sampling=0.01) == accountant.get_epsilon(1e-5)
    # Ten compositions of a Gaussian are one with sqrt(10) times less noise.
    assert epsilon(10**0.5 * 4.530877117, steps=10, delta=1e-6) == pytest.approx(epsilon(4.530877117, 1, 1e-6))


def test_epsilon_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(CompositionError, match=r"pip install 'gradwire\[private\]'"):
        epsilon(1.0, 1, 1e-5)
    with pytest.raises(CompositionError, match="delta"):
        epsilon(1.0, 1, 0.0)
    assert epsilon(0.0, 0, 1e-5) == 0.0


# Weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(1.0, 1.0, 1.0), (3.0, 0.0, 1.0), (1e-3, 5.0, 1e3)])
def test_the_weighted_mean_is_its_definition_at_the_bytes_of_a_mean(values: tuple[float, ...]) -> None:
    xs, plain = around(3, seed=1, spread=1.0), AllReduceExchange(Identity())
    reducer, grain = Weighted(plain, values), flat_grain(NUMEL)
    seen = Lockstep(reducer, grain, 3).step(xs)[0].double()
    want = sum(w * x.double() for w, x in zip(values, xs, strict=True)) / sum(values)
    sizes = sum(w * x.double().abs() for w, x in zip(values, xs, strict=True)) / sum(values)
    assert bool(((seen - want).abs() <= 8 * checks.unit_roundoff() * sizes).all())
    assert gradwire.cost(reducer, small_model(), 3) == gradwire.cost(plain, small_model(), 3)
    checks.check_leaves_input(reducer, grain, xs)


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "int8,ef=off", "topk:0.999"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_weighted_mean_overflows_only_where_it_does_not_fit(spec: str, dtype: torch.dtype) -> None:
    """Three quarters of 60,000 fit half precision, and so must all that comes before; 1.5 times as much does not."""
    ranks = Lockstep(gradwire.parse(f"{spec},weights=3/1"), flat_grain(16, dtype=dtype), 2)
    mean, _ = ranks.step([torch.full((16,), 60_000.0, dtype=dtype), torch.full((16,), -60_000.0, dtype=dtype)])
    # a scaling, a division, a sum and what the codec rounds: at most half of a 128th for each of two values
    assert bool(((mean.float() - 30_000).abs() <= 30_000 * 2.0**-6).all())


def test_weights_may_change_from_step_to_step() -> None:
    weights = Weights([1, 1])
    ranks = Lockstep(Weighted(AllReduceExchange(Identity()), weights), flat_grain(1), 2)
    xs, before = [torch.tensor([4.0]), torch.tensor([8.0])], repr(ranks.reducer)
    assert ranks.step(xs)[0].item() == 6.0
    weights.set([3, 1])
    assert ranks.step(xs)[0].item() == 5.0
    assert repr(ranks.reducer) == before
    for wrong in ([0, 0], [1], [1, math.nan], [-1, 2], []):
        with pytest.raises(CompositionError):
            weights.set(wrong)
    assert weights.values == (3.0, 1.0)


def test_what_is_owed_in_float16_outlives_a_change_of_weights() -> None:
    """An owner's residual is in the gradient's unit whatever the weights are."""
    weights = Weights([3, 1])
    grain = flat_grain(16, dtype=torch.float16)
    ranks = Lockstep(Weighted(TwoShot(Identity(), BlockInt(2, 8)), weights), grain, 2)
    x = torch.linspace(-1, 1, 16).half()
    total = ranks.step([x, x])[0].double()
    weights.set([1, 1])
    for _ in range(40):
        total += ranks.step([x, x])[0].double()
    owed = torch.cat([leaf.tensor for state in ranks.states for _, leaf in walk(state) if leaf.owed]).double()
    torch.testing.assert_close(total + owed[:16], 41 * x.double(), rtol=0, atol=0.05)


def test_weights_go_outside_error_feedback() -> None:
    fed = ErrorFeedback(AllGatherExchange(TopK(0.1)))
    with pytest.raises(CompositionError, match="Weighted\\(ErrorFeedback"):
        ErrorFeedback(Weighted(AllGatherExchange(TopK(0.1)), (1, 2)))
    with pytest.raises(CompositionError, match="2 weights for 3 ranks"):
        Lockstep(Weighted(fed, (1, 2)), flat_grain(10), 3)
    ranks, total = Lockstep(Weighted(fed, (1.0, 3.0)), flat_grain(NUMEL), 2), torch.zeros(NUMEL, dtype=torch.float64)
    xs = around(2, seed=4)
    for _ in range(60):
        total += ranks.step(xs)[0].double()
    want = 60 * (0.25 * xs[0].double() + 0.75 * xs[1].double())
    owed = sum(checks.owed(ranks.states, ranks.grain).e) / 2
    torch.testing.assert_close(total + owed, want, rtol=1e-4, atol=1e-4)
