"""Routes over real processes: on every rank the mean that virtual ranks have, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.core.grain import flat_grain
from gradwire.drivers.lockstep import Lockstep
from gradwire.ranks.supervised import run_function
from gradwire.spec import parse
from route_cases import HALVES, digest, tensor

CASES = str(Path(__file__).with_name("route_cases.py"))
SPECS = [f"none,exchange={route}" for route in ("direct", "ring", "tree", "rhd")]
NODES = ["none,exchange=twoshot", "int4,node=2,guard=off,ef=off", "bf16,node=2,exchange=ring", "none,node=2"]
RULES = ["krum:0", "rfa"]
"""What needs totals of the step."""
NUMELS = [0, 1, 7, 300_001]


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize(("ranks", "specs"), [(3, SPECS), (4, SPECS + NODES), (4, RULES)])
def test_processes_have_the_mean_of_virtual_ranks(ranks: int, specs: list[str]) -> None:
    """Sums run in one order whatever carries the messages."""
    by_rank = run_function(f"{CASES}:means", ranks, {"specs": specs, "numels": NUMELS}, 90)
    for spec in specs:
        for numel in NUMELS:
            means = Lockstep(parse(spec), flat_grain(numel), ranks).step([tensor(r, numel) for r in range(ranks)])
            found = [each[f"{spec} {numel}"] for each in by_rank]
            assert found == [digest(means[0])] * ranks, (spec, numel)
        assert {each[f"{spec} batched"] for each in by_rank} == {by_rank[0][f"{spec} {NUMELS[-1]}"]}


def test_processes_end_with_the_shards_of_virtual_ranks() -> None:
    ranks, numel = 3, 10_001
    by_rank = run_function(f"{CASES}:shards", ranks, {"numel": numel}, 60)
    for name, half in HALVES.items():
        shards = Lockstep(half, flat_grain(numel), ranks).step([tensor(rank, numel) for rank in range(ranks)])
        assert [found[name] for found in by_rank] == [digest(shard) for shard in shards]
        assert len({digest(shard) for shard in shards}) == ranks


def test_rounds_that_start_together_stay_apart() -> None:
    results = run_function(f"{CASES}:joined", 3, {}, 60)
    for rank, (from_left, from_right) in enumerate(results):
        assert from_left == [(rank - 1) % 3 + 0.5] * 2
        assert from_right == [(rank + 1) % 3] * 3


@pytest.mark.parametrize("spec", ["none,exchange=auto", "bf16,exchange=auto,node=2"])
@pytest.mark.draw(1)
def test_attach_measures_and_all_ranks_choose_alike(spec: str) -> None:
    first, *others = run_function(f"{CASES}:trained", 4, {"spec": spec}, 90)
    assert all(other["digest"] == first["digest"] and other["curves"] == first["curves"] for other in others)
    assert first["sent"] > 0
    assert len(first["curves"]) == 5
