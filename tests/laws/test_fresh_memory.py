"""After its second step a method takes no memory of a gradient's size anew, on the whole way of a step.

What is counted are pages that the system hands out: of drivers, ports, process groups, PyTorch and compiled kernels.
What Gloo takes for itself in a collective is measured apart, and left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


# Ports, on one rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["ddp", "unwrapped", "fsdp2"])
@pytest.mark.parametrize("spec", ["int4", "topk:0.01"])
@pytest.mark.draw(3)
def test_a_port_takes_no_gradient_more_than_training_without_it(port: str, spec: str) -> None:
    found = measured("port", port=port, spec=spec)
    assert found["served"] - found["alone"] < 0.5, found
