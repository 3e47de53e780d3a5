"""How long the ranks of a pipeline wait for it to fill and to drain, as a formula."""

from __future__ import annotations

from gradwire.core.errors import SpecError


def fill_and_drain(ranks: int, parts: int = 1) -> float:
    """Return how long each rank waits in a step, in units of its own work on one micro-batch: (p - 1) / v.

    The first micro-batch reaches the last rank after p - 1 forward passes, and its gradient comes back after p - 1
    backward passes. With v parts a rank, a pass through one of them takes a v-th of the time (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", Section 2.2).

    Args:
        ranks: of the pipeline, p.
        parts: stages of each rank, v.

    >>> fill_and_drain(4), fill_and_drain(4, 2)
    (3.0, 1.5)
    """
    return (ranks - 1) / parts


def bubble(ranks: int, micro_batches: int, parts: int = 1) -> float:
    """Return what waiting adds to the time of a step, as a share of the work in it: (p - 1) / (v m) for m >= p.

    It holds for GPipe and 1F1B (v = 1), and for LoopedBFS and Interleaved1F1B, where all stages take equally long and
    messages take no time. With m < p a rank has nothing to do until the first micro-batch comes round again, so a step
    takes p v + m - 1 passes of each kind, of which v m are work: (p v - 1 + m - v m) / (v m).

    Args:
        ranks: of the pipeline, p.
        micro_batches: of a step, m.
        parts: stages of each rank, v.

    Raises:
        SpecError: a number below 1.

    References:
        Narayanan et al. 2021, Section 2.2: the bubble time fraction.

    >>> bubble(4, 8), bubble(4, 8, 2), bubble(1, 8), bubble(4, 2), bubble(4, 2, 2)
    (0.375, 0.1875, 0.0, 1.5, 1.25)
    """
    if min(ranks, micro_batches, parts) < 1:
        raise SpecError(
            f"{ranks} ranks, {micro_batches} micro-batches and {parts} stages a rank: there must be at least 1 of each"
        )
    if micro_batches < ranks:
        return (ranks * parts + micro_batches - 1) / (parts * micro_batches) - 1
    return fill_and_drain(ranks, parts) / micro_batches
