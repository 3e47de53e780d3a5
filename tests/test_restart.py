"""A run whose rank dies is started again by `torchrun` and ends as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.ranks.supervised import run_function

DEADLINE_S = 120
SCRIPT = Path(__file__).with_name("restart_main.py")
ONCE_MORE = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
SETTINGS = {
    "PYTHONPATH": str(Path(gradwire.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else PyTorch's own groups meet addresses of those that ended
}


@pytest.mark.long
def test_a_run_that_torchrun_restarts_ends_as_one_that_was_not_disturbed(tmp_path: Path) -> None:
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    for folder in (whole, restarted):
        folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ONCE_MORE, str(SCRIPT), str(restarted)],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    run_function(f"{SCRIPT}:train", 2, {"home": str(whole)}, DEADLINE_S)
    found = {folder: [(folder / f"end-{rank}").read_text() for rank in range(2)] for folder in (whole, restarted)}
    assert found[restarted] == found[whole]
    assert len(set(found[whole])) == 1
    assert [(restarted / f"began-{rank}").read_text().split() for rank in range(2)] == [["0", "6"]] * 2
    assert [(whole / f"began-{rank}").read_text().split() for rank in range(2)] == [["0"]] * 2
