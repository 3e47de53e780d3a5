"""How many bits each layer gets where bytes are limited: the least sum of errors that a budget allows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def allocate(errors: Sequence[Sequence[float]], nbytes: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return which choice each layer takes, by its number.

    Minimise the sum of errors over layers, while the sum of bytes stays within the budget:

        min over c of sum_l errors[l][c_l]    with sum_l nbytes[l][c_l] <= budget

    All layers begin with their first choice, which is the smallest. Then the step that saves the most error a byte is
    taken, from wherever a layer stands to any of its larger choices, until no step fits. Where errors fall ever more
    slowly with bytes, as those of integers do, this is the best there is, but for the bytes that the next step would
    have needed. Where even the first choices take more than the budget, they are what each layer gets.

    Only comparisons and single operations of float64 in a fixed order decide, and ties go to the first layer: equal
    numbers give equal choices on every machine.

    Args:
        errors: of each choice of each layer, such as squared errors; not negative.
        nbytes: of the same, growing from choice to choice.
        budget: bytes of all layers together.

    References:
        Markov et al. 2024, "L-GreCo: Layerwise-adaptive gradient compression for efficient data-parallel deep
        learning", Section 3, has the same problem turned round, the fewest bytes at a limit of errors, and solves it
        by dynamic programming over rounded errors.

    >>> allocate([[9.0, 1.0], [2.0, 1.5]], [[1.0, 2.0], [1.0, 2.0]], budget=3.0)
    [1, 0]
    """
    chosen = [0] * len(errors)
    left = budget - sum(sizes[0] for sizes in nbytes)
    steps = [step for layer in range(len(errors)) if (step := _best(errors, nbytes, layer, 0, left))]
    heapq.heapify(steps)
    while steps:
        _, layer, choice, size = heapq.heappop(steps)
        if size <= left:
            chosen[layer] = choice
            left -= size
        if step := _best(errors, nbytes, layer, chosen[layer], left):
            heapq.heappush(steps, step)
    return chosen


def _best(
    errors: Sequence[Sequence[float]], nbytes: Sequence[Sequence[float]], layer: int, now: int, left: float
) -> tuple[float, int, int, float] | None:
    """The step of a layer that saves the most error a byte, of those that fit: its saving, negative, and its bytes."""
    found: list[tuple[float, int, int, float]] = []
    for choice in range(now + 1, len(errors[layer])):
        size, saved = nbytes[layer][choice] - nbytes[layer][now], errors[layer][now] - errors[layer][choice]
        if saved > 0 and size <= left:
            found.append((-saved / size, layer, choice, size))
    return min(found, default=None)
