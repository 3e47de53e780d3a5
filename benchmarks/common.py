"""What the benchmark scripts share: dated result files that say where they come from."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import numpy
import torch

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """The processor's name, from the kernel."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def save_result(name: str, figures: dict[str, Any]) -> Path:
    """Write figures with the date, the hardware and the versions; return the file."""
    RESULTS.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    whole = {
        "benchmark": name,
        "date": today,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        **figures,
    }
    path = RESULTS / f"{name}_{today}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path
