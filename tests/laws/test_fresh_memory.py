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
from .subjects import reducers

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="malloc of glibc can be told to hide nothing")

CASES = Path(__file__).with_name("fresh_cases.py")


def measured(case: str, **arguments: str) -> Any:
    """What a process of its own finds."""
    return run_function(f"{CASES}:{case}", 1, arguments, 120)[0]


def test_all_kinds_of_memory_are_seen() -> None:
    seen = measured("kinds_of_memory")
    assert min(seen["tensor"], seen["array"], seen["thread"]) >= GRADIENT
    assert seen["nothing"] < GRADIENT // 4


# Two ranks pair up, so neither whole nodes nor rules that want more ranks; the noise of a private mean, and the
# decompositions of `svd`, are LAPACK's and the system's: see the page.
SERVED = {
    spec: reducer
    for spec, reducer in reducers().items()
    if reducer.fewest_ranks <= RANKS and reducer.rank_multiple == 1 and not reducer.private and "svd" not in spec
}


@pytest.mark.parametrize("spec", SERVED)
@pytest.mark.draw(12)
def test_a_step_takes_no_gradient_of_fresh_memory(spec: str) -> None:
    taken = measured("method", spec=spec)
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
