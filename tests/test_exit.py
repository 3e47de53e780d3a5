"""Scripts that end while a thread of gradwire's is inside of C++ end as they would without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("exit_cases.py")


@pytest.mark.parametrize("case", ["connecting", "serving"])
@pytest.mark.parametrize(("ending", "status"), [("3", 3), ("raises", 1)])
@pytest.mark.draw(1)
def test_the_exit_status_is_that_of_the_script(case: str, ending: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, str(CASES), case, ending], capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == status, ended.stderr
    assert ("ValueError: the script's own" in ended.stderr) == (ending == "raises")
    assert "terminate called" not in ended.stderr
    assert ended.stdout.strip() in {"given up", "computing"}
