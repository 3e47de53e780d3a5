"""When a rank failed, by the clock that all processes of a machine share.

A rank that fails breaks the connections of the others, which then fail as well. Whoever watches them may learn of these
ends in another order. So a rank notes the time of its exception before its connections close.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "GRADWIRE_MOMENT"
"""Names the file that gets the time. Processes that no `run_ranks` watches do without."""


def note() -> None:
    """Write the time down. Whatever stops that must not hide the exception itself."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        Path(path).write_text(str(time.monotonic_ns()))
    except OSError:
        return


def read(path: Path) -> int | None:
    """The time in nanoseconds that `note` has written to `path`; None if it has not, or not all of it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
