"""Measurements that a busy machine can spoil are made again; a wrong method spoils all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest

ATTEMPTS = 4
QUIET = 2.0
"""Percent of the processors' time that other machines may take in a quiet second."""
PATIENCE_S = 20
"""No longer is waited for a quiet second before the next try."""

Found = TypeVar("Found")


def unspoiled(measure: Callable[[], Found], is_right: Callable[[Found], bool]) -> Found:
    """The first measurement that is right; a failure tells all of them where none is."""
    tried = list[Found]()
    for attempt in range(ATTEMPTS):
        if attempt:
            wait_for_quiet()
        tried.append(measure())
        if is_right(tried[-1]):
            return tried[-1]
    pytest.fail(f"none of {ATTEMPTS} measurements is right: {tried}")


def wait_for_quiet() -> None:
    """Let seconds pass in which other machines on this processor take time from this one, where Linux counts it."""
    deadline = time.monotonic() + PATIENCE_S
    while stolen_in_a_second() > QUIET and time.monotonic() < deadline:
        pass


def stolen_in_a_second() -> float:
    """Percent of the processors' time in the second to come; only Linux has the counter."""
    return getattr(psutil.cpu_times_percent(interval=1), "steal", 0.0)
