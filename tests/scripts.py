"""Scripts that tests start in processes of their own, with a deadline, and whose messages are shown where they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Script:
    """A process that runs a script; what it says goes to a file."""

    def __init__(self, log: Path, *arguments: object, **environment: str) -> None:
        self.log, self.name = log, " ".join(map(str, arguments))
        variables: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with log.open("wb") as file:
            command = [sys.executable, *map(str, arguments)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=variables)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def status(self, end_s: float) -> int:
        """Wait for its end, and kill it at the deadline."""
        try:
            return self.process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            return -1


def said_by(scripts: list[Script], deadline_s: float) -> list[str]:
    """Wait for all of them; return what each said. Those that were killed by a signal may be."""
    end_s = time.monotonic() + deadline_s
    statuses = [script.status(end_s) for script in scripts]
    told = "\n\n".join(f"--- {script.name}\n{script.said()}" for script in scripts)
    assert -1 not in statuses, f"not done within {deadline_s:g} s:\n{told}"
    assert all(status in (0, -9) for status in statuses), f"ended with {statuses}:\n{told}"
    return [script.said() for script in scripts]


def wait_for(what: Callable[[], bool], deadline_s: float = 150.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end_s, f"nothing happens within {deadline_s:g} s"
        time.sleep(0.1)
