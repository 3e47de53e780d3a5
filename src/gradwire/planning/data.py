"""Seconds of data parallelism: gradients and parameters, by which method, how often, and how much of it is hidden."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.planning.layout import ParallelLayout
from gradwire.planning.rates import ReachedRates
from gradwire.planning.replicas import DataGroup, data_groups, stage_parameters, traffic_of
from gradwire.planning.transformer import Transformer


class DataTime(NamedTuple):
    """Seconds that gradients and parameters add to a step: on links, and by coding."""

    exposed: float
    coding: float


def data_time(
    model: Transformer, layout: ParallelLayout, machine: ReachedRates, forward_s: float, backward_s: float
) -> DataTime:
    """Return what gradients and parameters add to a step.

    Where they overlap, gradients are sent during the backward pass of the last micro-batch, and parameters are gathered
    during the forward pass of the first. Sharded parameters are gathered for both passes of each micro-batch, and
    gradients sharded during accumulation are sent in each. Coding takes the GPU from the backward pass, so it is not
    hidden, and neither is what averages replicas.

    Args:
        model, layout, machine: what is trained, how it is spread, on what.
        forward_s, backward_s: that a micro-batch takes in a stage.
    """
    groups = data_groups(model, layout, stage_parameters(model, layout))
    m, layers = layout.micro_batches, model.layers / layout.pp  # each layer is a message
    gather = sum(machine.gather_s(2 * each.parameters, each.size, each.stride, layers) for each in groups)
    reduce = sum(_gradients_s(layout, each, machine, layers) for each in groups)
    times = m if layout.sharding in ("gradients", "parameters") else 1
    sent, hidden = [reduce * times], [backward_s * times]
    if layout.every > 1:
        sent = [sum(_within_s(layout, each, machine, layers) for each in groups)]
    elif layout.sharding == "parameters":
        sent, hidden = [m * gather, m * (gather + reduce)], [m * forward_s, m * backward_s]
    elif layout.sharding != "none":
        sent, hidden = [gather, *sent], [forward_s, *hidden]
    exposed = _tied_s(model, layout, machine) + (reduce / layout.every if layout.every > 1 else 0.0)
    if layout.overlap:
        # the last layer's gradients, and the first one's parameters, have nothing to hide behind
        left = layout.pp / model.layers
        exposed += sum(max(left * each, each - behind) for each, behind in zip(sent, hidden, strict=True))
    else:
        exposed += sum(sent)
    return DataTime(exposed, sum(_coding_s(layout, each, machine) for each in groups) * times / layout.every)


def _gradients_s(layout: ParallelLayout, group: DataGroup, machine: ReachedRates, layers: float) -> float:
    """Of the gradients of a group, once, or of the parameters that are averaged, which have 4 bytes."""
    nbytes = (layout.gradient_bytes if layout.every == 1 else 4) * group.parameters
    if layout.method == "none" and layout.sharding == "none":
        return machine.all_reduce_s(nbytes, group.size, group.stride)
    if layout.method == "none":
        return machine.gather_s(nbytes, group.size, group.stride, layers)
    return sum(
        machine.collective_s(request, group.size, group.stride, each * group.parameters, layers)
        for request, each in traffic_of(layout, group).requests
    )


def _within_s(layout: ParallelLayout, group: DataGroup, machine: ReachedRates, layers: float) -> float:
    """Of the gradients that the ranks of one replica add up in each step."""
    size, stride = group.within
    return machine.all_reduce_s(layout.gradient_bytes * group.parameters, size, stride, layers)


def _tied_s(model: Transformer, layout: ParallelLayout, machine: ReachedRates) -> float:
    """The first and the last stage add up their gradients of the shared embedding."""
    if not model.tied or layout.pp == 1:
        return 0.0
    nbytes = layout.gradient_bytes * model.embedding_parameters / layout.tp
    return machine.all_reduce_s(nbytes, 2, layout.gpus - layout.gpus // layout.pp)


def _coding_s(layout: ParallelLayout, group: DataGroup, machine: ReachedRates) -> float:
    """Of the gradients of a group, once: at the rate that is given, or as memory reads and writes what coding needs."""
    if layout.method == "none" or group.size == 1:
        return 0.0
    if machine.hardware.coding_gb_per_s is not None:
        return 4 * group.parameters / (machine.hardware.coding_gb_per_s * 1e9)
    return machine.memory_s(traffic_of(layout, group).coding_bytes * group.parameters)
