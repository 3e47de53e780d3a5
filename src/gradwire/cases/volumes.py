"""Bytes that a GPU sends in one step of a transformer, by the kind of parallelism that sends them."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.planning import Hardware, ParallelLayout, Transformer
from gradwire.planning.memory import PARAMETER_BYTES, stage_parameters


class Volume(NamedTuple):
    """What one GPU sends in a step for one kind of parallelism.

    Attributes:
        kind: "tensor", "sequence", "expert", "context", "pipeline", "data", "parameters", "embedding", or of islands
            "averages".
        nbytes: bytes that a GPU sends, the sum over all micro-batches.
        ranks: of the group that takes part.
        leaves: whether the group is larger than a node, so that its messages cross the network.
        formula: where `nbytes` comes from, in the symbols of `SYMBOLS`.
    """

    kind: str
    nbytes: float
    ranks: int
    leaves: bool
    formula: str


SYMBOLS = {
    "L": "layers; L_e those with experts",
    "h, s": "width of the residual stream, tokens of a sample",
    "k d": "key heads times the width of a head",
    "b, m": "samples of a micro-batch, micro-batches of a step on each data-parallel rank",
    "t, p, c, e": "ranks of tensor, pipeline, context and expert parallelism",
    "n": "ranks that hold copies of the same parameters: data times context parallelism",
    "v": "parts of each stage of an interleaved pipeline",
    "T": "tokens of a micro-batch on one rank, b s / c",
    "K": "experts that each token goes to",
    "w": "passes: 2, forward and backward, and 3 where whole layers are recomputed",
    "a": "all-reduces of a pass: 2, after attention and after the feed-forward part; 1 where whole experts take "
    "tokens that are split over ranks already",
    "N": "parameters that a rank holds; N_e those of experts, which have groups of their own",
    "g": "bytes of an element of the gradient that is sent: 4, or 2",
    "V": "words of the vocabulary",
}
"""What the letters of formulas stand for. Activations and parameters travel in 2 bytes an element."""

MEMORY = {
    "parameters": "2 N, or 4 N/n where FSDP2 shards the float32 copy",
    "gradients": "g N, over n where they are sharded",
    "optimizer": "12 N, over n where it is sharded: a float32 copy and two moments; 8 N/n where FSDP2 shards the copy",
    "activations": "1.1 L/p (micro-batches in flight) s b h (10 + 24/t + 5 heads s/(h t)), without what is not kept "
    "(Korthikanti et al. 2022, Table 2)",
    "working": "1.1 times what a layer needs while its backward pass runs, or the logits if they need more: 12 b s V/t",
    "runtime": "6 GB for CUDA, NCCL and buckets",
    "method": "states of a method for gradients, and the last average where replicas are averaged",
}
"""Formulas of the parts of `gradwire.planning.device_memory`, which has them for any width, key heads and experts."""


def step_volumes(model: Transformer, layout: ParallelLayout, on: Hardware) -> tuple[Volume, ...]:
    """Return what a GPU of a stage in the middle sends in one step, by kind; kinds that send nothing are left out.

    Collectives count as on a ring: an all-reduce of X bytes among n ranks sends 2 (n - 1)/n X, an all-gather or a
    reduce-scatter (n - 1)/n X, an all-to-all (n - 1)/n X. `gradwire.planning.step_time` counts the same messages, and
    tests hold that its seconds are these bytes at the rate of the link where nothing is hidden. As there, messages of
    embeddings over `tp` and of the loss are left out.

    Args:
        model: what is trained.
        layout: how it is spread.
        on: whose nodes decide what crosses the network.

    Raises:
        SpecError: a layout that the model or the nodes cannot have.

    References:
        Shoeybi et al. 2019 (tensor), Korthikanti et al. 2022 (sequence), Narayanan et al. 2021, Section 3.2 (pipeline),
        Rajbhandari et al. 2020, Section 7 (data and parameters), Liu et al. 2023 (context).

    >>> from gradwire.planning import hardware, model
    >>> layout = ParallelLayout(dp=4, tp=8, pp=12, batch=1536, sharding="none", sequence_parallel=False)
    >>> {v.kind: round(v.nbytes / 1e9) for v in step_volumes(model("gpt3-175b"), layout, hardware("a100-80g"))}
    {'tensor': 1082, 'pipeline': 5, 'embedding': 0, 'data': 11}
    """
    layout.require(model, on)
    found = [
        *_layer_volumes(model, layout, on),
        *_pipeline(model, layout, on),
        *_replicas(model, layout, on),
    ]
    return tuple(volume for volume in found if volume.nbytes)


def _layer_volumes(model: Transformer, layout: ParallelLayout, on: Hardware) -> list[Volume]:
    """Messages inside of layers, of all micro-batches of a stage."""
    t, c, e, m = layout.tp, layout.cp, layout.ep, layout.micro_batches
    tokens, h = layout.micro * model.sequence / c, model.hidden
    share = model.expert_layers / model.layers
    layers = model.layers / layout.pp
    passes = 3 if layout.recompute == "full" else 2
    whole_experts = e > 1 and not model.shared_inner
    sums = 2 - (share if whole_experts else 0)
    reduced = passes * m * layers * sums * 2 * (t - 1) / t * 2 * tokens * h
    kind = "sequence" if layout.sequence_parallel else "tensor"
    sent = passes * m * layers * share * 2 * (e - 1) / e * 2 * tokens / t * model.chosen * h
    keys = max(1.0, model.keys / t) * model.head
    hops = (c - 1) * 2 * 2 * tokens * keys
    # a backward pass sends keys and values on with their gradients: twice as much
    ring = m * layers * (passes + 1) * hops
    reduces = "each an all-gather and a reduce-scatter" if layout.sequence_parallel else "each an all-reduce"
    return [
        Volume(kind, reduced, t, t > on.node, f"w m L/p a 2 (t - 1)/t 2 T h, {reduces}"),
        Volume("expert", sent, e, e > on.node, "w m L_e/p 2 (e - 1)/e 2 T/t K h"),
        Volume("context", ring, c, c * t > on.node, "(w + 1) m L/p (c - 1) 4 T k d/t"),
    ]


def _pipeline(model: Transformer, layout: ParallelLayout, on: Hardware) -> list[Volume]:
    """Activations to the next part of the model and their gradients to the one before."""
    p, v = layout.pp, layout.interleave
    if p == 1:
        return []
    tokens = layout.micro * model.sequence / layout.cp
    sent = layout.micro_batches * 2 * v * 2 * tokens * model.hidden / layout.tp
    volumes = [Volume("pipeline", sent, p, layout.gpus > on.node, "m 2 v 2 T h/t")]
    if model.tied:
        nbytes = layout.gradient_bytes * model.embedding_parameters / layout.tp
        formula = "g V h/t, the sum over the first and the last stage"
        volumes.append(Volume("embedding", nbytes, 2, layout.gpus > on.node, formula))
    return volumes


def _replicas(model: Transformer, layout: ParallelLayout, on: Hardware) -> list[Volume]:
    """Gradients to those that sum them, and parameters to those that compute with them."""
    held, m = stage_parameters(model, layout), layout.micro_batches
    groups = [(held.dense, layout.replicas, layout.tp), (held.expert, layout.expert_replicas, layout.expert_split)]
    ring = sum(count * (ranks - 1) / ranks for count, ranks, _ in groups)
    ranks = layout.replicas
    leaves = any(count and size * stride > on.node and size > 1 for count, size, stride in groups)
    parts = "N + (n_e - 1)/n_e N_e" if held.expert else "N"
    scatters, gathers = {"none": (0, 0), "optimizer": (1, 1), "gradients": (m, 1), "parameters": (m, 2 * m)}[
        layout.sharding
    ]
    if layout.sharding == "none":
        sent = 2 * layout.gradient_bytes * ring
        return [Volume("data", sent, ranks, leaves, f"2 g (n - 1)/n {parts}, an all-reduce")]
    each = {1: ""}
    return [
        Volume(
            "data",
            scatters * layout.gradient_bytes * ring,
            ranks,
            leaves,
            f"{each.get(scatters, 'm ')}g (n - 1)/n {parts}, a reduce-scatter",
        ),
        Volume(
            "parameters",
            gathers * PARAMETER_BYTES * ring,
            ranks,
            leaves,
            f"{each.get(gathers, '2 m ')}2 (n - 1)/n {parts}, an all-gather",
        ),
    ]
