"""The page of a plan: what a step of the fastest layouts is spent on, and their passes against time."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gradwire.core.atomic_file import write_atomically
from gradwire.core.figures import spoken_seconds
from gradwire.planning import Efficiencies, ScalingPlan
from gradwire.planning.reasons import PlannedLayout
from gradwire.planning.step_time import StageTimes, stage_times
from gradwire.planning.timeline import PipelinePass, StepTimeline, drawn_stages, step_timeline
from gradwire.report import text
from gradwire.report.axes import Scale
from gradwire.report.bars import MOST_LEFT, Bar, across, bar_svg
from gradwire.report.svg import label, shortened, tag, width_of
from gradwire.report.template import rendered

WIDTHS = (1096, 350)
"""Of pictures, in pixels: on a screen, and on a phone."""

MOST_STAGES = 8
"""Stages of which the passes are drawn."""

STAGE_PITCH, PASS_HEIGHT = 24, 16
NARROWEST = 3.0
"""Pixels that a pass needs to be drawn by itself. Narrower ones that follow each other are drawn as one."""

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
    return rendered(
        "plan.html",
        command="plan",
        task=found.model.name,
        headline=_headline(found),
        lede=_lede(found),
        findings=[("caveat", "Everything on this page is predicted by formulas; nothing of it was measured.")],
        parts=_parts_of(bars),
        steps=tuple(bar_svg("What a step is spent on", bars, None, width=width) for width in WIDTHS),
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
    bars = _micro_batch(stage_times(found.model, one.layout, found.hardware, reached))
    shown = drawn_stages(one.layout.pp, MOST_STAGES)
    return {
        "name": name,
        "timeline": tuple(plan_svg(name, timeline, shown, width=width) for width in WIDTHS),
        "shown": "" if len(shown) == one.layout.pp else f"Drawn are {len(shown)} of {one.layout.pp} stages.",
        "total": spoken_seconds(timeline.total_s),
        "formula": spoken_seconds(one.time.total),
        "micro_batches": _micro_batches(one.layout.micro_batches),
        "bars": tuple(
            bar_svg(f"One micro-batch in a stage: {name}", bars, None, width=width, each="a micro-batch")
            for width in WIDTHS
        ),
        "parts": _parts_of(bars),
    }


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


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


def _parts_of(bars: Sequence[Bar]) -> list[tuple[str, str]]:
    """The parts that some bar has, in the order of a step, each with what it is called."""
    return [(part, said) for part, said in PARTS.items() if any(part in bar.parts for bar in bars)]


def plan_svg(title: str, timeline: StepTimeline, stages: Sequence[int], *, width: int) -> str:
    """Draw the passes of some stages against time, and what follows them.

    Args:
        title: of the picture.
        timeline: of the step.
        stages: which to draw.
        width: in pixels.
    """
    top, bottom = 8, 38
    height = top + STAGE_PITCH * len(stages) + bottom
    names = [f"stage {stage + 1}" for stage in stages]
    left = 14 + max(width_of(name) for name in names)
    x = Scale(0.0, 1e3 * timeline.total_s, min(left, MOST_LEFT * width), width - 14)
    body = [tag("title", html.escape(title)), *across(x, "milliseconds", width, top, height - bottom)]
    for place, (name, stage) in enumerate(zip(names, stages, strict=True)):
        y = top + STAGE_PITCH * place + (STAGE_PITCH - PASS_HEIGHT) / 2
        body.append(label(shortened(name, x.start - 10), x.start - 10, y + PASS_HEIGHT - 4, class_="name end"))
        body += _passes(name, timeline.stages[stage], x, y)
        body += _afterwards(name, timeline, x, y)
    return tag("svg", "".join(body), class_="timeline", viewBox=f"0 0 {width} {height}", role="img")


def _passes(name: str, passes: Sequence[PipelinePass], x: Scale, y: float) -> Iterator[str]:
    """The passes of a stage; the bubble is where nothing is drawn."""
    for run in _runs(passes, x):
        first, last = run[0], run[-1]
        if len(run) == 1:
            visit = first.visit
            part = f", part {visit.part + 1}" if any(each.visit.part for each in passes) else ""
            said = f"{visit.direction} pass of micro-batch {visit.micro_batch + 1}{part}"
        else:
            said = f"{len(run)} passes"
        directions = {each.visit.direction for each in run}
        kind = directions.pop() if len(directions) == 1 else "both"
        yield _block(f"{name}: {said}", kind, first.began_s, last.ended_s, x, y)


def _runs(passes: Sequence[PipelinePass], x: Scale) -> Iterator[list[PipelinePass]]:
    """Passes that are drawn together: narrow ones without a wait that could be seen between them."""
    run: list[PipelinePass] = []
    for each in passes:
        narrow = x(1e3 * each.ended_s) - x(1e3 * each.began_s) < NARROWEST
        if run and not (narrow and x(1e3 * each.began_s) - x(1e3 * run[-1].ended_s) < NARROWEST / 6):
            yield run
            run = []
        run.append(each)
        if not narrow:
            yield run
            run = []
    if run:
        yield run


def _afterwards(name: str, timeline: StepTimeline, x: Scale, y: float) -> Iterator[str]:
    at_s = timeline.passes_s
    for part, seconds in timeline.after.items():
        if seconds > 0:
            yield _block(f"{name}: {PARTS[part]}", part, at_s, at_s + seconds, x, y)
        at_s += seconds


def _block(said: str, kind: str, began_s: float, ended_s: float, x: Scale, y: float) -> str:
    start, end = x(1e3 * began_s), x(1e3 * ended_s)
    tip = tag("title", html.escape(f"{said}, {text.milliseconds(1e3 * (ended_s - began_s))} ms"))
    return tag("rect", tip, class_=kind, x=start, y=y, width=max(0.5, end - start), height=PASS_HEIGHT)
