"""Routes over real processes: the same mean on every rank, and the reference's to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradwire.bench.ranks import run_function

CASES = str(Path(__file__).with_name("route_cases.py"))
SPECS = [f"none,exchange={route}" for route in ("direct", "ring", "tree", "rhd")]
NUMELS = [0, 1, 7, 300_001]


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_have_one_mean(ranks: int) -> None:
    by_rank = run_function(f"{CASES}:means", ranks, {"specs": SPECS, "numels": NUMELS}, 60)
    u = torch.finfo(torch.float32).eps / 2
    for case, (digest, off) in by_rank[0].items():
        assert all(found[case][0] == digest for found in by_rank), case
        # n values of at most 6, each divided by n, and n - 1 sums
        assert off <= 2 * ranks * u * 6, case
