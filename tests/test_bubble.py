"""The bubble of pipelines whose stages sleep, which is held to a tenth: this file has the machine to itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining import PipelineStage

from gradwire.parallel.pipelines import ScheduleShape
from gradwire.ranks.supervised import run_function

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not hasattr(PipelineStage, "_warmup_forward_vote"), reason="pipelines need PyTorch 2.13"),
]
CASES = str(Path(__file__).with_name("pipeline_cases.py"))


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.draw(1)
def test_the_bubble_of_stages_that_sleep_is_the_formula(schedule: str) -> None:
    shape = ScheduleShape(schedule, 4, 4)
    assert shape.formula is not None
    arguments = {"schedule": schedule, "micro_batches": 4, "seconds": 0.1 * shape.parts}  # a tenth each
    found = run_function(f"{CASES}:slept", 4, arguments, deadline_s=100)
    assert found[0] == pytest.approx(shape.formula, rel=0.1)
