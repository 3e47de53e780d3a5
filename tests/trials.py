"""Measurements that a busy machine can spoil are made again; a wrong method spoils all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

ATTEMPTS = 4

Found = TypeVar("Found")


def unspoiled(measure: Callable[[], Found], is_right: Callable[[Found], bool]) -> Found:
    """The first measurement that is right; a failure tells all of them where none is."""
    tried = list[Found]()
    for _ in range(ATTEMPTS):
        tried.append(measure())
        if is_right(tried[-1]):
            return tried[-1]
    pytest.fail(f"none of {ATTEMPTS} measurements is right: {tried}")
