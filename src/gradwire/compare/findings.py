"""What is wrong with the evidence of a comparison, or should be known of it: what a careful reader would ask.

Was there anything to learn, and was it learned? Is every loss a number? Did the method end as well as the baseline? How
many seeds and hosts were there? Each answer that matters is a `VerdictFinding`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.compare.evidence import (
    Learning,
    Shortfall,
    baseline_learning,
    hardly_learned,
    loss_shortfall,
    not_finite,
    shortfall,
    shortness,
)
from gradwire.compare.figures import Row, target_hit
from gradwire.compare.results import FP32, Comparison, Run

ENOUGH_SEEDS = 5
"""Seeds that are advised: with fewer, Student's t is so large that only large differences are told from chance."""

FAR = 5.0
"""Standard errors over the held-out examples that those examples do not explain."""


class FindingKind(enum.Enum):
    """What a finding is about; the value is what a table's cell has room for."""

    ONE_HOST = "one host"
    NO_BASELINE = "no baseline"
    HARDLY_LEARNED = "hardly learned"
    TOO_SHORT = "too short"
    TARGET_AT_START = "target at the start"
    NOT_FINITE = "not finite"
    METRIC_NOT_FINITE = "metric not finite"
    FAILED = "failed"
    NOT_REACHED = "not reached"
    WORSE_METRIC = "worse metric"
    PERHAPS_WORSE = "perhaps worse"
    NO_METRIC = "no metric"
    WORSE_LOSS = "worse loss"
    ONE_SEED = "one seed"


CAVEATS = frozenset({FindingKind.WORSE_LOSS, FindingKind.ONE_SEED})
"""Findings that a reader should know of, but that leave a headline standing."""

ALARMS = frozenset({FindingKind.NOT_FINITE, FindingKind.METRIC_NOT_FINITE, FindingKind.FAILED})
"""Findings for which the command ends with a status other than 0."""


@dataclass(frozen=True)
class VerdictFinding:
    """One thing that was found.

    Attributes:
        kind: what it is about.
        method: whose; None for the comparison as a whole.
        text: a sentence, with figures.
    """

    kind: FindingKind
    method: str | None
    text: str

    @property
    def forbids(self) -> bool:
        """Whether it forbids a headline for its method (for every method, if it is the comparison's or fp32's)."""
        return self.kind not in CAVEATS


def findings_of(comparison: Comparison, rows: Sequence[Row], learners: Sequence[Row]) -> tuple[VerdictFinding, ...]:
    """All findings, the weightiest first; what speaks against single methods only where they may be compared."""
    findings = [*_of_comparison(comparison), *_of_baseline(comparison)]
    findings += [finding for row in rows for finding in _of_runs(comparison, row)]
    if unsound(findings) is None:
        findings += [finding for row in learners for finding in _of_method(comparison, row)]
    order = list(FindingKind)
    return tuple(sorted(findings, key=lambda f: (not f.forbids, f.method not in (None, FP32), order.index(f.kind))))


def unsound(findings: Iterable[VerdictFinding]) -> FindingKind | None:
    """Return what forbids any conclusion, be it about the comparison or about fp32; None if nothing does."""
    return next((f.kind for f in findings if f.forbids and f.method in (None, FP32)), None)


def _of_comparison(comparison: Comparison) -> Iterable[VerdictFinding]:
    if comparison.options["hosts"] < 2:
        yield VerdictFinding(
            FindingKind.ONE_HOST,
            None,
            "There is one host, so nothing was communicated and nothing compared: --hosts 2 or more.",
        )
    if not comparison.finished(FP32):
        text = f"{FP32} has not finished, so there is nothing to compare with: have it among the methods."
        yield VerdictFinding(FindingKind.NO_BASELINE, None, text)
    seeds = {run.seed for run in comparison.runs}
    if len(seeds) == 1:
        text = f"One seed was run: what another would give is not known. --seeds {ENOUGH_SEEDS} tells."
        yield VerdictFinding(FindingKind.ONE_SEED, None, text)


def _of_baseline(comparison: Comparison) -> Iterable[VerdictFinding]:
    runs = comparison.finished(FP32)
    found = baseline_learning(comparison)
    if found is None or any(map(not_finite, runs)):
        return
    relative = comparison.target is None or comparison.target.startswith("method:")
    if hardly_learned(found, comparison.tolerance if relative else 0.0):
        yield VerdictFinding(FindingKind.HARDLY_LEARNED, FP32, _hardly_learned(found))
        return
    if short := _too_short(comparison):
        yield VerdictFinding(FindingKind.TOO_SHORT, FP32, short)
    hits = [(target_hit(comparison, run), run) for run in runs]
    if any(hit and hit.steps <= _first_look(comparison, run) for hit, run in hits):
        text = f"{FP32} is at the target where it is first looked at: times to the target say nothing about learning."
        yield VerdictFinding(FindingKind.TARGET_AT_START, FP32, text)


def _first_look(comparison: Comparison, run: Run) -> int:
    """The earliest step at which a run can be seen to have reached the target."""
    by_metric = comparison.target is not None and comparison.target.startswith("metric:")
    return run.evaluations[0].steps if by_metric and run.evaluations else 1


def _hardly_learned(found: Learning) -> str:
    change = "fell" if found.fall >= 0 else "rose"
    noises = f"{abs(found.in_noises):.1f} times its noise" if found.noise else "without noise"
    return (
        f"The loss of {FP32} hardly fell: from {found.start:.5g} to {found.end:.5g}, it {change} by "
        f"{abs(found.fall):.2g}, {noises}. Train longer, or with another learning rate."
    )


def _too_short(comparison: Comparison) -> str:
    """What is missing for a conclusion where runs are too short, and what to do; empty where they are not."""
    found = shortness(comparison)
    if found is None or not found.too_short:
        return ""
    option = "--minutes" if comparison.options.get("minutes") else "--steps"
    if found.steps < found.least:
        return (
            f"The runs are too short: {FP32} made {found.steps} steps, and it takes {found.least} where losses are "
            f"means over {comparison.smoothing}. Train longer: {option}."
        )
    return (
        f"The runs are too short: {FP32} was still learning at the end, where the last quarter of a run brought "
        f"{100 * found.late:.0f} % of what its loss fell by. Train longer: {option}."
    )


def _of_runs(comparison: Comparison, row: Row) -> Iterable[VerdictFinding]:
    """What is wrong with the runs of any method."""
    if row.failure:
        yield VerdictFinding(FindingKind.FAILED, row.method, f"{row.method} failed: {row.failure.splitlines()[0]}")
    for run in comparison.finished(row.method):
        if said := not_finite(run):
            kind = FindingKind.METRIC_NOT_FINITE if all(map(math.isfinite, run.losses)) else FindingKind.NOT_FINITE
            yield VerdictFinding(kind, row.method, f"{row.method}, seed {run.seed}: {said}.")


def _of_method(comparison: Comparison, row: Row) -> Iterable[VerdictFinding]:
    """What speaks against a method, given a baseline to hold it against."""
    if row.reached < row.seeds:
        some = f"reached the target with {row.reached} of {row.seeds} seeds only"
        said = some if row.reached else "did not reach the target"
        yield VerdictFinding(FindingKind.NOT_REACHED, row.method, f"{row.method} {said}.")
    name, found = comparison.task["metric_name"], shortfall(comparison, row.method)
    if found is None:
        yield VerdictFinding(
            FindingKind.NO_METRIC, row.method, f"{row.method} has no final {name} to compare with that of {FP32}."
        )
    elif found.is_worse:
        yield VerdictFinding(FindingKind.WORSE_METRIC, row.method, f"By {name}, {row.method} {_worse(found)}.")
    elif math.isfinite(found.worse_by.mean) and not found.no_sign:
        text = f"By {name}, {row.method} {_worse(found)}. {_what_tells(found)}."
        yield VerdictFinding(FindingKind.PERHAPS_WORSE, row.method, text)
    loss = loss_shortfall(comparison, row.method)
    if loss is not None and loss.is_worse:
        above, least = (100 * math.expm1(part) for part in (loss.worse_by.mean, loss.worse_by.detectable))
        text = (
            f"By training loss, {row.method} ends {above:.2g} % above {FP32} ({loss.baseline:.4g}), where "
            f"{least:.2g} % are told from chance with {loss.seeds} seeds."
        )
        yield VerdictFinding(FindingKind.WORSE_LOSS, row.method, text)


def _worse(found: Shortfall) -> str:
    """How much worse a method ends, with the standard error where it is known."""
    said = f"ends {found.worse_by.mean:.3g} worse than {FP32} ({found.baseline:.4g})"
    return f"{said}, with a standard error of {error_text(found)}" if found.worse_by.error is not None else said


def error_text(found: Shortfall) -> str:
    """A standard error, and what it is over."""
    seeds = [f"{found.seeds} seeds"] if found.seeds > 1 else []
    examples = [f"{found.examples:,} held-out examples"] if found.examples else []
    return f"{found.worse_by.error:.2g} over {' and '.join(seeds + examples)}"


def _what_tells(found: Shortfall) -> str:
    """What a difference that is not told from chance may be, and what to do."""
    if found.seeds > 1:
        told = f"only {found.worse_by.detectable:.2g} or more would be told from it"
        return f"That may be chance: {told}, and more seeds tell more (--seeds)"
    error = found.worse_by.error
    if error and found.worse_by.mean > FAR * error:
        errors = f"{found.worse_by.mean / error:.0f} standard errors"
        return f"Which examples were held out does not explain {errors}; the seed may, and --seeds {ENOUGH_SEEDS} tells"
    return f"That may be chance: another seed may give another result, and --seeds {ENOUGH_SEEDS} tells"
