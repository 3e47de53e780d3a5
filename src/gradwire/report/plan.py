"""The page of a plan: what a step of the fastest layouts is spent on, and their passes against time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

from gradwire.core.atomic_file import write_atomically
from gradwire.core.figures import spoken_seconds
from gradwire.parallel.pipelines.orders import StageWork
from gradwire.planning import Efficiencies, ParallelLayout, ScalingPlan
from gradwire.planning.reasons import PlannedLayout
from gradwire.planning.step_time import StageTimes, stage_times
from gradwire.planning.timeline import StepTimeline, step_timeline
from gradwire.report import text
from gradwire.report.bars import Bar, bar_svg
from gradwire.report.rows import PASSES, DrawnBlock, blocks_svg, drawn_rows, pass_blocks, shown_kinds
from gradwire.report.svg import WIDTHS
from gradwire.report.template import rendered

MOST_STAGES = 8
"""Stages of which the passes are drawn."""

PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "norms, activations and the loss",
    "recomputation": "passes computed anew",
    "tensor": "messages of tensor and sequence parallelism",
    "expert": "messages of expert parallelism",
    "context": "messages of context parallelism",
    "pipeline": "messages between stages",
    "bubble": "bubble of the pipeline",
    "host": "waiting for the host",
    "data": "exposed messages of data parallelism",
    "coding": "coding of gradients",
    "optimizer": "optimizer",
    "stragglers": "waiting for the slowest node",
}
"""What the parts of a step are called on the page."""


def write_plan_page(found: ScalingPlan, path: Path, reached: Efficiencies | None = None) -> None:
    """Write a page of one file that loads nothing from anywhere.

    Args:
        found: what the search found.
        path: of the page.
        reached: fractions of the hardware's rates, those of the search.
    """
    write_atomically(path, render(found, reached))


def render(found: ScalingPlan, reached: Efficiencies | None = None) -> str:
    """The page as HTML."""
    named = {f"{place}. {one.layout.says}": one for place, one in enumerate(found.best, 1)}
    bars = [Bar(name, _milliseconds(one.time._asdict())) for name, one in named.items()]
    steps = tuple(bar_svg("What a step is spent on", bars, None, width=width) for width in WIDTHS)
    return rendered(
        "plan.html",
        command="plan",
        task=found.model.name,
        headline=_headline(found),
        lede=_lede(found),
        findings=[("caveat", "Everything on this page is predicted by formulas; nothing of it was measured.")],
        parts=shown_kinds(PARTS, steps),
        steps=steps,
        layouts=[_layout(name, one, found, reached) for name, one in named.items()],
        headings=("layout", "step", "memory", "tokens/s"),
        rows=[("", _cells(one, found)) for one in found.best],
        neighbours=[(one.change, one.why) for one in found.neighbours],
        helps=[(change, f"{spoken_seconds(saved)} less a step") for change, saved in found.helps],
        conditions=_conditions(found),
    )


def _headline(found: ScalingPlan) -> str:
    """What the fastest step takes, and the largest part of it that computes nothing."""
    best = found.best[0].time
    idle = ("tensor", "expert", "context", "pipeline", "bubble", "host", "data", "stragglers")
    largest = max(idle, key=lambda part: getattr(best, part))
    share = getattr(best, largest) / best.total
    took = f"The fastest step takes {spoken_seconds(best.total)}"
    return f"{took}, and {share:.0%} of it is {PARTS[largest]}" if share >= 0.005 else took


def _lede(found: ScalingPlan) -> str:
    model = found.model
    return (
        f"{model.name}, {text.significant(model.parameters / 1e9, 3)} G parameters, {found.batch:,} samples of "
        f"{model.sequence:,} tokens a step, on {found.gpus:,} {found.hardware.name}."
    )


def _conditions(found: ScalingPlan) -> list[tuple[str, str]]:
    return [
        ("layouts tried", f"{found.tried:,}"),
        ("of these fit into memory", f"{found.fitting:,}"),
        ("memory of a GPU", f"{found.hardware.memory_gb:g} GB"),
        ("model FLOPs of the peak (MFU)", f"{found.utilisation:.1%}"),
    ]


def _cells(one: PlannedLayout, found: ScalingPlan) -> list[str]:
    rate = found.batch * found.model.sequence / one.time.total
    memory = f"{one.memory.total / 1e9:.1f} GB"
    return [one.layout.says, spoken_seconds(one.time.total), memory, f"{rate:,.0f}"]


def _layout(name: str, one: PlannedLayout, found: ScalingPlan, reached: Efficiencies | None) -> dict[str, object]:
    """What the page shows of one layout."""
    timeline = step_timeline(found.model, one.layout, found.hardware, reached)
    rows = _stages(one.layout, timeline)
    passes = tuple(blocks_svg(name, rows, "milliseconds", _spoken, width=width) for width in WIDTHS)
    bars = _micro_batch(stage_times(found.model, one.layout, found.hardware, reached))
    title = f"One micro-batch in a stage: {name}"
    parts = tuple(bar_svg(title, bars, None, width=width, each="a micro-batch") for width in WIDTHS)
    return {
        "name": name,
        "timeline": passes,
        "kinds": shown_kinds(PASSES | PARTS, passes),
        "shown": "" if len(rows) == one.layout.pp else f"Drawn are {len(rows)} of {one.layout.pp} stages.",
        "total": spoken_seconds(timeline.total_s),
        "formula": spoken_seconds(one.time.total),
        "order": "1F1B" if one.layout.interleave == 1 else "interleaved 1F1B",
        "micro_batches": text.counted(one.layout.micro_batches, "micro-batch"),
        "bars": parts,
        "parts": shown_kinds(PARTS, parts),
    }


def _stages(layout: ParallelLayout, timeline: StepTimeline) -> dict[str, list[DrawnBlock]]:
    """The passes of each stage that is drawn, and what follows them; the bubble is where there is none."""

    def place(work: StageWork) -> str:
        return f", part {work.stage // layout.pp}" if layout.interleave > 1 else ""

    def short(work: StageWork) -> str:
        return f"{work.micro_batch}" if layout.interleave == 1 else f"{work.stage // layout.pp}.{work.micro_batch}"

    after = _afterwards(timeline)
    return {
        f"stage {stage}": [*pass_blocks(timeline.passes, stage, 1e3, place, short), *after]
        for stage in drawn_rows(layout.pp, MOST_STAGES)
    }


def _afterwards(timeline: StepTimeline) -> list[DrawnBlock]:
    ends = accumulate(timeline.after.values(), initial=timeline.passes.length)
    return [
        DrawnBlock(part, 1e3 * began_s, 1e3 * ended_s, PARTS[part])
        for part, (began_s, ended_s) in zip(timeline.after, pairwise(ends), strict=True)
        if ended_s > began_s
    ]


def _spoken(value: float) -> str:
    return f"{text.milliseconds(value)} ms"


def _micro_batch(times: StageTimes) -> list[Bar]:
    """The passes of a micro-batch through a stage, and what the last stage has more."""
    found = [
        Bar("forward", _milliseconds(times.forward._asdict())),
        Bar("computed anew", _milliseconds(times.recomputed._asdict())),
        Bar("backward", _milliseconds(times.backward._asdict())),
        Bar("output layer", _milliseconds(times.loss_forward.plus(times.loss_backward)._asdict())),
        Bar("to next stages", _milliseconds({"pipeline": times.transfer})),
        Bar("host", _milliseconds({"host": times.host})),
    ]
    return [bar for bar in found if bar.parts]


def _milliseconds(parts: Mapping[str, float]) -> dict[str, float]:
    """Those parts that take any time, in milliseconds."""
    return {name: 1e3 * seconds for name, seconds in parts.items() if seconds > 0}
