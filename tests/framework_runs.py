"""Examples as users start them: on two ranks, with `torchrun`'s variables, and with what every rank said in the end."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gradwire
from gradwire.network.loopback import loopback_environments
from gradwire.ranks.supervised import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
DEADLINE_S = 240
SETTINGS = {
    "PYTHONPATH": str(Path(gradwire.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_RUN_ID": "test",
    "LOCAL_WORLD_SIZE": "2",
    "HF_HUB_OFFLINE": "1",
}


class Said(NamedTuple):
    """What the ranks of a run wrote.

    Attributes:
        logs: all that each of them wrote.
    """

    logs: list[str]

    @property
    def parameters(self) -> list[str]:
        """Fingerprints of what each rank trained."""
        return [found for log in self.logs for found in re.findall(r"has parameters (\w+)", log)]

    @property
    def bytes_sent(self) -> list[tuple[int, int]]:
        """On each rank: by the method, and by fp32."""
        found = [re.findall(r"sent (\d+) bytes where fp32 sends (\d+)", log) for log in self.logs]
        return [(int(sent), int(dense)) for pairs in found for sent, dense in pairs]


def run_two(command: Sequence[str], logs: Path, deadline_s: float = DEADLINE_S) -> Said:
    """Run a Python command line on two ranks."""
    places = [
        {**place, **SETTINGS, "LOCAL_RANK": place["RANK"]}  # one host, two ranks
        for place in loopback_environments(2)
    ]
    run_ranks([[sys.executable, *command]] * 2, places, log_dir=logs, deadline_s=deadline_s)
    return Said([(logs / f"rank{rank}.log").read_text() for rank in range(2)])
