"""Tests that need network namespaces leave out what cannot be made here."""

from __future__ import annotations

from typing import Literal

import pytest

from gradwire.core.errors import NetworkError
from gradwire.network import Network


def needs_namespaces(mode: Literal["root", "user"] = "user") -> None:
    """Skip the test where this way of making a network is closed."""
    try:
        with Network(1, "100mbit", mode=mode):
            pass
    except NetworkError as error:
        pytest.skip(f"no {mode} network here: {error}")
