"""Runs of real processes whose collectives fail by a seeded plan: what must hold of every one of them."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from fault_cases import REQUESTS, STEPS
from gradwire.drivers.faulty import plan_of
from gradwire.ranks.supervised import RankFailure, run_function

CASES = str(Path(__file__).with_name("fault_cases.py"))
SPECS = ("int4", "topk:0.05", "powersgd:2", "median", "none,exchange=ring", "sign", "dp:1", "int8,node=2")
DEADLINE_S = 3.0
"""What a rank waits for another one."""
PATIENCE_S = 90.0


def failure_of(world_size: int, arguments: dict[str, Any]) -> RankFailure | None:
    """Train; return how a process failed, if one did."""
    try:
        run_function(f"{CASES}:train", world_size, arguments, PATIENCE_S)
    except RankFailure as failure:
        return failure
    return None


def check_real(seed: int) -> str:
    """Train on real ranks under the plan of `seed`, check how it went, and return it in a word.

    Raises:
        AssertionError: what does not hold.
    """
    generator = random.Random(seed)
    spec = generator.choice(SPECS)
    world_size = 4 if "node" in spec else generator.choice((2, 3))
    ((at, fault),) = [each for plan in plan_of(seed, world_size, REQUESTS) for each in plan.items()]
    faulty = next(rank for rank, plan in enumerate(plan_of(seed, world_size, REQUESTS)) if plan)
    what = f"{spec}, {world_size} ranks, seed {seed}: {fault.kind} at {at} on rank {faulty}"
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        arguments = {"spec": spec, "seed": seed, "folder": folder, "deadline_s": DEADLINE_S}
        failure = failure_of(world_size, arguments)
        assert failure is None or (fault.kind, failure.rank) == ("die", faulty), f"{what}: {failure}"
        found: dict[int, dict[str, Any]] = {
            rank: json.loads(path.read_text())
            for rank in range(world_size)
            if (path := Path(folder, f"{rank}.json")).exists()
        }
    survivors = set(range(world_size)) - ({faulty} if fault.kind == "die" and faulty not in found else set())
    assert survivors <= set(found), f"{what}: {survivors - set(found)} said nothing"
    steps = [len(each["digests"]) for each in found.values()]
    assert max(steps) - min(steps) <= 1, f"{what}: {steps} steps"
    for digests in zip(*(each["digests"][: min(steps)] for each in found.values()), strict=True):
        assert len(set(digests)) == 1, f"{what}: ranks differ"
    if not any(each["error"] for each in found.values()):
        assert steps == [STEPS] * world_size, f"{what}: {steps} steps"
        return "trained"
    for rank, each in found.items():
        assert each["error"], f"{what}: rank {rank} went on"
        assert rank == faulty or faulty in each["ranks"] or f"rank {faulty}" in each["text"], f"{what}: {each}"
    return fault.kind
