"""Profiles of hypothesis, one thread for torch, and the option that rewrites golden payloads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

slow_is_fine = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile(
    "default", max_examples=20, deadline=None, derandomize=True, suppress_health_check=slow_is_fine
)
# HYPOTHESIS_PROFILE=nightly pytest tests/laws: more than 200,000 examples in all, other ones each time.
settings.register_profile("nightly", max_examples=700, deadline=None, suppress_health_check=slow_is_fine)
# of --cases drawn: few examples, other ones with each seed
settings.register_profile("drawn", max_examples=5, deadline=None, database=None, suppress_health_check=slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Laws run on small tensors, where a second thread costs more than it gives.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cases == "drawn" and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("drawn")


TIMED = (
    *("test_compare", "test_compare_sharded", "test_crossover", "test_delay", "test_exchanges", "test_measure"),
    *("test_net", "test_net_exec", "test_probing", "test_routes", "test_run_report", "test_slow", "test_step_time"),
)
"""Tests in which sessions time their link, as they do elsewhere: most of what it takes to make one."""


@pytest.fixture(autouse=True, scope="module")
def links_are_timed_where_times_matter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have sessions of other modules begin without timing their link, in ranks of their own too."""
    with pytest.MonkeyPatch.context() as environment:
        if request.path.stem not in TIMED:
            environment.setenv("GRADWIRE_TIME_LINK", "0")
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        choices=("check", "new", "replace"),
        default="check",
        help="golden payloads: check them, add those of new codecs, or replace what changed (a new wire format)",
    )
