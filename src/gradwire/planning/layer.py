"""Seconds of one layer on one GPU, for one micro-batch: products, attention, what reads memory, messages."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.planning.layout import ParallelLayout
from gradwire.planning.messages import hop_of_keys, layer_of_experts, layer_of_tensors
from gradwire.planning.rates import ReachedRates
from gradwire.planning.transformer import Transformer


class Pass(NamedTuple):
    """Seconds of a pass through a layer, by what they are spent on."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self)

    def times(self, count: float) -> Pass:
        """That of so many passes."""
        return Pass(*(count * part for part in self))

    def plus(self, other: Pass) -> Pass:
        """That of one pass and another."""
        return Pass(*(a + b for a, b in zip(self, other, strict=True)))


class LayerTimes(NamedTuple):
    """Seconds of the passes of one layer."""

    forward: Pass
    backward: Pass
    recomputed: Pass

    @property
    def total(self) -> Pass:
        """Of all passes."""
        return self.forward.plus(self.backward).plus(self.recomputed)


def layer_times(model: Transformer, layout: ParallelLayout, machine: ReachedRates, experts: bool) -> LayerTimes:
    """Return what the passes of a layer take.

    A backward pass has two products for each of the forward pass, of the gradient with the weights and with the inputs.

    Args:
        model, layout, machine: what is trained, how it is spread, on what.
        experts: whether it is a layer with experts.
    """
    tokens = layout.micro * model.sequence / layout.cp
    shapes = _shapes(model, layout, tokens, experts)
    forward_products = sum(count * machine.product_s(*shape) for shape, count in shapes)
    backward_products = sum(count * _backward_s(machine, layout, *shape) for shape, count in shapes)
    core, core_backward, core_bytes, core_backward_bytes = _attention(model, layout, machine, tokens)
    bytes_forward, bytes_backward = _elementwise(model, layout, tokens, experts)
    tensor = _tensor_s(model, layout, machine, tokens, experts)
    expert = _expert_s(model, layout, machine, tokens) if experts else 0.0
    ring, ring_backward = _ring_s(model, layout, machine, tokens, core, core_backward)
    core_memory = machine.memory_s(core_bytes)
    forward = Pass(forward_products, core, machine.memory_s(bytes_forward) + core_memory, tensor, expert, ring)
    backward = Pass(
        backward_products,
        core_backward,
        machine.memory_s(bytes_backward + core_backward_bytes),
        tensor,
        expert,
        ring_backward,
    )
    recomputed = Pass()
    if layout.recompute == "full":
        recomputed = forward
    elif layout.recompute == "selective" and not layout.flash:
        recomputed = Pass(attention=core, elementwise=core_memory)
    return LayerTimes(forward, backward, recomputed)


Shape = tuple[float, float, float]


def _shapes(model: Transformer, layout: ParallelLayout, tokens: float, experts: bool) -> list[tuple[Shape, float]]:
    """The products of a forward pass as m x k times k x n, and how many of each."""
    h, t = model.hidden, layout.tp
    queries, keys = model.heads * model.head / t, max(1.0, model.keys / t) * model.head
    up = 2 if model.gated else 1
    shapes: list[tuple[Shape, float]] = [((tokens, h, queries + 2 * keys), 1), ((tokens, queries, h), 1)]
    if not experts:
        inner = (model.dense_width if model.experts else model.width) / t
        return [*shapes, ((tokens, h, up * inner), 1), ((tokens, inner, h), 1)]
    if model.shared_inner:
        inner = model.shared_inner / t
        shapes += [((tokens, h, up * inner), 1), ((tokens, inner, h), 1)]
    if layout.ep > 1:  # whole experts, and each rank has its share of the tokens
        local, inner = model.experts / layout.ep, float(model.width)
        rows = tokens / t * model.chosen / local
    else:
        local, inner = float(model.experts), model.width / t
        rows = tokens * model.chosen / local
    # the experts of a rank are one grouped product, so that its tiles fill the multiprocessors together
    return [*shapes, ((rows * local, h, up * inner), 1), ((rows * local, inner, h), 1)]


def _backward_s(machine: ReachedRates, layout: ParallelLayout, m: float, k: float, n: float) -> float:
    """Of the gradients of inputs and of weights; the latter are added to what micro-batches before left."""
    return machine.product_s(m, n, k) + machine.product_s(k, m, n, 2 * layout.gradient_bytes)


def _attention(
    model: Transformer, layout: ParallelLayout, machine: ReachedRates, tokens: float
) -> tuple[float, float, float, float]:
    """Seconds of attention's products forward and backward, and bytes of what else its core reads and writes."""
    heads, s, d = model.heads / layout.tp, model.sequence, model.head
    flops = 4 * tokens * s * heads * d
    if layout.flash:  # causal: half of the scores; the backward pass has five products for two (Dao 2023)
        seconds = flops / 2 / machine.attention_flops_per_s
        return seconds, 2.5 * seconds, 0.0, 0.0
    scores = tokens * s * heads
    one = max(flops / 2 / machine.flops_per_s, machine.memory_s(2 * (2 * tokens * heads * d + scores)))
    masks = 1 if layout.dropout else 0
    # softmax with its mask reads and writes scores once, and so does dropout, with a mask of a byte
    return 2 * one, 4 * one, scores * (4 + 5 * masks), scores * (6 + 5 * masks)


def _elementwise(model: Transformer, layout: ParallelLayout, tokens: float, experts: bool) -> tuple[float, float]:
    """Bytes that norms, dropout, residual sums and activation functions read and write, forward and backward."""
    replicated = tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    mask = 1 if layout.dropout else 0
    # two norms (read, write), two sums with the residual (read two, write one)
    stream, stream_backward = 2 * (4 + 6 + mask), 2 * (6 + 6 + mask)
    rows, width = tokens, float(model.dense_width if model.experts and not experts else model.width)
    forward = stream * replicated
    backward = stream_backward * replicated
    if experts:
        rows = tokens * model.chosen
        moved = rows * model.hidden / layout.tp  # tokens are put in the order of experts, and back
        forward, backward = forward + 8 * moved, backward + 8 * moved
    inner = rows * width / layout.tp
    if experts:
        inner += tokens * model.shared_inner / layout.tp
    activation, activation_backward = (6, 10) if model.gated else (4, 6)
    return forward + activation * inner, backward + activation_backward * inner


def _tensor_s(model: Transformer, layout: ParallelLayout, machine: ReachedRates, tokens: float, experts: bool) -> float:
    """All-reduces after attention and after the feed-forward part (Shoeybi et al. 2019), or what they are split into.

    Whole experts take tokens that are split over ranks already, so their layers have only attention's.
    """
    count = 1 if experts and layout.ep > 1 and not model.shared_inner else 2
    return machine.asked_s(layer_of_tensors(math.ceil(tokens * model.hidden), count, layout.tp))


def _expert_s(model: Transformer, layout: ParallelLayout, machine: ReachedRates, tokens: float) -> float:
    """Two all-to-alls: tokens to their experts, and back."""
    own = math.ceil(tokens / layout.tp)
    node = machine.hardware.node if layout.dispatch == "once_a_node" else 0
    return machine.asked_s(layer_of_experts(own, model.hidden, model.chosen, model.experts, layout.ep, node))


def _ring_s(
    model: Transformer, layout: ParallelLayout, machine: ReachedRates, tokens: float, core: float, backward: float
) -> tuple[float, float]:
    """What is left of a ring of keys and values behind the attention of each hop (Liu et al. 2023), each way."""
    hops = layout.cp - 1
    if not hops:
        return 0.0, 0.0
    keys = max(1.0, model.keys / layout.tp) * model.head
    hop = machine.asked_s(hop_of_keys(math.ceil(tokens * keys), layout.cp, layout.tp))
    return hops * max(0.0, hop - core / layout.cp), hops * max(0.0, 2 * hop - backward / layout.cp)
