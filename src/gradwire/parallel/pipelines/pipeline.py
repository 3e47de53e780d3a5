"""A pipeline of one process group: its stages on this rank, its schedule, and what all ranks must agree on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.codecs import Codec
from gradwire.codecs.error_memory import require_contraction
from gradwire.core.errors import SpecError
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.words import gathered_words
from gradwire.parallel.pipelines.codecs import StageCodecs
from gradwire.parallel.pipelines.sample_memory import SampleMemory
from gradwire.parallel.pipelines.schedules import ScheduleShape, schedule_class
from gradwire.parallel.pipelines.stage import Args, CompressedStage

Words = Mapping[str, Any]
"""What a rank says of its part of the pipeline."""


class BubbleWarning(UserWarning):
    """A pipeline that waits longer than it works."""


class Pipeline:
    """A pipeline over the ranks of a group, in which activations and gradients travel by codecs.

    Each rank makes its stages, then the schedule, which is PyTorch's own: its `step` and `eval` are called as ever.
    Losses and outputs are there on the rank of the last stage.

    Args:
        schedule: a name of `SCHEDULES`, in any case.
        micro_batches: that a batch is cut into.
        codec: of activations: a spec such as "int8" or "fp8", or a codec; "none" sends them as they are.
        gradients: of their gradients, likewise; None takes a milder codec, see `milder`.
        parts: stages of each rank; 0 takes the schedule's usual number.
        memory: for activations as changes per sample, where samples have numbers.
        group: of the ranks, one after the other along the pipeline; None for all ranks.
        device: of the tensors.
        seed: of random rounding.

    Raises:
        SpecError, CompositionError: a schedule or a codec that cannot be, with what can.

    Example (two ranks or more, each runs it):
        pipeline = Pipeline("1F1B", micro_batches=8, codec="int8")
        stages = [pipeline.stage(parts[i], i, input_args=inputs[i], output_args=outputs[i]) for i in pipeline.indices]
        schedule = pipeline.schedule(stages, torch.nn.functional.cross_entropy)
        schedule.step(batch) if 0 in pipeline.indices else schedule.step(target=labels, losses=losses)
    """

    def __init__(
        self,
        schedule: str,
        micro_batches: int,
        codec: str | Codec = "none",
        gradients: str | Codec | None = None,
        *,
        parts: int = 0,
        memory: SampleMemory | None = None,
        group: dist.ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
        self.rank = self.group.rank()
        self.shape = ScheduleShape(schedule, self.group.size(), micro_batches, parts)
        self.codecs = StageCodecs.of(codec, gradients)
        self.memory, self.device, self._seed = memory, torch.device(device), seed
        if memory is not None:
            require_contraction(self.codecs.activations)

    @property
    def indices(self) -> list[int]:
        """The stages that this rank has, in the order in which its schedule wants them."""
        return self.shape.stages_of(self.rank)

    def stage(
        self, module: nn.Module, index: int, *, input_args: Args = None, output_args: Args = None, **options: Any
    ) -> CompressedStage:
        """Return a stage of this rank.

        Args:
            module: what it computes. Its inputs are the outputs of the stage before.
            index: of the stage.
            input_args: tensors of the shapes and dtypes of one micro-batch, on the device "meta" or any other.
            output_args: likewise. Without both, PyTorch runs a pass with uninitialised memory to find them.
            options: what else `CompressedStage` takes.

        Raises:
            SpecError: a stage of another rank.
        """
        if index not in self.indices:
            raise SpecError(
                f"stage {index} is not one of rank {self.rank}: under {self.shape.name} it has {self.indices}"
            )
        return CompressedStage(
            module,
            index,
            self.shape.stages,
            self.device,
            self.codecs,
            memory=self.memory,
            seed=self._seed,
            input_args=input_args,
            output_args=output_args,
            group=self.group,
            **options,
        )

    def schedule(
        self, stages: Sequence[CompressedStage], loss_fn: Callable[..., Tensor] | None = None, **options: Any
    ) -> Any:
        """Return PyTorch's schedule for the stages of this rank, once all ranks agree. Every rank must call it.

        Args:
            stages: one for each of `indices`, in their order.
            loss_fn: of an output and a target of one micro-batch; None for a pipeline without backward passes.
            options: of PyTorch's schedule, such as `scale_grads=False` for losses that are sums. With `scale_grads`
                each step divides all gradients by the number of micro-batches, those of earlier steps too: set them to
                zero before each step, or divide by yourself.

        Raises:
            SpecError: on every rank, where ranks have other settings or shapes than their neighbours.
        """
        if [stage.stage_index for stage in stages] != self.indices:
            raise SpecError(f"rank {self.rank} needs the stages {self.indices} in this order")
        self._require_agreement(stages, loss_fn is not None)
        self._tell_bubble()
        chosen = schedule_class(self.shape.runs_as)
        given = stages[0] if self.shape.parts == 1 else list(stages)
        return chosen(given, self.shape.micro_batches, loss_fn, **options)

    def _require_agreement(self, stages: Sequence[CompressedStage], has_loss: bool) -> None:
        words = {
            "settings": {
                "schedule": self.shape.name,
                "micro-batches": self.shape.micro_batches,
                "stages a rank": self.shape.parts,
                "codec of activations": repr(self.codecs.activations),
                "codec of gradients": repr(self.codecs.gradients),
                "memory": None if self.memory is None else repr(self.memory.first),
                "seed": self._seed,
                "loss": has_loss,
            },
            "stages": {str(stage.stage_index): stage.shapes() for stage in stages},
        }
        transport = GroupTransport(self.group)
        try:
            require_alike(gathered_words(words, transport, self.device))
        finally:
            transport.close()

    def _tell_bubble(self) -> None:
        """Fewer micro-batches than ranks are allowed, and ranks wait most of the time."""
        shape = self.shape
        if shape.micro_batches >= shape.ranks or self.rank:
            return
        from gradwire.parallel.pipelines.timeline import computed_timeline

        found = computed_timeline(shape.order)
        warnings.warn(
            f"{shape.micro_batches} micro-batches on {shape.ranks} ranks: ranks wait {found.idle:.0%} of each step, if "
            f"a backward pass takes twice as long as a forward pass; {2 * shape.ranks} micro-batches or more help",
            BubbleWarning,
            stacklevel=3,
        )


def require_alike(said: Sequence[Words]) -> None:
    """Refuse ranks that would send what the next one does not wait for.

    Args:
        said: by each rank, in their order.

    Raises:
        SpecError: what differs, and where.

    >>> one = {"settings": {"codec": "int8"}, "stages": {"0": {"inputs": None, "outputs": ["[2, 3] of float32"]}}}
    >>> other = {"settings": {"codec": "int8"}, "stages": {"1": {"inputs": ["[2, 4] of float32"], "outputs": None}}}
    >>> require_alike([one, other])
    Traceback (most recent call last):
    gradwire.core.errors.SpecError: stage 0 gives [2, 3] of float32, and stage 1 waits for [2, 4] of float32: the \
output_args of a stage must be like the input_args of the next one
    """
    first = said[0]["settings"]
    for rank, words in enumerate(said):
        for name, value in words["settings"].items():
            if value != first[name]:
                raise SpecError(f"ranks disagree on the {name}: rank {rank} has {value}, and rank 0 has {first[name]}")
    shapes = {int(index): of_stage for words in said for index, of_stage in words["stages"].items()}
    for index in sorted(shapes)[:-1]:
        gives, waits = shapes[index]["outputs"], shapes[index + 1]["inputs"]
        if gives is not None and waits is not None and gives != waits:
            raise SpecError(
                f"stage {index} gives {', '.join(gives)}, and stage {index + 1} waits for {', '.join(waits)}: the "
                "output_args of a stage must be like the input_args of the next one"
            )
