"""Seconds of a training step, as parts that sum to it."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.parallel.pipelines.bubble import fill_and_drain
from gradwire.planning.data import data_time
from gradwire.planning.hardware import Hardware
from gradwire.planning.layer import Pass, layer_times
from gradwire.planning.layout import ParallelLayout
from gradwire.planning.messages import between_stages
from gradwire.planning.rates import Efficiencies, ReachedRates
from gradwire.planning.replicas import stage_parameters
from gradwire.planning.transformer import Transformer

JITTER = 0.01
"""Standard deviation of the time that equal nodes take for equal work."""


class StepTime(NamedTuple):
    """Seconds of a step; its parts sum to `total`.

    Attributes:
        products: matrix products.
        attention: products of attention's core, or its fused kernel.
        elementwise: what is bound by memory: norms, dropout, softmax, activation functions, the loss.
        recomputation: passes that are computed anew, with their messages.
        tensor: exposed messages of tensor parallelism.
        expert: of expert parallelism.
        context: of context parallelism.
        pipeline: of activations between stages.
        bubble: waiting for the pipeline to fill and to drain, and for its slowest stage.
        host: waiting for the host that starts kernels.
        data: exposed messages of gradients and parameters.
        coding: of gradients by a method, and decoding.
        optimizer: reading and writing parameters, gradients and moments.
        stragglers: waiting for the slowest node.
    """

    products: float
    attention: float
    elementwise: float
    recomputation: float
    tensor: float
    expert: float
    context: float
    pipeline: float
    bubble: float
    host: float
    data: float
    coding: float
    optimizer: float
    stragglers: float

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self)


class StageTimes(NamedTuple):
    """Seconds of one micro-batch in a stage of the pipeline.

    Attributes:
        forward, backward, recomputed: passes through the layers of a stage.
        loss_forward, loss_backward: the output layer and the loss, which only the last stage has.
        transfer: activations and their gradients between stages, both ways.
        host: waiting for the host that starts kernels.
    """

    forward: Pass
    backward: Pass
    recomputed: Pass
    loss_forward: Pass
    loss_backward: Pass
    transfer: float
    host: float

    @property
    def without_loss(self) -> float:
        """Of a stage that is not the last one."""
        return self.forward.total + self.backward.total + self.recomputed.total + self.transfer + self.host

    @property
    def loss(self) -> float:
        """What the last stage takes more."""
        return self.loss_forward.total + self.loss_backward.total


def stage_times(
    model: Transformer, layout: ParallelLayout, on: Hardware, reached: Efficiencies | None = None
) -> StageTimes:
    """Predict what a micro-batch takes in a stage; arguments and errors are those of `step_time`."""
    layout.require(model, on)
    machine = ReachedRates(on, reached or Efficiencies())
    dense = layer_times(model, layout, machine, experts=False)
    expert = layer_times(model, layout, machine, experts=True) if model.expert_layers else dense
    share, layers = model.expert_layers / model.layers, model.layers / layout.pp
    forward, backward, recomputed = (
        a.times(layers * (1 - share)).plus(b.times(layers * share)) for a, b in zip(dense, expert, strict=True)
    )
    loss_forward, loss_backward = _loss(model, layout, machine)
    transfer = _transfer_s(model, layout, machine)
    return StageTimes(forward, backward, recomputed, loss_forward, loss_backward, transfer, host=layers * layout.host_s)


def step_time(
    model: Transformer, layout: ParallelLayout, on: Hardware, reached: Efficiencies | None = None
) -> StepTime:
    """Predict the seconds of a step.

    The pipeline has m micro-batches and p stages of v parts each. Its slowest stage takes m times what a micro-batch
    takes there, and all wait (p - 1)/v times a stage's mean for it to fill and to drain (Narayanan et al. 2021, Section
    2.2).

    Args:
        model, layout, on: what is trained, how it is spread, on which hardware.
        reached: fractions of the hardware's rates; None: those that were fitted to published step times.

    Raises:
        SpecError: a layout that the model or the nodes cannot have.
    """
    times = stage_times(model, layout, on, reached)
    machine = ReachedRates(on, reached or Efficiencies())
    forward, backward, recomputed, loss_forward, loss_backward, transfer, host = times
    busy = forward.plus(backward).plus(loss_forward.times(1 / layout.pp)).plus(loss_backward.times(1 / layout.pp))
    m = layout.micro_batches
    slowest, mean = times.without_loss + times.loss, times.without_loss + times.loss / layout.pp
    bubble = fill_and_drain(layout.pp, layout.interleave) * mean + m * max(0.0, slowest - mean)
    data = data_time(model, layout, machine, forward.total, backward.total + recomputed.total)
    optimizer = _optimizer_s(model, layout, machine)
    nodes = math.ceil(layout.gpus / on.node)
    computing = m * (busy.total + recomputed.total) + data.coding + optimizer
    return StepTime(
        products=m * busy.products,
        attention=m * busy.attention,
        elementwise=m * busy.elementwise,
        recomputation=m * recomputed.total,
        tensor=m * busy.tensor,
        expert=m * busy.expert,
        context=m * busy.context,
        pipeline=m * transfer,
        bubble=bubble,
        host=m * host,
        data=data.exposed,
        coding=data.coding,
        optimizer=optimizer,
        stragglers=computing * JITTER * math.sqrt(2 * math.log(nodes)),
    )


def _loss(model: Transformer, layout: ParallelLayout, machine: ReachedRates) -> tuple[Pass, Pass]:
    """The output layer and the loss, which only the last stage has, forward and backward."""
    tokens, words = layout.micro * model.sequence / layout.cp, model.vocabulary / layout.tp
    product = machine.product_s(tokens, model.hidden, words)
    gradients = machine.product_s(tokens, words, model.hidden) + machine.product_s(model.hidden, tokens, words, 8)
    # logits are read in 2 bytes and written in 4, read for their maximum, read and written for their exponentials
    return (
        Pass(product, 0.0, machine.memory_s(18 * tokens * words)),
        Pass(gradients, 0.0, machine.memory_s(6 * tokens * words)),
    )


def _transfer_s(model: Transformer, layout: ParallelLayout, machine: ReachedRates) -> float:
    """Activations and their gradients between the parts of stages, each rank of `tp` sending its share."""
    share = math.ceil(layout.micro * model.sequence / layout.cp * model.hidden / layout.tp)
    return 2 * layout.interleave * machine.asked_s(between_stages(share, layout.pp, layout.gpus // layout.pp))


def _optimizer_s(model: Transformer, layout: ParallelLayout, machine: ReachedRates) -> float:
    """Adam reads and writes a float32 parameter and two moments and writes the parameter in 2 bytes.

    The gradient is read twice, for its norm and for the step, and set to zero.
    """
    held = stage_parameters(model, layout)
    seconds = 0.0
    for count, replicas in ((held.dense, layout.replicas), (held.expert, layout.expert_replicas)):
        own = count / (1 if layout.sharding == "none" else replicas)
        zeroed = own if layout.sharding in ("gradients", "parameters") else count
        seconds += machine.memory_s(own * (2 * layout.gradient_bytes + 26) + zeroed * layout.gradient_bytes)
    return seconds
