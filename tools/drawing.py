"""Which cases of a test the short test command runs: few that have every value of every parameter in them.

A law is parametrized by method, by dtype and by kind of input, and the whole product of these is for `make test-all`.
The short command draws some of it by a seed, so that other cases come with other commits. A test of one parameter is
never cut, unless it says so with the marker `draw`.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Case = Mapping[str, int]
"""Something that tells the values of each parameter apart."""

ALWAYS = Path(__file__).resolve().parent.parent / "tests" / "always.txt"
"""Cases that a draw has found failing once, one test ID in a line: every draw has them."""


def covering(cases: Sequence[Case], seed: str) -> list[int]:
    """Places of few cases that together have every value of every parameter.

    Each next case is the one with the most values that are still missing; of equal ones the seed decides.

    >>> cases = [{"method": m, "dtype": d} for m in range(5) for d in range(3)]
    >>> drawn = [cases[place] for place in covering(cases, "0")]
    >>> len(drawn), {case["method"] for case in drawn}, {case["dtype"] for case in drawn}
    (5, {0, 1, 2, 3, 4}, {0, 1, 2})
    """
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    missing = {pair for case in cases for pair in case.items()}
    drawn: list[int] = []
    while missing:
        best = max(order, key=lambda place: sum(pair in missing for pair in cases[place].items()))
        drawn.append(best)
        missing -= cases[best].items()
    return sorted(drawn)


def some(cases: Sequence[object], count: int, seed: str) -> list[int]:
    """Places of `count` cases, or of all where there are no more."""
    return sorted(random.Random(seed).sample(range(len(cases)), min(count, len(cases))))


def one_in(count: int, seed: str) -> bool:
    """Whether a test runs that does so with one seed of `count`.

    >>> sum(one_in(3, f"{seed} a test") for seed in range(3000)) / 1000
    1.021
    """
    return random.Random(seed).randrange(count) == 0


def always() -> frozenset[str]:
    """The test IDs in `tests/always.txt`."""
    lines = ALWAYS.read_text().splitlines() if ALWAYS.exists() else []
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def seed_of_commit(root: Path) -> int:
    """A seed that is the same for everybody at one commit; 0 without git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=7", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(found.stdout, 16)
