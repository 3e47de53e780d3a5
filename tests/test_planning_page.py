"""The picture of a step: passes on stages obey their order, agree with the closed form, and are drawn on a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gradwire.cli.main import main
from gradwire.parallel.pipelines.orders import StageWork
from gradwire.planning import ParallelLayout, Transformer, hardware, model, plan, step_time
from gradwire.planning.timeline import AFTERWARDS, StepTimeline, step_timeline
from gradwire.report.plan import PARTS, render

A100, GPT3 = hardware("a100-80g"), model("gpt3-175b")
LAYOUTS = (
    ParallelLayout(tp=8, batch=2),
    ParallelLayout(tp=8, pp=4, batch=8),
    ParallelLayout(tp=8, pp=4, batch=2),
    ParallelLayout(tp=8, pp=4, batch=8, interleave=3, recompute="full"),
    ParallelLayout(tp=8, pp=8, dp=2, batch=32, interleave=2, host_s=1e-3),
)


def of(layout: ParallelLayout, sizes: Transformer = GPT3) -> StepTimeline:
    return step_timeline(sizes, layout, A100)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.says)
def test_a_step_that_is_drawn_takes_what_the_closed_form_says(layout: ParallelLayout) -> None:
    alike = replace(GPT3, vocabulary=layout.tp)  # next to no output layer, so all stages take equally long
    assert of(layout, alike).total_s == pytest.approx(step_time(alike, layout, A100).total, rel=1e-3)
    assert of(layout).total_s == pytest.approx(step_time(GPT3, layout, A100).total, rel=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.says)
def test_passes_follow_what_they_depend_on(layout: ParallelLayout) -> None:
    drawn, last = of(layout).passes.ranks, layout.pp * layout.interleave - 1
    at = {span.work: span for passes in drawn for span in passes}
    assert len(at) == 2 * layout.micro_batches * (last + 1)
    for (kind, stage, micro_batch), began_s, ended_s in at.values():
        assert ended_s > began_s
        if kind == "F" and stage:
            assert began_s >= at[StageWork("F", stage - 1, micro_batch)].ended
        if kind == "B":
            before = StageWork("F", stage, micro_batch) if stage == last else StageWork("B", stage + 1, micro_batch)
            assert began_s >= at[before].ended
    for passes in drawn:
        assert all(later.began >= sooner.ended for sooner, later in pairwise(passes))


@pytest.mark.parametrize(("batch", "interleave"), [(8, 1), (2, 1), (8, 3), (4, 3)])
def test_a_stage_holds_as_many_micro_batches_as_the_memory_formula_counts(batch: int, interleave: int) -> None:
    layout = ParallelLayout(tp=8, pp=4, batch=batch, interleave=interleave)
    kept = of(layout).passes.kept  # in parts of stages
    assert kept[0] == pytest.approx(interleave * layout.in_flight)
    assert kept[-1] == pytest.approx(interleave * layout.in_flight_of_last)


def test_every_part_of_a_step_has_its_name_on_the_page() -> None:
    assert tuple(PARTS) == step_time(GPT3, LAYOUTS[0], A100)._fields
    assert set(AFTERWARDS) < set(PARTS)


def test_a_page_escapes_names_and_loads_nothing() -> None:
    mine = Transformer("<b>&mine", layers=24, hidden=2048, heads=16, vocabulary=32_000, sequence=2048)
    page = render(plan(mine, A100, gpus=16, batch=64, show=2))
    assert "&lt;b&gt;&amp;mine" in page
    assert "<b>&mine" not in page
    assert not re.search(r'(src|href)="|url\(|@import', page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 2 * (1 + 2 * 2)  # in two widths: the steps, and of each layout a timeline and a micro-batch
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    asked = ["plan", "--model", "gpt3-22b", "--hardware", "a100-80g", "--batch", "64", "--page", str(page)]
    assert main([*asked, "--gpus", "16", "--show", "1"]) == 0
    assert "plan.html" in capsys.readouterr().out.replace("\n", "")
    assert "The step against time" in page.read_text()
    assert main([*asked, "--scale", "8..16"]) != 0
    assert "--page goes with --gpus" in capsys.readouterr().err
