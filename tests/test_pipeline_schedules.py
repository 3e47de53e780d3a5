"""Schedules without ranks: their plans and bubbles, what is printed and drawn, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from gradwire.cli.main import main
from gradwire.core.errors import SpecError
from gradwire.parallel.pipelines import SCHEDULES, PassTimes, ScheduleShape, bubble, computed_timeline
from gradwire.parallel.pipelines.orders import StageWork, one_forward_one_backward

pytestmark = pytest.mark.skipif(
    not hasattr(PipelineStage, "_warmup_forward_vote"), reason="pipelines need PyTorch 2.13"
)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (3, 12)])
def test_every_stage_passes_every_micro_batch_once(name: str, ranks: int, micro_batches: int) -> None:
    shape = ScheduleShape(name, ranks, micro_batches)
    done = Counter(work for rank in shape.order for work in rank)
    for stage in range(shape.stages):
        for i in range(micro_batches):
            assert done[StageWork("F", stage, i)] == 1
            assert done[StageWork("B", stage, i)] + done[StageWork("I", stage, i)] == 1
            assert done[StageWork("I", stage, i)] == done[StageWork("W", stage, i)]
    assert all(work.stage in shape.stages_of(rank) for rank, works in enumerate(shape.order) for work in works)


def works_of_pytorch(name: str, ranks: int, micro_batches: int, parts: int) -> list[list[StageWork]]:
    """The order as PyTorch plans it.

    Forward passes are numbered anew: PyTorch 2.13 counts those of the last rank of 1F1B from 1 in its plan alone.
    """
    found: list[list[StageWork]] = []
    for actions in get_schedule_ops(name, ranks, micro_batches, parts):
        seen: Counter[tuple[str, int]] = Counter()
        found.append([])
        for action in actions:
            if action is None or action.microbatch_index is None:  # waits, and sums of gradients over replicas
                continue
            kind, stage = "F" if action.computation_type.name == "FORWARD" else "B", action.stage_index
            found[-1].append(StageWork(kind, stage, seen[kind, stage]))
            seen[kind, stage] += 1
            assert kind == "F" or found[-1][-1].micro_batch == action.microbatch_index
    return found


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_order_of_1f1b_is_that_of_pytorch(ranks: int) -> None:
    for micro_batches in range(1, 3 * ranks + 2):
        if micro_batches >= ranks:
            mine = one_forward_one_backward(ranks, micro_batches)
            assert mine == works_of_pytorch("1F1B", ranks, micro_batches, 1)
        if micro_batches % max(1, micro_batches // ranks) == 0:
            for parts in (2, 3):
                mine = one_forward_one_backward(ranks, micro_batches, parts)
                assert mine == works_of_pytorch("Interleaved1F1B", ranks, micro_batches, parts)


def test_a_longer_last_stage_makes_all_others_wait() -> None:
    """The last stage never waits between its passes, which take m (F + B) in all, and the others fill and drain."""
    ranks, micro_batches = 4, 8
    times = [PassTimes(1.0, 2.0, 0.0)] * (ranks - 1) + [PassTimes(1.5, 2.5, 0.0)]
    found = computed_timeline(one_forward_one_backward(ranks, micro_batches), times)
    assert found.busy == [3.0 * micro_batches] * (ranks - 1) + [4.0 * micro_batches]
    assert found.length == 4.0 * micro_batches + (ranks - 1) * (1.0 + 2.0)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([PassTimes()] * 3, "times of 3 stages for an order of 2"),
        (PassTimes(forward=-1.0), "none may be negative"),
        ([PassTimes(), PassTimes(0.0, 0.0, 0.0)], "not all of the passes 0"),
    ],
)
def test_times_that_cannot_be_are_refused(times: PassTimes | list[PassTimes], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        computed_timeline(one_forward_one_backward(2, 2), times)


def test_ranks_that_would_wait_for_each_other_are_told() -> None:
    backwards = [works[::-1] for works in one_forward_one_backward(2, 2)]
    with pytest.raises(SpecError, match="wait for each other"):
        computed_timeline(backwards)


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if not kind.splits])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 8), (4, 2), (8, 16)])
def test_the_formula_is_what_the_plan_gives(name: str, ranks: int, micro_batches: int) -> None:
    shape = ScheduleShape(name, ranks, micro_batches)
    assert computed_timeline(shape.order).bubble == pytest.approx(bubble(ranks, micro_batches, shape.parts))
    assert shape.formula == bubble(ranks, micro_batches, shape.parts)


def test_messages_make_a_step_longer() -> None:
    shape = ScheduleShape("GPipe", 4, 8)
    lengths = [computed_timeline(shape.order, PassTimes(message=each)).length for each in (0.0, 0.5)]
    assert lengths[1] - lengths[0] == pytest.approx(6 * 0.5)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "parts", "said"),
    [
        ("1F1", 4, 8, 0, "unknown schedule '1F1'"),
        ("1F1B", 4, 0, 0, "there must be at least 1 of each"),
        ("GPipe", 4, 8, 2, "GPipe has exactly 1 stages a rank"),
        ("LoopedBFS", 4, 8, 1, "needs 2 or more stages a rank"),
        ("Interleaved1F1B", 3, 7, 0, "take 6 or 9"),
        ("DualPipeV", 4, 6, 0, "as many micro-batches as it has stages, 8"),
    ],
)
def test_schedules_that_cannot_be_are_refused(name: str, ranks: int, micro_batches: int, parts: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ScheduleShape(name, ranks, micro_batches, parts)


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["schedule", "--ranks", "2", "--micro-batches", "2", "--page", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "rank 1  .  F0 B0 -- F1 B1 --" in printed
    assert "50.0%" in printed
    assert page.read_text().count("forward pass of micro-batch") == 2 * 4  # in two widths
    assert main(["schedule", "--schedule", "all", "--json"]) == 0
    assert [each["schedule"] for each in json.loads(capsys.readouterr().out)] == list(SCHEDULES)
    assert main(["schedule", "--schedule", "all", "--page", str(page)]) == 2
    assert "name it by --schedule" in capsys.readouterr().err


def test_parts_are_for_the_schedules_that_can_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", "all", "--parts", "3", "--json"]) == 0
    stages = {each["schedule"]: each["stages"] for each in json.loads(capsys.readouterr().out)}
    assert stages == {name: 4 * (kind.parts if kind.fixed else 3) for name, kind in SCHEDULES.items()}


def test_schedules_that_are_left_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", "all", "--ranks", "4", "--micro-batches", "6"]) == 0
    printed = capsys.readouterr().out
    assert "left out: DualPipeV needs as many micro-batches as it has stages, 8, and there are 6" in printed
    assert printed.count("left out") == 1
    assert main(["schedule", "--schedule", "all", "--parts", "1"]) == 0
    assert capsys.readouterr().out.count("needs 2 or more stages a rank") == 3
    assert main(["schedule", "--schedule", "all", "--ranks", "0"]) == 2
    assert "there must be at least 1 of each" in capsys.readouterr().err
