"""Profiles of hypothesis, one thread for torch, and the option that rewrites golden payloads."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

slow_is_fine = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile(
    "default", max_examples=20, deadline=None, derandomize=True, suppress_health_check=slow_is_fine
)
# HYPOTHESIS_PROFILE=nightly pytest tests/laws: more than 200,000 examples in all, other ones each time.
settings.register_profile("nightly", max_examples=700, deadline=None, suppress_health_check=slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Laws run on small tensors, where a second thread costs more than it gives.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        choices=("check", "new", "replace"),
        default="check",
        help="golden payloads: check them, add those of new codecs, or replace what changed (a new wire format)",
    )
