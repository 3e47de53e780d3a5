"""Memory of a GPU: parameters, gradients, optimizer, activations, and what the software itself takes."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.planning.gradients import BUFFER_BYTES
from gradwire.planning.layout import ParallelLayout
from gradwire.planning.replicas import StageParameters, data_groups, stage_parameters, traffic_of
from gradwire.planning.transformer import Transformer

RUNTIME_BYTES = 6e9
"""CUDA's context and libraries (about 1.5 GB), NCCL's buffers for the groups of a layout, and buckets (2 GB)."""
FRAGMENTATION = 0.1
"""Of activations: what the caching allocator holds and cannot use, and what gradients of activations take."""
PARAMETER_BYTES, FLOAT32_BYTES, MOMENTS_BYTES = 2, 4, 8
"""Of a parameter: as it is computed with, the float32 copy that the optimizer changes, and Adam's two moments."""
LOGIT_BYTES, FUSED_LOGIT_BYTES = 12, 2
"""Of a logit while the loss's backward pass runs: its logarithmic probability and the gradients of both, in float32; or
16 bits, which a fused loss overwrites with the gradient."""
GLOBAL_COPY_BYTES = 4
"""Of a parameter: what replicas agreed on when they were last averaged."""


class DeviceMemory(NamedTuple):
    """Bytes that the fullest GPU of a layout needs, by kind.

    Attributes:
        parameters, gradients, optimizer: state of training. The float32 copy of parameters is the optimizer's, but for
            those of FSDP2, which are this copy.
        activations: kept until the backward pass.
        working: what one layer and the loss need while they are computed.
        runtime: of the software itself.
        method: what a method for gradients holds, and the copies that averaged replicas keep.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    runtime: float
    method: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def device_memory(model: Transformer, layout: ParallelLayout) -> DeviceMemory:
    """Return what the fullest GPU needs: one of the first stage, which holds most micro-batches, or of the last.

    Activations of a layer are Table 2 of Korthikanti et al. (2022), written for any width, key heads and experts:
    s b h (10 + 24/t + 5 a s/(h t)) with dropout and tensor parallelism, all of it over t with sequence parallelism.
    With full recomputation they are 2 s b h, and those of one layer while it is computed anew.

    Args:
        model: whose.
        layout: how it is spread.
    """
    first = _stage_memory(model, layout, last=False)
    return max(first, _stage_memory(model, layout, last=True), key=lambda found: found.total)


def _stage_memory(model: Transformer, layout: ParallelLayout, last: bool) -> DeviceMemory:
    held = stage_parameters(model, layout)
    stage = ((held.dense, layout.replicas), (held.expert, layout.expert_replicas))

    def kept_bytes(size: int, split: bool) -> float:
        return sum(count * size / (replicas if split else 1) for count, replicas in stage)

    in_flight = layout.in_flight_of_last if last else layout.in_flight
    layers = model.layers / layout.pp
    mean = layer_activations(model, layout)
    kept = layers * in_flight * mean.kept
    # while the backward pass is in a layer, its values and their gradients are there
    working = 2 * mean.working
    if last or layout.pp == 1:
        # given back before the backward pass comes to a layer
        logit_bytes = FUSED_LOGIT_BYTES if layout.fused_loss else LOGIT_BYTES
        logits = layout.micro * model.sequence / layout.cp * model.vocabulary / layout.tp
        working = max(working, logit_bytes * logits)
    if layout.sharding == "parameters":
        # the layer that computes and the next one are gathered, and one has its whole gradient
        largest = max((held.dense + held.expert) / layers, model.embedding_parameters / layout.tp)
        working += (2 * PARAMETER_BYTES + layout.gradient_bytes) * largest
    parameter_bytes, optimizer_bytes = PARAMETER_BYTES, FLOAT32_BYTES + MOMENTS_BYTES
    if layout.sharding == "parameters" and layout.gradient_bytes == FLOAT32_BYTES:
        # FSDP2 gathers float32 shards in 2 bytes and keeps no other copy; ZeRO's stage 3 does, and has gradients of 2
        parameter_bytes, optimizer_bytes = FLOAT32_BYTES, MOMENTS_BYTES
    return DeviceMemory(
        parameters=kept_bytes(parameter_bytes, layout.sharding == "parameters"),
        gradients=kept_bytes(layout.gradient_bytes, layout.sharding in ("gradients", "parameters")),
        optimizer=kept_bytes(optimizer_bytes, layout.sharding != "none"),
        activations=kept * (1 + FRAGMENTATION),
        working=working * (1 + FRAGMENTATION),
        runtime=RUNTIME_BYTES,
        method=_method_bytes(model, layout, held),
    )


def _method_bytes(model: Transformer, layout: ParallelLayout, held: StageParameters) -> float:
    """States of a method and the buffers of its gradients; averaged replicas keep the last average too."""
    kept = 0.0
    for group in data_groups(model, layout, held):
        if group.size == 1 or (layout.method == "none" and layout.every == 1):
            continue
        if layout.every > 1:
            kept += group.parameters * GLOBAL_COPY_BYTES
        state = traffic_of(layout, group).state_bytes
        # where gradients are sharded, a buffer is given back after its layer, unless a residual lies in it
        kept += group.parameters * (state + (BUFFER_BYTES if state or layout.sharding == "none" else 0))
    return kept


class LayerActivations(NamedTuple):
    """Bytes of activations of one layer and one micro-batch: kept until its backward pass, and in that pass."""

    kept: float
    working: float


def layer_activations(model: Transformer, layout: ParallelLayout) -> LayerActivations:
    """Return the bytes of a layer, the mean of layers with and without experts."""
    tokens, t = layout.micro * model.sequence / layout.cp, layout.tp
    share = model.expert_layers / model.layers
    inside = 6 if model.gated else 4
    widths = (1 - share) * (model.dense_width if model.experts else model.width)
    widths += share * (model.chosen * model.width + model.shared_inner)
    inputs = 4 + 2 + 2 * ((1 - share) + share * max(1, model.chosen))
    replicated = tokens * model.hidden * (inputs + (2 if layout.dropout else 0))
    if layout.sequence_parallel:
        replicated /= t
    attention = tokens * model.head * (4 * model.heads + 4 * model.keys) / t
    feed_forward = tokens * inside * widths / t
    scores = 0.0 if layout.flash else (5 if layout.dropout else 2) * tokens * model.sequence * model.heads / t
    without_scores = replicated + attention + feed_forward
    if layout.recompute == "full":
        kept = 2 * tokens * model.hidden / (t if layout.sequence_parallel else 1)
        return LayerActivations(kept, without_scores + scores)
    if layout.recompute == "selective":
        return LayerActivations(without_scores, scores)
    return LayerActivations(without_scores + scores, 0.0)
