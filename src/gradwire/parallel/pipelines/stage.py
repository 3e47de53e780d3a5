"""A stage of `torch.distributed.pipelining` whose activations and gradients travel by a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradwire.core.errors import SpecError, StepError
from gradwire.core.key import Direction, Key
from gradwire.parallel.pipelines.codecs import StageCodecs
from gradwire.parallel.pipelines.coding import Coder, empty_wire, stateless
from gradwire.parallel.pipelines.sample_memory import SampleMemory
from gradwire.parallel.pipelines.schedules import require_pipelining

Args = Tensor | tuple[Tensor, ...] | None

_Arrival = list[tuple[Tensor, Tensor, Coder]]
"""Of each coded tensor of a micro-batch: what comes, where it is decoded to, and by what."""


class CompressedStage(PipelineStage):
    """A `PipelineStage` that sends activations to the next stage, and gradients back, as payloads of codecs.

    For a boundary between two ranks, with A(n) and G(n) the payload bytes of n elements by the two codecs, a step of m
    micro-batches sends m A(n) bytes forward and m G(n) bytes back; tensors that are no floating-point numbers, and all
    tensors with a lossless codec, are sent as they are. Stages of one rank hand tensors on without coding.

    The receiver computes with C(x) where the sender's output was x, and the gradient of C(x) is taken for that of x
    (straight-through). So a codec that loses nothing gives what one process gives.

    It goes into any schedule of PyTorch, in the place of a `PipelineStage`; all stages of a pipeline must be of this
    class with the same codecs. `Pipeline` makes stages that fit together and checks them.

    Under schedules that split backward passes, PyTorch computes gradients of weights without the hooks that DDP waits
    for. A module in DDP is cured here: when the last gradient is there, a backward pass of zeros lets DDP reduce what
    has been accumulated, with whatever communication hook it has. This overlaps with no other work of the stage.

    Args:
        submodule: what the stage computes.
        stage_index: from 0.
        num_stages: of the pipeline.
        device: of the tensors.
        codecs: of activations and gradients.
        memory: what was sent of each sample, for activations; None for none.
        seed: of random rounding.
        input_args, output_args, output_grads, input_grads, group, dw_builder, get_mesh: as `PipelineStage`. Without
            example inputs and outputs PyTorch runs a pass with uninitialised memory first, which may change counters
            and buffers of the module.

    Attributes:
        sent_bytes: payloads and tensors so far.
        steps: made so far, by which random rounding draws. Set it where a training goes on from a save.

    Raises:
        SpecError: a PyTorch that is too old, or no place for the stage.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        codecs: StageCodecs,
        *,
        memory: SampleMemory | None = None,
        seed: int = 0,
        input_args: Args = None,
        output_args: Args = None,
        output_grads: Args = None,
        input_grads: Args = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Any = None,
    ) -> None:
        require_pipelining()
        if not 0 <= stage_index < num_stages:
            raise SpecError(f"stage {stage_index} of {num_stages}: stages are counted from 0")
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            device,
            input_args=input_args,
            output_args=output_args,
            output_grads=output_grads,
            input_grads=input_grads,
            group=group,
            dw_builder=dw_builder,
            get_mesh=get_mesh,
        )
        self.codecs = codecs
        self.memory = memory
        self.sent_bytes = 0
        self._seed, self.steps = seed, 0
        self._arrivals: dict[tuple[Direction, int], _Arrival] = {}
        self._reduced = False

    def shapes(self) -> dict[str, list[str] | None]:
        """What it was told of the inputs and outputs of a micro-batch, in words; None where it was told nothing."""
        told = {"inputs": self._user_meta.inputs, "outputs": self._user_meta.outputs}
        return {name: None if metas is None else [_shape_of(meta) for meta in metas] for name, metas in told.items()}

    # What is sent and received ---------------------------------------------------------------------------------

    def _key(self, direction: Direction, boundary: int, chunk: int) -> Key:
        """Both ends draw alike: a boundary is called by the stage before it."""
        return Key(seed=self._seed, step=self.steps, layer=f"stage {boundary}", micro_batch=chunk, direction=direction)

    def _coder(self, like: Tensor, direction: Direction, boundary: int, chunk: int, place: int) -> Coder | None:
        """What codes the tensor at a place among a micro-batch's outputs; None where it is sent as it is."""
        if direction == "backward":
            return stateless(self.codecs.gradients, like)
        if self.memory is None:
            return stateless(self.codecs.activations, like)
        if not self.has_backward:  # an evaluation, whose samples nobody has named
            return stateless(self.memory.first, like)
        return self.memory.coder(self.codecs.activations, like, (boundary, place), chunk, self.chunks or 1)

    def _with_payloads(
        self, ops: list[dist.P2POp], direction: Direction, boundary: int, chunk: int
    ) -> list[dist.P2POp]:
        """The messages with payloads in the place of the tensors that are sent."""
        key, made = self._key(direction, boundary, chunk), list[dist.P2POp]()
        for place, op in enumerate(ops):
            coder = self._coder(op.tensor, direction, boundary, chunk, place)
            wire = op.tensor.contiguous() if coder is None else coder.encode(op.tensor, key)
            self.sent_bytes += wire.nbytes
            made.append(dist.P2POp(op.op, wire, op.peer, op.group))
        return made

    def _for_payloads(self, ops: list[dist.P2POp], direction: Direction, boundary: int, chunk: int) -> list[dist.P2POp]:
        """The messages with memory for payloads in the place of the buffers that are received into."""
        made, arrival = list[dist.P2POp](), list[tuple[Tensor, Tensor, Coder]]()
        for place, op in enumerate(ops):
            coder = self._coder(op.tensor, direction, boundary, chunk, place)
            wire = op.tensor if coder is None else empty_wire(coder.nbytes(op.tensor), op.tensor.device)
            made.append(dist.P2POp(op.op, wire, op.peer, op.group))
            if coder is not None:
                arrival.append((wire, op.tensor.detach(), coder))
        self._arrivals[direction, chunk] = arrival
        return made

    def _decode_arrival(self, direction: Direction, boundary: int, chunk: int) -> None:
        """Decode what has come of a micro-batch; nothing has where a stage of the same rank has handed it on."""
        key = self._key(direction, boundary, chunk)
        for wire, buffer, coder in self._arrivals.pop((direction, chunk), ()):
            coder.decode_into(wire, buffer, key)

    @override
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        return self._with_payloads(ops, "forward", self.stage_index, fwd_chunk_id)

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._for_payloads(ops, "forward", self.stage_index - 1, fwd_chunk_id)

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        return self._with_payloads(ops, "backward", self.stage_index - 1, bwd_chunk_id)

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._for_payloads(ops, "backward", self.stage_index, bwd_chunk_id)

    @override
    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        self._decode_arrival("forward", self.stage_index - 1, fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    @override
    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        self._decode_arrival("backward", self.stage_index, bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    @override
    def clear_runtime_states(self) -> None:
        """PyTorch does this at the start of each step."""
        super().clear_runtime_states()
        self.steps += 1
        self._arrivals.clear()
        self._reduced = False

    # What is refused -------------------------------------------------------------------------------------------

    @override
    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        if self.is_first:
            self._require_shapes("is given", args, self._stage_meta.inputs, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            made = output if isinstance(output, tuple | list) else (output,)
            self._require_shapes("gives", made, self._stage_meta.outputs, fwd_chunk_id)
        return output

    def _require_shapes(self, does: str, given: Sequence[Any], expected: Sequence[Any] | None, chunk: int) -> None:
        """Refuse tensors of other shapes than those that the next stage waits for, before they are sent.

        Raises:
            StepError: with both shapes.
        """
        tensors = [x for x in given if isinstance(x, Tensor)]
        if any(not x.numel() for x in tensors):
            raise StepError(
                f"micro-batch {chunk} of stage {self.stage_index} is empty: give each step at least one sample for "
                "each micro-batch"
            )
        found = [_shape_of(x) for x in tensors]
        wanted = [_shape_of(meta) for meta in expected or () if meta is not None]
        if found != wanted:
            raise StepError(
                f"stage {self.stage_index} {does} {', '.join(found)} in micro-batch {chunk}, and the pipeline was set "
                f"up for {', '.join(wanted)}: leave out a last batch that is smaller, or make a new schedule for it"
            )

    # Data parallelism ------------------------------------------------------------------------------------------

    @override
    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """A whole backward pass calls DDP's hooks, half of one does not, so DDP must not wait for them then."""
        whole = backward_type == "full"
        self._reduced |= whole and last_backward
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward and whole)

    @override
    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if isinstance(self.submod, DistributedDataParallel) and not self._reduced:
            reduce_accumulated(self.submod)
        super().perform_reduce_grad(grad_scale_factor)


def reduce_accumulated(module: DistributedDataParallel) -> None:
    """Have DDP reduce the gradients that have been accumulated without it, as after a backward pass.

    A backward pass of zeros adds nothing, and calls the hooks of all parameters.

    Args:
        module: whose parameters have gradients of this rank alone.
    """
    with torch.enable_grad():
        views = [p.view_as(p) for p in module.parameters() if p.requires_grad]
    module.reducer.prepare_for_backward(views)
    torch.autograd.backward(views, [torch.zeros_like(view) for view in views])


def _shape_of(x: Any) -> str:
    """The shape and dtype of a tensor, or of what PyTorch knows of one, in words."""
    return f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
