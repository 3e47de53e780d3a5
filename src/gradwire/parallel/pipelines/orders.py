"""What a rank of a pipeline does in its stages, and the order of 1F1B."""

from __future__ import annotations

from itertools import chain
from typing import Literal, NamedTuple

WorkKind = Literal["F", "B", "I", "W"]
"""A forward pass, a whole backward pass, and its two halves: gradients of inputs, and of weights."""


class StageWork(NamedTuple):
    """What a rank does with one micro-batch in one of its stages."""

    kind: WorkKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def one_forward_one_backward(ranks: int, micro_batches: int, parts: int = 1) -> list[list[StageWork]]:
    """Return what each rank does in 1F1B, or, with several stages a rank, in its interleaved form.

    Rank r has the stages r, r + p, ..., r + (v - 1) p. It begins with p - r - 1 forward passes, and with v > 1 with
    2 (p - r - 1) + (v - 1) g. Then each forward pass is followed by a backward pass, and the rest are backward passes.
    Micro-batches go through a stage in groups of g, which is p where p divides m. This is the order in which
    `torch.distributed.pipelining` runs them, and it is computed without PyTorch.

    Args:
        ranks: of the pipeline, p.
        micro_batches: of a step, m.
        parts: stages of each rank, v.

    References:
        Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training"; Narayanan et al. 2021,
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", Section 2.2.

    >>> [" ".join(map(str, works)) for works in one_forward_one_backward(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    group = micro_batches // max(1, micro_batches // ranks)
    places = [
        (part, micro_batch)
        for first in range(0, micro_batches, group)
        for part in range(parts)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    return [_works(rank, ranks, parts, group, places) for rank in range(ranks)]


def _works(rank: int, ranks: int, parts: int, group: int, places: list[tuple[int, int]]) -> list[StageWork]:
    forward = [StageWork("F", part * ranks + rank, micro_batch) for part, micro_batch in places]
    backward = [StageWork("B", (parts - 1 - part) * ranks + rank, micro_batch) for part, micro_batch in places]
    later = ranks - rank - 1
    warm_up = min(later if parts == 1 else 2 * later + (parts - 1) * group, len(places))
    pairs = chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
    return [*forward[:warm_up], *pairs, *backward[len(places) - warm_up :]]
