"""What the system hands out anew, counted in pages: of tensors, arrays and what compiled code takes, in any thread."""

from __future__ import annotations

import ctypes
import platform
import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager

PAGE = resource.getpagesize()
LARGE = 1 << 16
"""Bytes from which on each allocation is one of the system's while pages are counted."""

CAN_COUNT = platform.libc_ver()[0] == "glibc"

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_HUGE_PAGES_OFF = 41  # PR_SET_THP_DISABLE of prctl(2): a huge page would count as one


@contextmanager
def large_memory_is_fresh() -> Generator[None]:
    """Have malloc ask the system for each large piece, and give it back, so that its pages are touched anew.

    Small pieces stay with malloc. Afterwards both thresholds are the largest that malloc sets them to by itself.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_MMAP, LARGE), "malloc has other options here"
    assert libc.mallopt(_TRIM, 1 << 30)
    assert libc.prctl(_HUGE_PAGES_OFF, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(_HUGE_PAGES_OFF, 0, 0, 0, 0)
        libc.mallopt(_MMAP, 32 << 20)
        libc.mallopt(_TRIM, 64 << 20)


def fresh_bytes(work: Callable[[], object]) -> int:
    """Bytes of the pages that this process touched first while it did `work`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return PAGE * (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
