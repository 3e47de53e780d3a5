"""Many runs under seeded plans of faults: `python tests/fault_main.py [--virtual 20000] [--real 200] [--first SEED]`.

Every method of the registry on 2 to 5 virtual ranks, and some on real processes. Prints how many ended how, and every
plan that breaks a promise: no hang, no two survivors with different results of one step, at most one step between them,
every error with its rank, and a run that goes on from what was saved as if nothing had been. The status is then 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from fault_plans import check
from fault_runs import check_real
from laws.subjects import ranks_for, reducers

REDUCERS = reducers()


def check_virtual(seed: int) -> str:
    """Run a method of the registry, each in turn, under the plan of `seed`."""
    spec = list(REDUCERS)[seed % len(REDUCERS)]
    ranks = ranks_for(REDUCERS[spec], random.Random(seed).randrange(2, 6))
    try:
        return check(REDUCERS[spec], ranks, seed)
    except Exception as error:
        raise AssertionError(f"{spec}, {ranks} ranks, seed {seed}: {type(error).__name__}: {error}") from error


def run_all(name: str, run: Callable[[int], str], seeds: range) -> int:
    """Run all seeds; return how many broke a promise."""
    ended: Counter[str] = Counter()
    began, broken = time.monotonic(), 0
    for seed in seeds:
        try:
            ended[run(seed)] += 1
        except AssertionError as error:
            broken += 1
            print(f"BROKEN {error}", flush=True)
    counts = ", ".join(f"{kind} {count}" for kind, count in ended.most_common())
    print(f"{name}: {len(seeds)} plans, {broken} broken, {time.monotonic() - began:.0f} s: {counts}", flush=True)
    return broken


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Many runs under seeded plans of faults.")
    parser.add_argument("--virtual", type=int, default=20_000, help="plans on virtual ranks")
    parser.add_argument("--real", type=int, default=200, help="plans on real processes")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    broken = run_all("virtual", check_virtual, range(options.first, options.first + options.virtual))
    broken += run_all("real", check_real, range(options.first, options.first + options.real))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
