"""What may be concluded from a comparison: its findings, and a headline only where they allow one.

Terminal, report and `verdict.json` show the same `Verdict`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.compare.crossover import measured_rate, method_pays_below
from gradwire.compare.evidence import (
    Learning,
    Shortfall,
    TimedInPart,
    baseline_learning,
    shortfall,
    timed_in_part,
    told_apart,
)
from gradwire.compare.figures import Row, Spread, paired, summarise
from gradwire.compare.findings import (
    ALARMS,
    ENOUGH_SEEDS,
    FindingKind,
    VerdictFinding,
    error_text,
    findings_of,
    unsound,
)
from gradwire.compare.results import FLOOR, FP32, Comparison
from gradwire.compare.storage import plain
from gradwire.core.atomic_file import write_atomically

FARTHEST = 5.0
"""How many times faster or slower than the measured links others may be for figures to be carried over to them without
a warning: as many times as `docs/results.md` checks."""


@dataclass(frozen=True)
class Verdict:
    """What may be concluded.

    Attributes:
        findings: what is wrong with the evidence, or should be known of it; the weightiest first.
        learned: how far fp32's loss fell, with the seed where that stands out least.
        best: the method for which a headline may be written, or None.
        speed_up: its iso-accuracy speed-up over fp32.
        ends: how much worse than fp32 each method ends by the metric, where that is known.
        apart: whether the best method's time to the target differs from fp32's by more than chance.
        metric: what the metric is called.
        pays_below: bit/s below which it reaches the target before fp32; see `crossover.pays_below`.
        measured_at: bit/s of the links it was measured on.
        seeds: how many both it and fp32 have finished.
        timed_in_part: the methods whose times are estimated.
    """

    findings: tuple[VerdictFinding, ...]
    learned: Learning | None = None
    best: str | None = None
    speed_up: Spread | None = None
    ends: Mapping[str, Shortfall] = field(default_factory=dict[str, Shortfall])
    apart: bool = True
    metric: str = "metric"
    pays_below: float | None = None
    measured_at: float | None = None
    seeds: int = 0
    timed_in_part: tuple[TimedInPart, ...] = ()

    @property
    def alarm(self) -> bool:
        """Whether a run failed, or a loss or a metric was not finite."""
        return any(finding.kind in ALARMS for finding in self.findings)

    @property
    def unsound(self) -> FindingKind | None:
        """What forbids any conclusion, be it about the comparison or about fp32; None if nothing does."""
        return unsound(self.findings)

    def why_not(self, method: str) -> FindingKind | None:
        """What forbids that this method's speed-up is shown; None if it may be."""
        own = (f.kind for f in self.findings if f.forbids and f.method == method)
        return next(own, self.unsound)

    @property
    def headline(self) -> str:
        """The conclusion in one sentence; where there is none, why."""
        if self.best is None or self.speed_up is None:
            return f"No conclusion: {NO_CONCLUSION[self.unsound]}"
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.best} reaches the target {_sooner(self.speed_up, self.apart)} {FP32} ({seeds})"

    @property
    def extrapolated(self) -> bool:
        """Whether `pays_below` is farther from the measured rate than figures are carried over without a warning."""
        if self.pays_below is None or self.measured_at is None:
            return False
        return not self.measured_at / FARTHEST <= self.pays_below <= FARTHEST * self.measured_at

    @property
    def pays(self) -> str:
        """On which links the best method pays, in one sentence; empty where nothing may be said."""
        if self.best is None or self.measured_at is None:
            return ""
        sooner, measured = f"{self.best} reaches the target before {FP32}", bandwidth(self.measured_at)
        if self.pays_below is None:
            return f"On slower links {self.best} gains nothing more: it sends as much on its way as {FP32}."
        reach = f"{FARTHEST:g} times"
        if self.pays_below > FARTHEST * self.measured_at:
            return (
                f"{sooner} on links below {bandwidth(FARTHEST * self.measured_at)}, which is {reach} what was measured "
                f"({measured}). Farther these figures do not reach: for faster links compare there (--rate)."
            )
        if self.pays_below < self.measured_at / FARTHEST:
            return (
                f"Perhaps {sooner} on links below {bandwidth(self.pays_below)}, but that is more than {reach} slower "
                f"than what was measured ({measured}): compare there (--rate)."
            )
        return f"{sooner} on links below {bandwidth(self.pays_below)} (from what was measured at {measured})."

    @property
    def ends_as_well(self) -> str:
        """How the best method ends, and what difference would have been found; empty without a best method."""
        found = self.ends.get(self.best or "")
        if found is None:
            return ""
        gap = found.worse_by.mean
        how = f"{abs(gap):.2g} {'worse' if gap > 0 else 'better'} than" if gap else "where"
        text = f"By {self.metric}, {self.best} ends {how} {FP32}{'' if gap else ' does'} ({found.baseline:.4g})"
        if found.worse_by.error is None:
            return (
                f"{text}; what chance does to that is not known. More seeds tell, or a task whose metric is a tensor "
                "with a value for each held-out example."
            )
        if found.seeds == 1:
            return f"{text}, with a standard error of {error_text(found)}; what another seed would give is not known."
        least = f"{max(found.worse_by.detectable, found.least):.2g} worse or more would have been found"
        more = f", and less with --seeds {ENOUGH_SEEDS}" if found.seeds < ENOUGH_SEEDS else ""
        return f"{text}, with a standard error of {error_text(found)}; {least}{more}."

    @property
    def beyond_headline(self) -> tuple[str, ...]:
        """What else is to be said of the best method, a sentence each."""
        return tuple(said for said in (self.ends_as_well, self.pays) if said)

    @property
    def learned_text(self) -> str:
        """How far fp32's loss fell against its noise, in one sentence; empty where that is not known, or a finding."""
        found = self.learned
        if (
            found is None
            or self.unsound is FindingKind.HARDLY_LEARNED
            or not math.isfinite(found.fall)
            or not math.isfinite(found.noise)
        ):
            return ""
        noises = f"{found.in_noises:.3g} times its noise" if math.isfinite(found.in_noises) else "without noise"
        return f"The loss of {FP32} went from {found.start:.4g} to {found.end:.4g}, {noises}."


NO_CONCLUSION: dict[FindingKind | None, str] = {
    FindingKind.ONE_HOST: "there is only one host",
    FindingKind.NO_BASELINE: f"{FP32} has not finished",
    FindingKind.HARDLY_LEARNED: f"the loss of {FP32} hardly fell",
    FindingKind.TOO_SHORT: "the runs are too short",
    FindingKind.TARGET_AT_START: "the target is reached at the start",
    FindingKind.NOT_FINITE: f"a loss of {FP32} is not finite",
    FindingKind.METRIC_NOT_FINITE: f"the metric of {FP32} is not finite",
    FindingKind.FAILED: f"{FP32} failed",
    None: f"no method reached the target and was seen to end as well as {FP32}",
}


def _sooner(gain: Spread, apart: bool) -> str:
    if gain.low < 1 < gain.high:
        return "with some seeds before and with some after"
    if not apart:
        return "about as soon as"
    if gain.mean >= 1:
        return f"{gain.mean:.{1 if gain.mean < 10 else 0}f} times as soon as"
    return "later than"


def bandwidth(bits_per_s: float) -> str:
    """A rate with two digits, as links are named.

    Example:
        >>> bandwidth(1.764e9), bandwidth(96e6), bandwidth(250)
        ('1.8 Gbit/s', '96 Mbit/s', '250 bit/s')
    """
    units = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
    power = max(0, min(len(units) - 1, int(math.log10(max(1.0, bits_per_s)) / 3 + 1e-9)))
    return f"{_two_digits(bits_per_s / 1000**power)} {units[power]}"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):,.0f}"


def judge(comparison: Comparison) -> Verdict:
    """Judge a comparison by its own figures.

    Returns:
        All findings; and where they allow it the method with the largest speed-up over fp32, its own methods before
        PyTorch's, and the bandwidth below which it pays.
    """
    rows = summarise(comparison)
    learners = [row for row in rows if row.method not in (FP32, FLOOR) and row.seeds]
    verdict = Verdict(
        findings_of(comparison, rows, learners),
        baseline_learning(comparison),
        ends={row.method: found for row in learners if (found := shortfall(comparison, row.method))},
        metric=comparison.task["metric_name"],
        timed_in_part=timed_in_part(comparison),
    )
    best = _best([row for row in learners if not verdict.why_not(row.method)])
    if best is None:
        return verdict
    seeds = len(paired(comparison, comparison.finished(best.method), FP32))
    below, rate = method_pays_below(comparison, best.method), measured_rate(comparison)
    return dataclasses.replace(
        verdict,
        best=best.method,
        speed_up=best.speed_up,
        apart=told_apart(comparison, best.method),
        pays_below=below,
        measured_at=rate,
        seeds=seeds,
    )


def _best(rows: Sequence[Row]) -> Row | None:
    ours = [row for row in rows if not row.method.startswith("torch.")]
    gains = [(row.speed_up.mean, row) for row in ours or rows if row.speed_up]
    return max(gains, key=lambda pair: pair[0], default=(0.0, None))[1]


# -------------------------------------------------------------------------------------------- exporting


def to_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data, for programs."""
    learned = verdict.learned
    return plain({
        "headline": verdict.headline,
        "best": verdict.best,
        "speed_up": verdict.speed_up._asdict() if verdict.speed_up else None,
        "told_from_chance": verdict.apart if verdict.speed_up else None,
        "seeds": verdict.seeds,
        "final_metric": {method: _ends_json(found) for method, found in verdict.ends.items()},
        "ends_as_well": verdict.ends_as_well,
        "pays_below_bit_per_s": verdict.pays_below,  # null at every bandwidth too: infinity is no JSON
        "pays_at_every_bandwidth": verdict.pays_below == math.inf,
"measured_at_bit_per_s": verdict.measured_at,
        "pays_beyond_what_was_measured": verdict.extrapolated,
        "pays": verdict.pays,
        "baseline_loss": learned._asdict() | {"fall_in_noises": learned.in_noises} if learned else None,
        "timed_in_part": [found._asdict() for found in verdict.timed_in_part],
        "alarm": verdict.alarm,
        "findings": [{"kind": f.kind.value, "method": f.method, "text": f.text} for f in verdict.findings],
    })  # fmt: skip


def _ends_json(found: Shortfall) -> dict[str, Any]:
    return {
        "worse_by": found.worse_by.mean,
        "standard_error": found.worse_by.error,
        "detectable": found.worse_by.detectable if found.seeds > 1 else None,
        "baseline": found.baseline,
        "seeds": found.seeds,
        "examples": found.examples,
    }


def write(verdict: Verdict, path: Path) -> None:
    """Write `verdict.json` as a whole."""
    write_atomically(path, json.dumps(to_json(verdict), indent=1))
