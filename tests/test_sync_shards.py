"""`gradwire.sync` over sharded models: two copies on two ranks each."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from gradwire.bench.ranks import run_function
from sync_shards_cases import METHODS

CASES = str(Path(__file__).with_name("sync_shards_cases.py"))


def run(case: str, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", 4, arguments, 240)


@functools.cache
def as_whole() -> list[dict[str, dict[str, Any]]]:
    return run("as_whole", names=list(METHODS))


@pytest.mark.parametrize("method", METHODS)
def test_shards_are_averaged_as_whole_models_are(method: str) -> None:
    for outcome in as_whole():
        found = outcome[method]
        assert found["windows"]
        assert found["moved"] > 0.05
        assert max(found["mid-window"], found["copies"], found["end"]) < 1e-12
    assert len({outcome[method]["digest"] for outcome in as_whole()}) == 1
