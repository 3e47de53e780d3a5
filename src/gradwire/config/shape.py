"""What every configuration is written for: ranks, nodes, batches and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant

PRECISIONS = ("bf16", "fp16", "fp32")
"""What parameters, activations and products may be computed in."""


@dataclass(frozen=True)
class TrainingShape:
    """The size of a training, which is the same for every framework.

    Attributes:
        world_size: how many ranks there are, one for each GPU.
        micro_batch: samples of one rank in one forward pass.
        batch: samples of all ranks in one step of the optimizer; None for one micro-batch of each rank.
        gpus_per_node: how many ranks share a node; None where all of them do.
        precision: what is computed in: "bf16", "fp16" or "fp32".
        reduce: what gradients are summed in over ranks; "fp32" unless it is said.

    Raises:
        SpecError: numbers that are not positive, nodes that are not full, or an unknown precision.

    >>> shape = TrainingShape(world_size=16, micro_batch=4, batch=256, gpus_per_node=8)
    >>> shape.nodes, shape.accumulation()
    (2, 4)
    """

    world_size: int
    micro_batch: int = 1
    batch: int | None = None
    gpus_per_node: int | None = None
    precision: str = "bf16"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("world_size", "micro_batch", "batch", "gpus_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}={value} is no size: give 1 or more")
        for name in ("precision", "reduce"):
            require_one_of(name, getattr(self, name), PRECISIONS)
        if self.reduce not in ("fp32", self.precision):
            raise SpecError(
                f"gradients of {self.precision} cannot be summed in {self.reduce}: give reduce=fp32, "
                f"or reduce={self.precision} for what they are computed in"
            )
        if self.gpus_per_node is not None and self.world_size % self.gpus_per_node:
            raise SpecError(
                f"{self.world_size} ranks do not fill nodes of {self.gpus_per_node} GPUs: give a world size that "
                f"is a multiple of {self.gpus_per_node}, or leave gpus_per_node out"
            )

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return 1 if self.gpus_per_node is None else self.world_size // self.gpus_per_node

    def accumulation(self, model_parallel: int = 1) -> int:
        """Micro-batches of each rank in one step of the optimizer.

        Args:
            model_parallel: ranks that share one copy of the model, and so one micro-batch.

        Raises:
            SpecError: the batch is no multiple of what one micro-batch of all copies has.

        >>> TrainingShape(world_size=8, micro_batch=3, batch=32).accumulation()
        Traceback (most recent call last):
            ...
        gradwire.core.errors.SpecError: a batch of 32 is no multiple of 24, which is 3 samples for each of 8 copies of \
the model: take 24 or 48
        """
        copies = self.world_size // model_parallel
        at_once = self.micro_batch * copies
        steps, rest = divmod(at_once if self.batch is None else self.batch, at_once)
        if rest:
            near = f"{steps * at_once} or {(steps + 1) * at_once}" if steps else f"{at_once}"
            raise SpecError(
                f"a batch of {self.batch} is no multiple of {at_once}, which is {self.micro_batch} samples for each of "
                f"{copies} copies of the model: take {near}"
            )
        return steps


def require_one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a word that is not known.

    Raises:
        SpecError: with the nearest word, or all of them.

    >>> require_one_of("precision", "bf61", PRECISIONS)
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: unknown precision 'bf61': did you mean 'bf16'?
    """
    if value not in known:
        raise SpecError(f"unknown {name} {value!r}: {meant(value, known)}")
