"""What each rank does in the tests of `gradwire.doctor`."""

from __future__ import annotations

import time
from typing import Any

from gradwire.doctor import examine_ranks


def examined(rank: int, world_size: int) -> dict[str, Any]:
    """What the ranks of the default group find, and how long that takes."""
    began = time.monotonic()
    found = examine_ranks()
    return {**found.to_words(), "seconds": time.monotonic() - began}
