"""What may be concluded: every reason against a headline, and the bandwidth below which it holds."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from comparisons import comparison, failed, run
from gradwire.compare import evidence, verdict
from gradwire.compare.chance import Estimate, estimate, students_t, with_both_errors
from gradwire.compare.evidence import Learning, hardly_learned, learning, loss_shortfall, not_finite, shortfall
from gradwire.compare.findings import FindingKind
from gradwire.compare.results import Comparison, Evaluation, Run
from gradwire.compare.verdict import Verdict, bandwidth, judge

FP32, FLOOR = "torch.fp32", "torch.noop"
FALLING = tuple(1.0 + 3.0 * 0.85**step for step in range(31))


def flat(seed: int, steps: int = 60) -> tuple[float, ...]:
    """Losses of a model that learns nothing: ln 10, and the noise of its batches."""
    source = random.Random(seed)
    return tuple(source.gauss(math.log(10), 0.02) for _ in range(steps))


FLAT = flat(3)


def kinds(judged: Verdict) -> list[tuple[FindingKind, str | None]]:
    return [(finding.kind, finding.method) for finding in judged.findings]


def sound(*extra: Run, method: str = "int4", seeds: int = 2, **changes: object) -> Comparison:
    """Two seeds of fp32 and of a method that is twice as fast and ends as well."""
    base = [run(FP32, seed, losses=FALLING) for seed in range(seeds)]
    mine = [run(method, seed, losses=FALLING, step_s=0.5, sent=10.0) for seed in range(seeds)]
    return comparison(*base, *mine, *extra, **changes)  # pyright: ignore[reportArgumentType]


# -------------------------------------------------------------------------------------------- headlines


def test_sound_evidence_gives_a_headline_and_no_finding():
    judged = judge(sound())
    assert judged.headline == "int4 reaches the target 2.0 times as soon as torch.fp32 (2 seeds)"
    assert judged.findings == ()
    assert not judged.alarm
    assert judged.best == "int4"


def test_a_baseline_that_learned_nothing_gives_no_headline_however_fast_the_others_are():
    judged = judge(comparison(run(FP32, losses=FLAT), run("int4", losses=FLAT, step_s=0.17), smoothing=10))
    assert judged.best is None
    assert judged.speed_up is None
    assert judged.headline == "No conclusion: the loss of torch.fp32 hardly fell"
    assert kinds(judged) == [(FindingKind.HARDLY_LEARNED, FP32), (FindingKind.ONE_SEED, None)]
    assert "times its noise" in judged.findings[0].text


@pytest.mark.parametrize("steps", [12, 60, 400])
def test_chance_does_not_pass_for_learning(steps: int):
    falls = [learning(Run(FP32, 0, losses=list(flat(seed, steps))), 10) for seed in range(200)]
    assert sum(not hardly_learned(found, tolerance=0.0) for found in falls) <= 1


def test_one_seed_that_did_not_learn_is_enough():
    runs = [run(FP32, losses=FALLING), run(FP32, 1, losses=flat(4, 31)), run("int4", losses=FALLING)]
    assert (FindingKind.HARDLY_LEARNED, FP32) in kinds(judge(comparison(*runs, smoothing=10)))


def test_a_loss_that_rose_is_said_to_have_risen():
    rising = tuple(reversed(FALLING))
    (finding, *_) = judge(comparison(run(FP32, losses=rising), run("int4", losses=rising))).findings
    assert finding.kind is FindingKind.HARDLY_LEARNED
    assert "it rose by 3" in finding.text


TOLD = {"name": "toy", "description": "", "metric_name": "score", "higher_is_better": True}


def ends(*gaps: float, better: bool = True) -> Verdict:
    """fp32 ends at 96 and 98 in turn, and a method that is twice as fast so much worse with each seed."""
    sign = -1 if better else 1
    base = [run(FP32, seed, losses=FALLING, metric=96.0 + 2 * (seed % 2)) for seed in range(len(gaps))]
    mine = [
        run("int4", seed, losses=FALLING, step_s=0.5, metric=96.0 + 2 * (seed % 2) + sign * gap)
        for seed, gap in enumerate(gaps)
    ]
    return judge(comparison(*base, *mine, task=TOLD | {"higher_is_better": better}))


@pytest.mark.parametrize("better", [True, False])
def test_a_method_that_ends_worse_than_chance_explains_gives_no_headline(better: bool):
    judged = ends(3.0, 3.2, 3.1, 3.1, better=better)
    assert kinds(judged) == [(FindingKind.WORSE_METRIC, "int4")]
    assert judged.best is None
    assert judged.headline.startswith("No conclusion: no method")
    assert judged.why_not("int4") is FindingKind.WORSE_METRIC
    assert judged.findings[0].text == (
        "By score, int4 ends 3.1 worse than torch.fp32 (97), with a standard error of 0.041 over 4 seeds."
    )


def test_a_method_that_ends_worse_by_what_chance_explains_is_as_good():
    judged = ends(1.0, -1.2, 0.8, 0.4)
    assert judged.best == "int4"
    assert judged.findings == ()
    assert judged.ends_as_well == (
        "By score, int4 ends 0.25 worse than torch.fp32 (97), with a standard error of 0.5 over 4 seeds; "
        "2.9 worse or more would have been found, and less with --seeds 5."
    )


def test_what_may_be_a_difference_or_chance_is_neither_claimed_nor_passed_over():
    judged = ends(1.0, 0.4, 0.8)
    assert kinds(judged) == [(FindingKind.PERHAPS_WORSE, "int4")]
    assert judged.best is None
    assert "That may be chance: only 1.8 or more would be told from it" in judged.findings[0].text


def by_example(method: str, seed: int, wrong: set[int], step_s: float = 1.0) -> Run:
    """A run that is wrong about these of 500 examples."""
    values = [0.0 if number in wrong else 100.0 for number in range(500)]
    made = run(method, seed, losses=FALLING, metric=sum(values) / 500, step_s=step_s)
    return dataclasses.replace(made, metric_values=values)


def test_six_of_500_examples_are_no_difference():
    """The same six may be, if both are right about all others: examples are paired."""
    base, mine = set(range(20)), set(range(10, 36))
    found = shortfall(comparison(by_example(FP32, 0, base), by_example("int4", 0, mine)), "int4")
    assert found is not None
    assert found.worse_by.mean == pytest.approx(1.2)
    mixed = math.sqrt((26 * 100**2 - 500 * 1.2**2) / 499 / 500)  # ten examples better, 16 worse
    assert found.worse_by.error == pytest.approx(mixed)
    assert found.no_sign
    judged = judge(comparison(by_example(FP32, 0, base), by_example("int4", 0, mine, 0.5)))
    assert judged.best == "int4"
    assert "with a standard error of 1 over 500 held-out examples" in judged.ends_as_well
    nested = shortfall(comparison(by_example(FP32, 0, base), by_example("int4", 0, base | set(range(30, 36)))), "int4")
    assert nested is not None
    assert nested.worse_by.mean == pytest.approx(1.2)
    assert not nested.no_sign
    assert not nested.is_worse  # not with one seed


def test_with_one_seed_a_large_difference_is_not_put_down_to_the_examples():
    few, many = set(range(10)), set(range(110))
    found = judge(comparison(by_example(FP32, 0, few), by_example("int4", 0, many, 0.5)))
    assert kinds(found)[0] == (FindingKind.PERHAPS_WORSE, "int4")
    said = "Which examples were held out does not explain 11 standard errors; the seed may, and --seeds 5 tells"
    assert said in found.findings[0].text
    small = judge(comparison(by_example(FP32, 0, few), by_example("int4", 0, set(range(18)), 0.5)))
    assert "That may be chance: another seed may give another result" in small.findings[0].text


def test_the_errors_of_seeds_and_of_examples_add_up():
    base = [by_example(FP32, seed, {1, 2, 3}) for seed in range(3)]
    mine = [by_example("int4", seed, {1, 2, 3 + seed}) for seed in range(3)]
    found = shortfall(comparison(*base, *mine), "int4")
    alone = shortfall(comparison(*base, *(dataclasses.replace(run, metric_values=[]) for run in mine)), "int4")
    assert found is not None
    assert alone is not None
    assert (found.examples, alone.examples) == (500, 0)
    assert alone.worse_by == estimate([0.0, 0.0, 0.0])
    assert found.worse_by.error is not None
    assert found.worse_by.error > 0


def test_a_training_loss_that_ends_higher_is_told_of_and_leaves_the_headline():
    higher = tuple(loss + 0.05 for loss in FALLING)
    runs = [run(FP32, seed, losses=FALLING) for seed in range(3)]
    runs += [run("int4", seed, losses=(*higher[:-1], higher[-1] + 0.001 * seed), step_s=0.5) for seed in range(3)]
    judged = judge(comparison(*runs, target="1.2"))
    assert kinds(judged) == [(FindingKind.WORSE_LOSS, "int4")]
    assert judged.findings[0].text.startswith("By training loss, int4 ends 5 % above torch.fp32 (1.023), where 0.")
    assert judged.best == "int4"
    one = loss_shortfall(comparison(runs[0], runs[3]), "int4")
    assert one is not None
    assert not one.is_worse


@pytest.mark.parametrize("number", [3, 5])
def test_chance_is_hardly_ever_called_a_difference(number: int):
    """One in 200 is what is allowed; of 2,000 that is 10, and 22 is four standard deviations more."""
    source = random.Random(number)
    found = [estimate([source.gauss(0, 1) for _ in range(number)]) for _ in range(2000)]
    assert sum(one.mean > one.detectable for one in found) <= 22


def test_quantiles_of_students_t():
    """As tables have them, at 0.995."""
    for freedom, quantile in {1: 63.657, 5: 4.032, 6: 3.707, 7.9: 3.499, 12: 3.055, 30: 2.750}.items():
        assert students_t(freedom) == pytest.approx(quantile, rel=0.003)


def test_what_is_not_known_of_an_error_is_left_out():
    seeds, examples = estimate([1.0, 3.0]), estimate([2.0])
    assert with_both_errors(seeds, examples) == seeds
    assert with_both_errors(examples, seeds) == Estimate(2.0, 1.0, 1)
    assert with_both_errors(examples, examples).detectable == math.inf
    assert with_both_errors(estimate([2.0, 2.0]), estimate([2.0, 2.0])) == Estimate(2.0, 0.0, 1)


def test_the_next_best_method_gets_the_headline_where_the_best_ends_worse():
    worse = [run("sign", seed, losses=FALLING, step_s=0.1, metric=70.0 + seed) for seed in range(2)]
    judged = judge(sound(*worse))
    assert judged.best == "int4"
    assert kinds(judged) == [(FindingKind.WORSE_METRIC, "sign")]


def test_with_one_seed_a_hundredth_of_the_metric_is_overlooked_and_no_more():
    def once(metric: float) -> Verdict:
        return judge(comparison(run(FP32, losses=FALLING, metric=90.0), run("int4", losses=FALLING, metric=metric)))

    assert once(89.2).best == "int4"
    assert once(89.2).headline.endswith("(one seed)")
    assert kinds(once(89.2)) == [(FindingKind.ONE_SEED, None)]
    assert "what chance does to that is not known" in once(89.2).ends_as_well
    assert kinds(once(89.0)) == [(FindingKind.PERHAPS_WORSE, "int4"), (FindingKind.ONE_SEED, None)]
    assert "another seed may give another result" in once(89.0).findings[0].text


# --------------------------------------------------------------------------------------------- too short


def test_runs_that_are_too_short_give_no_headline_and_say_what_is_missing():
    short = [run(FP32, losses=FALLING[:20]), run("int4", losses=FALLING[:20], step_s=0.1)]
    judged = judge(comparison(*short, smoothing=10))
    assert judged.headline == "No conclusion: the runs are too short"
    assert judged.findings[0].kind is FindingKind.TOO_SHORT
    assert "made 20 steps, and it takes 50 where losses are means over 10" in judged.findings[0].text
    assert "--steps" in judged.findings[0].text
    assert judged.pays == ""


def test_a_baseline_that_is_still_learning_gives_no_headline():
    straight = tuple(4.0 - 0.01 * step for step in range(300))
    options = {"hosts": 2, "rate": "100mbit", "steps": None, "minutes": 2.0, "bucket_mb": 25.0}
    runs = [run(FP32, losses=straight), run("int4", losses=straight, step_s=0.1)]
    judged = judge(comparison(*runs, smoothing=20, options=options))
    assert judged.unsound is FindingKind.TOO_SHORT
    assert "brought 27 % of what its loss fell by. Train longer: --minutes." in judged.findings[0].text
    ended = (*straight, *[straight[-1]] * 100)
    assert judge(comparison(run(FP32, losses=ended), run("int4", losses=ended), smoothing=20)).best == "int4"


def test_a_loss_that_is_not_finite_is_an_alarm_and_bars_its_method():
    burst = run("sign", losses=(*FALLING[:20], math.nan, *FALLING[21:]), step_s=0.1)
    judged = judge(sound(burst))
    assert judged.alarm
    assert judged.best == "int4"
    assert judged.why_not("sign") is FindingKind.NOT_FINITE
    assert "at 1 of 31 steps, first at step 21" in judged.findings[0].text


def test_a_baseline_that_is_not_finite_bars_every_method():
    nan = (*FALLING[:20], *[math.nan] * 11)
    judged = judge(comparison(run(FP32, losses=nan), run("int4", losses=FALLING)))
    assert judged.alarm
    assert judged.best is None
    assert judged.headline == "No conclusion: a loss of torch.fp32 is not finite"
    assert "from step 21 on" in judged.findings[0].text


def test_a_failed_run_is_an_alarm_and_bars_its_method():
    judged = judge(sound(failed("sign"), run("sign", 1, losses=FALLING, step_s=0.1)))
    assert judged.alarm
    assert judged.best == "int4"
    assert "rank 1 ended with status 1" in judged.findings[0].text
    assert judge(comparison(failed(FP32), run("int4"))).headline == "No conclusion: torch.fp32 has not finished"


def test_what_the_floor_trains_says_nothing():
    alone = run(FLOOR, losses=(math.nan,) * 31, step_s=0.01)
    judged = judge(sound(alone))
    assert judged.findings == ()
    assert judged.best == "int4"


def test_one_host_is_compared_with_nothing():
    judged = judge(sound(hosts=1))
    assert judged.headline == "No conclusion: there is only one host"
    assert kinds(judged) == [(FindingKind.ONE_HOST, None)]
    assert not judged.alarm


def test_without_a_baseline_there_is_no_conclusion():
    judged = judge(comparison(run("int4", losses=FALLING), run("int8", losses=FALLING), target="2"))
    assert judged.unsound is FindingKind.NO_BASELINE
    assert judged.best is None


def test_a_target_that_holds_from_the_start_tells_of_no_learning():
    loss = judge(sound(target="5"))
    metric = judge(sound(target="metric:75"))
    assert loss.unsound is metric.unsound is FindingKind.TARGET_AT_START
    assert judge(sound(target="metric:85")).best == "int4"


def test_every_seed_must_reach_the_target():
    short = [run("sign", 0, losses=FALLING, step_s=0.1), run("sign", 1, losses=FALLING[:-5], step_s=0.1)]
    judged = judge(sound(*short))
    assert judged.best == "int4"
    assert judged.findings[0].text == "sign reached the target with 1 of 2 seeds only."
    judged = judge(comparison(run(FP32, losses=FALLING), run("sign", losses=FALLING[:-5])))
    assert judged.findings[0].text == "sign did not reach the target."


def test_a_method_without_a_metric_cannot_be_shown_to_be_as_good():
    blind = dataclasses.replace(run("int4", losses=FALLING), evaluations=[])
    assert (FindingKind.NO_METRIC, "int4") in kinds(judge(comparison(run(FP32, losses=FALLING), blind)))


def test_seeds_that_disagree_and_methods_that_are_slower_are_not_called_sooner():
    base = [run(FP32, seed, losses=FALLING) for seed in range(2)]
    mixed = [run("int4", 0, losses=FALLING, step_s=0.5), run("int4", 1, losses=FALLING, step_s=2.0)]
    slow = [run("int4", seed, losses=FALLING, step_s=2.0) for seed in range(2)]
    alike = [run("int4", seed, losses=FALLING, step_s=0.9 + 0.05 * seed) for seed in range(2)]
    assert judge(comparison(*base, *alike)).headline == (
        "int4 reaches the target about as soon as torch.fp32 (2 seeds)"
    )
    assert "with some seeds before and with some after torch.fp32" in judge(comparison(*base, *mixed)).headline
    assert judge(comparison(*base, *slow)).headline.startswith("int4 reaches the target later than torch.fp32")


def test_our_methods_come_before_pytorchs():
    theirs = [run("torch.fp16", seed, losses=FALLING, step_s=0.2) for seed in range(2)]
    assert judge(sound(*theirs)).best == "int4"
    assert judge(sound(method="torch.fp16")).best == "torch.fp16"


def test_an_empty_comparison_can_be_judged():
    assert judge(comparison()).unsound is FindingKind.NO_BASELINE


# --------------------------------------------------------------------------------------------- evidence


def test_the_noise_of_a_fall_is_that_of_two_means():
    """Noise of 0.5 a loss around a line: a mean of 20 has 0.5 / sqrt(20), and a difference sqrt(2) of that."""
    source = random.Random(1)
    losses = [10 - 0.01 * step + source.gauss(0, 0.5) for step in range(4000)]
    found = learning(Run("int4", 0, losses=losses), 20)
    assert found.noise == pytest.approx(0.5 * math.sqrt(2 / 20), rel=0.05)
    assert found.fall == pytest.approx(39.8, abs=1)
    assert found.in_noises == pytest.approx(found.fall / found.noise)


def test_the_ends_are_as_long_as_the_smoothing_or_half_the_run():
    losses = [8.0, 6.0, 4.0, 2.0, 1.0, 0.0]
    assert learning(Run("int4", 0, losses=losses), 2)[:2] == (7.0, 0.5)
    assert learning(Run("int4", 0, losses=losses), 50)[:2] == (6.0, 1.0)
    assert learning(Run("int4", 0, losses=[3.0]), 50) == Learning(3.0, 3.0, 0.0)


def test_a_bend_has_six_times_the_variance_of_a_loss_and_few_of_them_tell_little():
    assert learning(Run("int4", 0, losses=[0.0, 1.0, 0.0]), 1).noise == pytest.approx(7 * math.sqrt(2 * 4 / 6))
    assert learning(Run("int4", 0, losses=[0.0, 1.0, 0.0, 0.0]), 2).noise == pytest.approx(4 * math.sqrt(2.5 / 6))


@pytest.mark.parametrize(
    ("found", "tolerance", "hardly"),
    [
        (Learning(5.0, 4.0, 0.2), 0.0, False),
        (Learning(5.0, 4.0, 0.201), 0.0, True),
        (Learning(4.0, 5.0, 0.1), 0.0, True),
        (Learning(2.0, 2.0, 0.0), 0.0, True),
        (Learning(2.05, 2.0, 0.0), 0.005, False),
        (Learning(2.03, 2.0, 0.0), 0.005, True),
        (Learning(-2.0, -2.03, 0.0), 0.005, True),
        (Learning(math.nan, 2.0, 0.1), 0.005, True),
    ],
)
def test_a_fall_must_stand_out_from_noise_and_from_the_targets_tolerance(
    found: Learning, tolerance: float, hardly: bool
):
    assert hardly_learned(found, tolerance) is hardly


def test_a_numeric_target_has_no_tolerance_to_stand_out_from():
    slight = tuple(1.97 + 0.03 * 0.85**step for step in range(31))
    runs = [run(FP32, losses=slight), run("int4", losses=slight)]
    assert judge(comparison(*runs)).unsound is FindingKind.HARDLY_LEARNED
    assert judge(comparison(*runs, target="1.98")).best == "int4"


def test_a_shortfall_pairs_seeds():
    base = [run(FP32, seed, metric=metric) for seed, metric in enumerate((90.0, 92.0, 94.0))]
    mine = [run("int4", seed, metric=metric) for seed, metric in ((0, 60.0), (2, 99.0))]
    found = shortfall(comparison(*base, *mine), "int4")
    assert found is not None
    assert found.worse_by == (pytest.approx((30 - 5) / 2), pytest.approx((30 + 5) / 2), 1)
    assert (found.baseline, found.seeds) == (92.0, 2)


def test_seeds_that_end_alike_still_overlook_a_thousandth():
    base = [run(FP32, seed, metric=90.0) for seed in range(2)]
    found = shortfall(comparison(*base, *(run("int4", seed, metric=90.0) for seed in range(2))), "int4")
    assert found is not None
    assert found.least == pytest.approx(0.09)
    assert not found._replace(worse_by=Estimate(0.08, 0.0, 1)).is_worse
    assert found._replace(worse_by=Estimate(0.10, 0.0, 1)).is_worse
    assert shortfall(comparison(*base), "int4") is None


def test_a_metric_that_is_no_number_is_not_finite():
    odd = dataclasses.replace(run("int4"), evaluations=[Evaluation(4, 4.0, math.nan)])
    assert not_finite(odd) == "the metric is not finite"
    assert not_finite(run("int4")) is None
    assert not_finite(run("int4", losses=(4, math.inf, 2, 1))) is not None
    assert not_finite(run("int4", losses=(4, 3, 2, -math.inf))) == "the loss is not finite from step 4 on"
    assert evidence.not_finite(run(FLOOR, losses=(math.nan,))) is None


def test_a_metric_that_is_no_number_is_not_called_a_loss():
    bad = dataclasses.replace(run(FP32, losses=FALLING), evaluations=[Evaluation(31, 4.0, math.nan)])
    judged = judge(comparison(bad, run("int4", losses=FALLING)))
    assert judged.alarm
    assert judged.unsound is FindingKind.METRIC_NOT_FINITE
    assert judged.headline == "No conclusion: the metric of torch.fp32 is not finite"
    assert judged.findings[0].text == "torch.fp32, seed 0: the metric is not finite."


# -------------------------------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("below", "said"),
    [
        (1.764e8, "on links below 180 Mbit/s (from what was measured at 100 Mbit/s)"),
        (4.9e8, "on links below 490 Mbit/s (from"),
        (6e9, "on links below 500 Mbit/s, which is 5 times what was measured (100 Mbit/s). Farther"),
        (math.inf, "on links below 500 Mbit/s, which is 5 times what was measured"),
        (2.1e7, "int4 reaches the target before torch.fp32 on links below 21 Mbit/s (from"),
        (3e6, "Perhaps int4 reaches the target before torch.fp32 on links below 3.0 Mbit/s, but that is more than 5"),
        (None, "sends as much"),
    ],
)
def test_the_bandwidth_is_told_as_far_as_the_figures_reach(below: float | None, said: str):
    assert said in Verdict((), best="int4", pays_below=below, measured_at=1e8).pays
    assert Verdict((), pays_below=below, measured_at=1e8).pays == ""


def test_bandwidths_have_two_digits():
    written = [bandwidth(rate) for rate in (1.0, 9.94e3, 9.96e3, 123e6, 996e9, 2.5e13)]
    assert written == ["1.0 bit/s", "9.9 kbit/s", "10 kbit/s", "120 Mbit/s", "1,000 Gbit/s", "25 Tbit/s"]


def test_how_far_the_baseline_fell_is_always_told():
    assert "went from 4 to 1" in judge(sound()).learned_text
    assert judge(comparison(run(FP32, losses=FLAT), run("int4", losses=FLAT))).learned_text == ""
    assert judge(comparison(run(FP32, losses=(4, math.nan, 2, 1)))).learned_text == ""


def test_a_program_reads_what_a_person_reads(tmp_path: Path):
    judged = judge(sound(run("sign", losses=(math.nan,) * 31)))
    verdict.write(judged, tmp_path / "verdict.json")
    read = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert read["headline"] == judged.headline
    assert read["best"] == "int4"
    assert read["speed_up"]["mean"] == pytest.approx(2.0)
    assert read["alarm"] is True
    assert read["pays"] == judged.pays
    assert read["findings"][0] == {"kind": "not finite", "method": "sign", "text": judged.findings[0].text}
    assert len(read["findings"]) == len(judged.findings)
