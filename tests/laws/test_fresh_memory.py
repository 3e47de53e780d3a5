"""After its second step a method takes no memory of a gradient's size anew, on the whole way of a step.

What is counted are pages that the system hands out: of drivers, ports, process groups, PyTorch and compiled kernels.
What Gloo takes for itself in a collective is measured apart, and left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradwire.core.places import WINDOWS
from gradwire.core.registry import table
from gradwire.ranks.supervised import run_function

from .fresh_cases import CAN_COUNT, GRADIENT, RANKS
from .subjects import ranks_for, reducers

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="malloc of glibc can be told to hide nothing")

CASES = Path(__file__).with_name("fresh_cases.py")


def measured(case: str, **arguments: str | int) -> Any:
    """What a process of its own finds."""
    return run_function(f"{CASES}:{case}", 1, arguments, 120)[0]


def test_all_kinds_of_memory_are_seen() -> None:
    seen = measured("kinds_of_memory")
    assert min(seen["tensor"], seen["array"], seen["thread"]) >= GRADIENT
    assert seen["nothing"] < GRADIENT // 4


# Ranks on threads of one process are no nodes, and the decompositions of `svd` are LAPACK's: see the page.
SERVED = {
    spec: ranks_for(reducer, RANKS if reducer.averages else RANKS + 1)
    for spec, reducer in reducers().items()
    if reducer.rank_multiple == 1 and "svd" not in spec
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", SERVED)
@pytest.mark.draw(12)
def test_a_step_takes_no_gradient_of_fresh_memory(spec: str, dtype: str) -> None:
    taken = measured("method", spec=spec, ranks=SERVED[spec], dtype=dtype)
    # Codecs whose payloads differ in size may meet a larger one than before, so not every single step is empty.
    assert min(taken[2:]) < 0.25, taken
    assert max(taken[2:]) < 1.0, taken


# What keeps the models of all ranks together --------------------------------------------------------------------------


KEPT_TOGETHER = [method.example for method in table().values() if method.place == WINDOWS]
STEPS, LATER = 128, 12
"""How many are made, and how many of the last count: in each example they have a window's end or a later phase."""


@pytest.mark.parametrize("spec", KEPT_TOGETHER)
@pytest.mark.draw(1)
def test_a_window_takes_no_gradient_of_fresh_memory(spec: str) -> None:
    for taken in run_function(f"{CASES}:synchronised", RANKS, {"spec": spec, "steps": STEPS}, 120):
        # A tensor of a gradient's size takes 0.5 at least, in 16 bits; LAPACK takes 0.17 to 0.28 for factors of dion.
        assert max(taken[-LATER:]) < 0.4, taken[-LATER:]


# Ports, on one rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["ddp", "unwrapped", "fsdp2"])
@pytest.mark.parametrize("spec", ["int4", "topk:0.01"])
@pytest.mark.draw(3)
def test_a_port_takes_no_gradient_more_than_training_without_it(port: str, spec: str) -> None:
    found = measured("port", port=port, spec=spec)
    assert found["served"] - found["alone"] < 0.5, found
