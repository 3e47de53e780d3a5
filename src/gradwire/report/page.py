"""The page: what was found, three charts, two tables, and the conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.compare.figures import Row, mean, smooth, summarise, target_loss
from gradwire.compare.options import parse_nodes
from gradwire.compare.results import FLOOR, FP32, Comparison
from gradwire.compare.verdict import Verdict, judge
from gradwire.core.atomic_file import write_atomically
from gradwire.report import text
from gradwire.report.axes import NARROW, WIDE
from gradwire.report.bars import Bar, bar_svg
from gradwire.report.charts import LineChart, Point, Series
from gradwire.report.efficiency import efficiency_section
from gradwire.report.template import rendered

COLOURS = 7

COLUMNS = (
    ("method", "A gradwire spec, or a hook of PyTorch's own (torch.…). torch.noop sends nothing: its time is the "
     "floor that computation sets, and its ranks train alone, so it has no accuracy."),
    ("to target", "Seconds of training until the smoothed training loss (or the metric, if the target names one) first "
     "reaches the target; ≈ where that is estimated from the steps that were timed."),
    ("vs fp32, vs 16 bit", "Iso-accuracy speed-up: the baseline's time to the target over this method's, mean "
     "over paired seeds with the range in brackets. Where the evidence does not carry one, the reason instead."),
    ("sent a step", "Bytes a host sends in a step, counted at its network interface, packet headers and "
     "acknowledgements included. A host has one rank, or is a node whose ranks reach each other inside it. Decimal "
     "units."),
    ("ratio", "What torch.fp32 sends over what this method sends."),
    ("ms a step", "Training time over steps, by the slowest rank, everything in it but evaluation and set-up."),
    ("compute", "From the start of a step until its last gradient, plus the optimizer: forward, backward, and whatever "
     "shares the cores with them."),
    ("encode", "After the last gradient: coding that the backward pass did not hide. An upper bound: the codec's CPU "
     "time, cut at what the step took after its last gradient."),
    ("wait", "After the last gradient: the rest. Waiting for the network and for other ranks."),
    ("overhead", "All CPU time of the codec, hidden or not, over compute. For PyTorch's hooks: CPU time in the hook "
     "and its callbacks."),
    ("final", "The metric on held-out data at the end: mean ± standard deviation over seeds."),
    ("gap", "Final metric minus torch.fp32's, seeds paired, ± its standard error over seeds and held-out examples "
     "where it is known: a gap of twice that much may well be chance."),
)  # fmt: skip


def write_report(comparison: Comparison, path: Path) -> None:
    """Write `report.html`: one file that loads nothing from anywhere."""
    write_atomically(path, render(comparison))


def render(comparison: Comparison) -> str:
    """The report as HTML."""
    rows, verdict = summarise(comparison), judge(comparison)
    return rendered(
        "comparison.html",
        command="compare",
        task=comparison.task["name"],
        headline=verdict.headline,
        lede=lede(comparison),
        findings=_findings(verdict),
        conditions=_conditions(comparison),
        legend=_legend(comparison),
        loss_time=_lines(comparison, "s"),
        loss_bytes=_lines(comparison, "bytes"),
        bars=_bars(rows),
        headings=headings(comparison),
        rows=[(row.label, [row.method, *cells(row, verdict)]) for row in rows],
        wire_headings=wire_headings(comparison),
        wire_rows=[("", _wire_cells(comparison, row)) for row in rows if row.bytes_per_step is not None],
        failed=[(row.method, row.failure) for row in rows if row.failure],
        efficiency=efficiency_section(comparison, rows, verdict, tones(comparison)),
        columns=COLUMNS,
        notes=notes(comparison, verdict),
    )


# ---------------------------------------------------------------------------------------------- words


def lede(comparison: Comparison) -> str:
    """What was done, in one sentence."""
    seeds = len({run.seed for run in comparison.runs})
    return (
        f"{comparison.task['description'] or comparison.task['name']}; "
        f"{_hosts(comparison.options)}, {_links(comparison.options)}, "
        f"{text.counted(seeds, 'seed')}."
    )


def _hosts(options: Mapping[str, Any]) -> str:
    """How many hosts there are, and ranks on them."""
    if not options.get("nodes"):
        return text.counted(options["hosts"], "host")
    nodes, ranks = parse_nodes(options["nodes"])
    return f"{nodes} nodes of {text.counted(ranks, 'rank')}"


def _links(options: Mapping[str, Any]) -> str:
    """What the links are, and which hosts are slower. Results from before these options have none of them."""
    links = f"links of {', '.join(options.get('rates') or [options['rate']])}"
    links += f" with a round trip of {options['delay']}" if options.get("delay", "0") != "0" else ""
    links += f" that lose {options['loss']} of their frames" if options.get("loss", "0") != "0" else ""
    return links + (f", slow hosts {', '.join(options['slow'])}" if options.get("slow") else "")


def _findings(verdict: Verdict) -> list[tuple[str, str]]:
    """What was found beyond the headline, each with its class."""
    found = [("forbids" if finding.forbids else "caveat", finding.text) for finding in verdict.findings]
    return [*(("", said) for said in verdict.beyond_headline), *found]


def target_note(comparison: Comparison) -> str:
    """What the target is, and how losses are smoothed."""
    target = comparison.target
    if target is not None and target.startswith("metric:"):
        what = f"{comparison.task['metric_name']} of {target.removeprefix('metric:')} on held-out data"
    elif target is not None and not target.startswith("method:"):
        what = f"a training loss of {target}"
    else:
        setter = FP32 if target is None else target.removeprefix("method:")
        what = f"the loss that {setter} ends at with the same seed, to {100 * comparison.tolerance:g} %"
    return f"Target: {what}. Losses are trailing means over {comparison.smoothing} steps and all ranks."


def estimate_note(verdict: Verdict) -> str:
    """Which times are estimated, from what and how well; empty where all are measured."""
    found = verdict.timed_in_part
    if not found:
        return ""
    each = "; ".join(
        f"{one.method} is timed over its first {one.timed_steps} of {one.steps} steps, which tells the time of a step "
        f"with a standard error of {text.percent(100 * one.error)}"
        for one in found
    )
    return (
        f"≈ marks an estimated time: {each}. The other steps were trained without a limit on the links: losses do "
        "not depend on those. --whole-baselines makes every step on the links."
    )


def notes(comparison: Comparison, verdict: Verdict) -> str:
    """What stands below the figures: the target, what was learned, and which times are estimated."""
    return " ".join(said for said in (target_note(comparison), verdict.learned_text, estimate_note(verdict)) if said)


def _conditions(comparison: Comparison) -> list[tuple[str, str]]:
    environment, options = comparison.environment, comparison.options
    length = f"{options['steps']} steps" if options["steps"] else f"{options['minutes']} minutes of training"
    return [
        ("network", f"{environment['network']}{_line_note(comparison)}"),
        ("processor", f"{environment['processor']}, shared by all hosts, one thread of torch each"
         f"{_slow_note(options)}"),
        ("software", f"gradwire {environment['gradwire']}, PyTorch {environment['torch']}, "
         f"Python {environment['python']}, {environment['system']}"),
        ("task", f"{comparison.task['description']}; {length} a run; the same seeds, weights and batches for "
         "each method"),
        _engine(options),
        ("made", f"{environment['created']} by {environment['command']}"),
    ]  # fmt: skip


def _engine(options: Mapping[str, Any]) -> tuple[str, str]:
    """What held the model together. Results from before there was a choice are of DDP."""
    if options.get("engine", "ddp") == "ddp":
        return (
            "buckets",
            f"{options['bucket_mb']:g} MB; one single bucket for torch.powersgd, which crashes on Gloo with two",
        )
    return (
        "engine",
        "FSDP2: a group for each element of the model's module lists, and one for what is left. On a CPU it hides "
        "nothing behind computing: encode and wait are what its gathers and reductions take, compute is the rest. "
        "torch.bf16 computes in bfloat16, too; all others compute in float32",
    )


def _line_note(comparison: Comparison) -> str:
    """What the delay line took from the ranks, and what it lost beyond what was asked for."""
    runs = [run for run in comparison.runs if run.line_cores is not None]
    if not runs:
        return ""
    shares = [100 * (run.line_cores or 0.0) for run in runs]
    missed = sum(run.line_missed for run in runs)
    took = f". The delay line took {mean(shares):.0f} % of a core (at most {max(shares):.0f} %), which the ranks lacked"
    return took + (f"; it was too slow for {text.counted(missed, 'frame')}, which got lost" if missed else "")


def _slow_note(options: Mapping[str, Any]) -> str:
    """What a slow host is here."""
    if not options.get("slow"):
        return ""
    return (
        f". Slow hosts ({', '.join(options['slow'])}) sleep in proportion to the processor time that they use in a "
        "step, for computing and for coding"
    )


# --------------------------------------------------------------------------------------------- charts


def tones(comparison: Comparison) -> dict[str, str]:
    """Colour of each method: neutral for fp32 and the floor, one of the palette, then dashed, for each other."""
    others = [method for method in comparison.methods if method not in (FP32, FLOOR)]
    ours_first = sorted(others, key=lambda method: method.startswith("torch."))
    colours = {m: f"tone{i % COLOURS}{' dashed' * (i // COLOURS % 2)}" for i, m in enumerate(ours_first)}
    return colours | {FP32: "tone-base", FLOOR: "tone-floor"}


def _lines(comparison: Comparison, unit: str) -> tuple[str, str]:
    colours = tones(comparison)
    series = [
        Series(method, colours[method], _points(comparison, method, unit))
        for method in comparison.methods
        if method != FLOOR and comparison.finished(method)
    ]
    sender = "node" if comparison.options.get("nodes") else "rank"
    over = "seconds of training" if unit == "s" else f"bytes sent by each {sender}"
    chart = LineChart(
        title=f"Training loss against {over}",
        series=series,
        unit=unit,
        x_title=over + (" (log scale)" if unit == "bytes" else ""),
        target=_shown_target(comparison),
        y_top=_y_top(comparison),
    )
    return chart.svg(WIDE), chart.svg(NARROW)


def _points(comparison: Comparison, method: str, unit: str) -> list[Point]:
    """Mean line over seeds, step by step, as far as every seed came."""
    runs = comparison.finished(method)
    losses = [smooth(run.losses, comparison.smoothing) for run in runs]
    places = [run.times_s if unit == "s" else run.tx_bytes for run in runs]
    points: list[Point] = []
    for xs, ys in zip(zip(*places, strict=False), zip(*losses, strict=False), strict=False):
        points.append(Point(mean(xs), mean(ys), min(ys), max(ys)))
    # on a logarithmic axis nothing sent has no place
    return [point for point in points if unit == "s" or point.x >= 1]


def _shown_target(comparison: Comparison) -> float | None:
    targets = [target_loss(comparison, seed) for seed in {run.seed for run in comparison.runs}]
    known = [target for target in targets if target is not None]
    return mean(known) if known else None


def _y_top(comparison: Comparison) -> float | None:
    """Where the steep beginning is cut off: at the highest loss after the first twentieth of any run.

    A run that leaves all others behind, upwards, is cut off too: at ten times the height of what the others need.
    """
    runs = [run for run in comparison.runs if run.has_accuracy and run.steps]
    smoothed = [smooth(run.losses, comparison.smoothing) for run in runs]
    rests = [[loss for loss in losses[len(losses) // 20 :] if math.isfinite(loss)] for losses in smoothed]
    rests = [rest for rest in rests if rest]
    if not rests:
        return None
    start = max(rest[0] for rest in rests)
    return min(max(map(max, rests)), start + 10 * (start - min(map(min, rests))))


def _bars(rows: Sequence[Row]) -> tuple[str, str]:
    bars = [
        Bar(row.method, {"compute": row.compute_ms, "encode": row.encode_ms or 0.0, "wait": row.wait_ms or 0.0})
        for row in rows
        if row.compute_ms is not None
    ]
    floor = next((row.step_ms for row in rows if row.method == FLOOR), None)
    title = "Where the time of a step went"
    return bar_svg(title, bars, floor, width=1096), bar_svg(title, bars, floor, width=350)


def _legend(comparison: Comparison) -> list[tuple[str, str]]:
    """Methods whose lines are drawn, each with its colour."""
    colours = tones(comparison)
    return [
        (method, colours[method]) for method in comparison.methods if method != FLOOR and comparison.finished(method)
    ]


# --------------------------------------------------------------------------------------------- tables


def cells(row: Row, verdict: Verdict) -> list[str]:
    """The figures of a method as text, in the order of the table's columns; no speed-up that the verdict forbids."""
    sound = row.loss is not None and verdict.unsound is None
    gains = (row.speed_up, row.speed_up_16bit) if sound else (None, None)
    why_not = verdict.why_not(row.method) if sound else None
    return [
        text.target_time(row),
        *(text.speed_up(gain, why_not) for gain in gains),
        text.si_bytes(row.bytes_per_step),
        text.times(row.ratio),
        text.estimated(row, text.milliseconds(row.step_ms)),
        text.milliseconds(row.compute_ms),
        text.milliseconds(row.encode_ms),
        text.milliseconds(row.wait_ms),
        text.percent(row.overhead_percent),
        text.spread(row.metric),
        text.gap(row.metric_gap, ends.worse_by.error if (ends := verdict.ends.get(row.method)) else None),
    ]


def headings(comparison: Comparison) -> list[str]:
    """Headings of the table's columns."""
    return [
        "method", "to target", "vs fp32", "vs 16 bit", "sent a step", "ratio", "ms a step", "compute", "encode", "wait",
        "overhead", f"final {comparison.task['metric_name']}", "gap",
    ]  # fmt: skip


def wire_headings(comparison: Comparison) -> list[str]:
    """Headings of the table of bytes."""
    return [
        "method", "predicted payload", "DDP's buffers", "anything else", "off by", "framing", "total", "before step 1",
        *(["node to node"] if comparison.options.get("nodes") else []),
    ]  # fmt: skip


def _wire_cells(comparison: Comparison, row: Row) -> list[str]:
    wire, surprise = row.wire, row.wire.surprise
    off = text.NOTHING if surprise is None else f"{100 * surprise:+.2f} %"
    sizes = (wire.payload, wire.buffers, wire.other)
    rest = (wire.framing, wire.total, wire.setup, *([wire.through_link] if comparison.options.get("nodes") else []))
    return [row.method, *map(text.si_bytes, sizes), off, *map(text.si_bytes, rest)]
