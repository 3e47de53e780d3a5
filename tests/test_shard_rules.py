"""Rules where each rank wants its own shard of the result, and rules over what each rank has made private itself."""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs import BlockInt, Codec, Identity
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grain import flat_grain
from gradwire.core.key import Key
from gradwire.drivers.lockstep import Lockstep
from gradwire.ranks.supervised import run_function
from gradwire.reducers import ErrorFeedback, Guard, Step
from gradwire.reducers.aggregate import (
    Bulyan,
    CenteredClipping,
    Gathered,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    PrivateMean,
    PrivateReports,
    Rule,
    RuleOnShards,
    Sharded,
    TrimmedMean,
    epsilon,
    epsilon_of_replacing,
)
from gradwire.spec import parse

CASES = str(Path(__file__).with_name("shard_rule_cases.py"))
RULES: list[Rule] = [
    *(Median(), TrimmedMean(1), Krum(1), MultiKrum(1), Bulyan(1), GeometricMedian(), CenteredClipping(0.5, 2)),
]
EVERY = [
    "median",
    "trimmed:1",
    "krum:0",
    "multikrum:0",
    "rfa",
    "clip:0.5",
    "dp:0.2,noise=0",
    "dp:0.2,noise=0,rule=median",
]
RESUMED = ("clip:0.5", "krum:0+int8,ef=off")
RANKS, DENSE, GROUPS = 3, 2403, 3  # the parameters of the network, filled up to whole rows
NUMEL = 500


@functools.cache
def outcomes() -> list[dict[str, Any]]:
    jobs: dict[str, Any] = {
        "groups": ("as_by_group", {"specs": EVERY}),
        "bad": ("not_finite", {}),
        "no": ("refused", {}),
    }
    jobs |= {spec: ("resumed", {"spec": spec, "folder": f"{tempfile.mkdtemp()}/saved"}) for spec in RESUMED}
    return run_function(f"{CASES}:many", RANKS, {"jobs": jobs}, 200)


# FSDP2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("spec", EVERY)
def test_every_group_of_a_sharded_model_gets_what_the_rule_makes_of_it(spec: str) -> None:
    for found in outcomes():
        assert found["groups"][spec]["off"] < 5e-7


def test_rules_of_coordinates_send_a_reduce_scatter_and_geometric_ones_a_few_distances_more() -> None:
    for found in outcomes():
        sent = {spec: each["sent"] for spec, each in found["groups"].items()}
        assert sent["median"] == sent["trimmed:1"] == sent["dp:0.2,noise=0,rule=median"] == sent["plain"]
        distances = (RANKS - 1) * 8 * RANKS**2 * GROUPS
        assert sent["krum:0"] == sent["rfa"] == sent["median"] + distances
        assert sent["clip:0.5"] == sent["median"] + (RANKS - 1) * 8 * (RANKS + 1) ** 2 * GROUPS


def test_a_median_leaves_out_what_is_not_finite_and_all_ranks_skip_what_one_shard_cannot_repair() -> None:
    for found in outcomes():
        assert found["bad"] == {"finite": True, "skipped": True, "dropped": True}


@pytest.mark.parametrize("spec", RESUMED)
def test_a_resumed_run_is_the_same_run(spec: str) -> None:
    for found in outcomes():
        whole, broken = found[spec]
        assert whole == broken


def test_what_has_no_half_is_refused_with_what_has_one() -> None:
    for found in outcomes():
        assert "or a rule such as median or krum:1" in found["no"]["adasum"]
        assert "needs at least 5 ranks, and this run has 3" in found["no"]["krum:1"]
        assert "has no such half" in found["no"]["median,worker_momentum=0.9"]


# Virtual ranks ---------------------------------------------------------------------------------------------------


def around(ranks: int, numel: int = NUMEL, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(numel, generator=generator)
    return [centre + 0.3 * (1 + rank) * torch.randn(numel, generator=generator) for rank in range(ranks)]


@pytest.mark.parametrize("numel", [1, 5, NUMEL])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_shards_of_a_rule_are_what_the_whole_rule_makes_bit_for_bit(rule: Rule, numel: int) -> None:
    n, grain = max(4, rule.fewest_ranks), flat_grain(numel)
    whole, cut = Lockstep(Sharded(rule), grain, n), Lockstep(Sharded(rule).scattered(), grain, n)
    for step in range(3):
        xs = around(n, numel, step)
        shards = cut.step(xs)
        assert torch.equal(torch.cat(shards), whole.step(xs)[0])
        owned = [cut.reducer.owned(grain, Step(0, rank, n)) for rank in range(n)]
        assert [len(shard) for shard in shards] == [own.stop - own.start for own in owned]


@pytest.mark.parametrize("rule", [Median(), Krum(0)], ids=str)
@pytest.mark.parametrize("codec", [BlockInt(8, 64), BlockInt(4, 64, stochastic=True)], ids=str)
def test_a_rule_over_coded_shards_is_the_rule_of_what_they_decode_to(rule: Rule, codec: Codec) -> None:
    n, grain = 4, flat_grain(NUMEL)
    xs, size = around(n), NUMEL // 4
    seen = torch.cat(Lockstep(Gathered(rule, codec).scattered(), grain, n).step(xs))
    rows = torch.empty(n, NUMEL)
    for rank, x in enumerate(xs):
        for owner in range(n):
            key, own = Key(0, 0, grain.name, f"first/{owner}", rank), slice(owner * size, (owner + 1) * size)
            rows[rank, own] = codec.decode(codec.encode(x[own], key), x[own], key)
    doubles = rows.double()
    distances = (doubles[:, None] - doubles[None]).square().sum(-1) if rule.geometric else None
    assert torch.equal(seen, rule.combine(rows, distances))


def test_memory_around_shards_of_a_rule_is_refused_as_around_the_rule() -> None:
    with pytest.raises(CompositionError, match="would deliver something else"):
        ErrorFeedback(RuleOnShards(Median(), BlockInt(4)))
    assert not RuleOnShards(Median()).ends_alike
    assert RuleOnShards(Median()).lossless


# Private reports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
def test_each_report_has_the_noise_it_says_and_a_median_has_that_of_a_median(n: int) -> None:
    """Of n independent normal numbers the mean of two in the middle has a known deviation; of one it is its own."""
    clip, noise, numel = 0.5, 2.0, 40_000
    reducer = parse(f"dp:{clip},noise={noise},rule=median")
    seen = Lockstep(reducer, flat_grain(numel), n).step([torch.zeros(numel)] * n)[0].double()
    deviation = {1: 1.0, 4: 0.5464}[n] * noise * clip  # of the median of four, sqrt(0.2986)
    spread = float(seen.std())
    assert abs(spread / deviation - 1) < 6 / math.sqrt(2 * numel)
    assert abs(float(seen.mean())) < 6 * deviation / math.sqrt(numel)


def test_noise_of_all_together_is_that_of_the_private_mean() -> None:
    n, numel = 4, 40_000
    half = PrivateMean(0.5, 2.0).scattered()
    seen = torch.cat(Lockstep(half, flat_grain(numel), n).step([torch.zeros(numel)] * n)).double()
    assert abs(float(seen.std()) / (2.0 * 0.5 / n) - 1) < 6 / math.sqrt(2 * numel)


def test_reports_are_clipped_to_the_norm_of_the_whole_gradient_and_then_the_rule_is_itself() -> None:
    xs = around(5)
    clipped = torch.stack([x * min(1.0, 3.0 / float(x.norm())) for x in xs])
    seen = Lockstep(parse("dp:3,noise=0,rule=trimmed:1"), flat_grain(NUMEL), 5).step(xs)[0]
    torch.testing.assert_close(seen, TrimmedMean(1).combine(clipped, None), rtol=1e-5, atol=1e-6)
    bad = [*xs[:4], torch.full((NUMEL,), math.nan)]
    assert bool(Lockstep(parse("dp:3,noise=0,rule=median"), flat_grain(NUMEL), 5).step(bad)[0].isfinite().all())


def test_noise_is_never_drawn_twice() -> None:
    reducer = parse("dp:1,rule=median")
    draws = [Lockstep(reducer, flat_grain(50), 3, seed=1).step([torch.zeros(50)] * 3)[0] for _ in range(2)]
    assert not torch.equal(draws[0], draws[1])
    assert reducer.private
    assert not reducer.repeatable


def test_what_local_privacy_costs_follows_from_the_accountant_of_the_gaussian_mechanism() -> None:
    """A report moves by clip where a gradient is there or not, and by 2 clip where it is another one."""
    pytest.importorskip("dp_accounting")
    there = epsilon(noise=4.0, steps=10, delta=1e-5)
    assert epsilon_of_replacing(noise=8.0, steps=10, delta=1e-5) == pytest.approx(there)
    # Three groups, each clipped to C, are one report that is at most sqrt(3) C long: three mechanisms composed.
    assert epsilon(noise=4.0 / math.sqrt(3), steps=10, delta=1e-5) == pytest.approx(epsilon(4.0, 30, 1e-5))


def test_specs_of_private_rules() -> None:
    assert parse("dp:1,rule=median") == PrivateReports(Sharded(Median()), 1.0, 1.0)
    assert parse("dp:2,noise=0.5,rule=krum:1") == PrivateReports(Sharded(Krum(1)), 2.0, 0.5)
    assert parse("dp:2,rule=(clip:0.5,iterations=2)").inner.rule == CenteredClipping(0.5, 2)
    coded = parse("dp:1,rule=(median+int8)")
    assert isinstance(coded, Guard)
    assert coded.inner == PrivateReports(Gathered(Median(), BlockInt(8)), 1.0, 1.0)
    assert parse("dp:1,rule=median").scattered() == PrivateReports(RuleOnShards(Median(), Identity()), 1.0, 1.0)


@pytest.mark.parametrize("spec", ["median,noise=1", "krum:1,noise=2", "median+dp:1"])
def test_noise_after_a_rule_is_refused_with_why(spec: str) -> None:
    with pytest.raises(
        SpecError, match=r"would hide nobody.*have each rank add its own before it, as in 'dp:1,noise=1"
    ):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("int4,rule=median", "an option of dp alone"),
        ("median,rule=median", "an option of dp alone"),
        ("dp:1,rule=int4", "is no rule, with its own options alone"),
        ("dp:1,rule=(median,ef=off)", "is no rule, with its own options alone"),
        ("dp:1,rule=meridian", "did you mean"),
        ("dp:0,rule=median", "it must be positive"),
        ("dp:1,rule=median,weights=given", "weights have no meaning"),
        ("dp:1,rule=median,warmup=3", "send gradients past"),
    ],
)
def test_private_rules_that_do_not_fit_are_refused(spec: str, said: str) -> None:
    with pytest.raises((SpecError, CompositionError), match=said):
        parse(spec)


def test_a_private_rule_is_as_many_bytes_as_the_rule() -> None:
    model = torch.nn.Linear(30, 20)
    assert gradwire.cost("dp:1,rule=median", model, 4) == gradwire.cost("median", model, 4)
