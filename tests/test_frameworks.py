"""Each framework's example: few bytes, equal ranks, and an exact resume from the framework's own checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework_runs import EXAMPLES, run_two

CHECKPOINTS = {
    "accelerate": "step-10",
    "lightning": "step=10.ckpt",
    "transformers": "checkpoint-10",
}
"""What each framework calls its checkpoint after ten steps."""
STATES = {
    "accelerate": "step-10/gradwire",
    "lightning": "step=10.ckpt.gradwire",
    "transformers": "checkpoint-10/gradwire",
}
"""Where the states of all ranks are."""


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("framework", CHECKPOINTS)
@pytest.mark.draw(1)
def test_an_example_sends_little_and_resumes_exactly(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    example = str(EXAMPLES / f"train_{framework}.py")
    checkpoints = tmp_path / "checkpoints"
    whole = run_two([example, "--folder", str(checkpoints)], tmp_path / "whole")
    assert len(whole.parameters) == 2
    assert len(set(whole.parameters)) == 1
    assert len(whole.bytes_sent) == 2
    for sent, dense in whole.bytes_sent:
        assert 0 < 5 * sent <= dense
    saves = sorted(path.name for path in (checkpoints / STATES[framework]).glob("gradwire-1/*"))
    assert saves == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]
    resumed = run_two([example, "--resume", str(checkpoints / CHECKPOINTS[framework])], tmp_path / "resumed")
    assert resumed.parameters == whole.parameters
    assert resumed.bytes_sent[0][0] == whole.bytes_sent[0][0] / 2
