"""A GPT over bytes whose parts know the axes of a mesh: stages of blocks, of attention and of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from gradwire.core.key import Key
from gradwire.parallel.moe import Experts, MoE, Payloads, SoftmaxTopK, switch_loss
from gradwire.parallel.moe.routers import normal
from gradwire.parallel.sequences import (
    AttentionMask,
    OverlappedColwiseParallel,
    OverlappedRowwiseParallel,
    ring_attention,
    ulysses_attention,
)
from gradwire.training.configuration import INNER, VOCABULARY
from gradwire.training.mesh import TrainingMesh


class GPTBlock(nn.Module):
    """Causal attention, then a feed-forward layer or one of experts, each behind a norm and beside the residual.

    Args:
        mesh: whose axes share it.
        layer: its number in the whole model.
    """

    def __init__(self, mesh: TrainingMesh, layer: int) -> None:
        super().__init__()
        self.mesh = mesh
        shape, width = mesh.configuration.model, mesh.configuration.model.width
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # rows of a head lie together: tp splits them by heads
        self.out = nn.Linear(width, width, bias=False)
        if shape.experts:
            self.feed: nn.Module = ExpertFeed(mesh, layer)
        else:
            self.up = nn.Linear(width, INNER * width, bias=False)
            self.down = nn.Linear(INNER * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions of this rank, width), and the same."""
        x = x + self.out(self.attend(self.qkv(self.norm_attention(x))))
        normed = self.norm_feed(x)
        if self.mesh.configuration.model.experts:
            return x + self.feed(normed)
        return x + self.down(functional.gelu(self.up(normed)))

    def attend(self, qkv: Tensor) -> Tensor:
        """What the heads of this rank see.

        Args:
            qkv: (batch, positions of this rank of cp, 3 x the part of the width that this rank of tp has).
        """
        mesh, axis = self.mesh, self.mesh.configuration.cp
        head = mesh.configuration.model.width // mesh.configuration.model.heads
        q, k, v = qkv.unflatten(-1, (-1, 3, head)).permute(3, 0, 2, 1, 4)
        if axis.ranks == 1:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attention: Any = ring_attention if axis.attention == "ring" else ulysses_attention
            mixed = attention(q, k, v, mesh.cp, mesh.configuration.around, AttentionMask(causal=True), codec=axis.codec)
        return mixed.transpose(1, 2).flatten(2)

    @staticmethod
    def styles(mesh: TrainingMesh) -> dict[str, ParallelStyle]:
        """How PyTorch's `parallelize_module` splits its matrices over tp."""
        axis, between = mesh.configuration.tp, mesh.between
        into: ParallelStyle
        out: ParallelStyle
        if not axis.sequence:
            into, out = ColwiseParallel(), RowwiseParallel()
        elif axis.overlap:
            into = OverlappedColwiseParallel(mesh.tp, between, codec=axis.codec)
            out = OverlappedRowwiseParallel(mesh.tp, between)
        else:
            into, out = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        found: dict[str, ParallelStyle] = {"qkv": into, "out": out}
        return found if mesh.configuration.model.experts else found | {"up": into, "down": out}


class ExpertFeed(nn.Module):
    """A layer of experts, whose loss of unbalanced choices goes into the backward pass where the layer stands.

    So a stage of a pipeline needs no other stage for it.
    """

    def __init__(self, mesh: TrainingMesh, layer: int) -> None:
        super().__init__()
        self.mesh, configuration = mesh, mesh.configuration
        shape, seed = configuration.model, configuration.data.seed * 1000 + layer
        router = SoftmaxTopK(shape.width, shape.experts, shape.chosen, seed=seed)
        experts = Experts(shape.width, INNER * shape.width, shape.experts, mesh.ep, seed=seed)
        self.layer = MoE(router, experts, mesh.ep, payloads=Payloads.all(configuration.ep.codec))
        # A loss that is a mean over all positions of the step. Ranks are averaged later, but those of tp are added up.
        self.of_position = (
            shape.balance_loss * configuration.averaged_ranks / (configuration.data.batch * shape.context)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, width), and the same."""
        y, positions = self.layer(x), x.shape[0] * x.shape[1]
        counts = positions * self.of_position
        if not (torch.is_grad_enabled() and counts):
            return y
        return _WithLoss.apply(y, switch_loss(self.layer.routing, over=self.mesh.tokens), counts)  # type: ignore[return-value]


class _WithLoss(torch.autograd.Function):
    """A tensor, whose backward pass is that of a loss too."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, counts: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.counts = counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.full_like(loss, ctx.counts), None


class GPTStage(nn.Module):
    """A stage of the model: some blocks, the embedding in the first one, and the scores of bytes in the last one.

    Parameters have the names and the initial values that they have in the whole model, whatever the axes are.

    Args:
        mesh: whose axes share it.
        layers: numbers of its blocks.
        is_first, is_last: among the stages.
    """

    places: Tensor

    def __init__(self, mesh: TrainingMesh, layers: Sequence[int], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        shape = mesh.configuration.model
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.embed = nn.Embedding(VOCABULARY, shape.width)
            self.position = nn.Parameter(torch.zeros(shape.context, shape.width))
            self.register_buffer("places", mesh.positions(), persistent=False)
        self.blocks = nn.ModuleDict({str(layer): GPTBlock(mesh, layer) for layer in layers})
        if is_last:
            self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialise(mesh.configuration.data.seed, shape.layers)
        self.to(getattr(torch, shape.dtype))
        if mesh.configuration.tp.ranks > 1:
            for block in self.blocks.values():
                parallelize_module(block, mesh.mesh["tp"], GPTBlock.styles(mesh))

    def forward(self, x: Tensor) -> Tensor:
        """Of bytes (batch, positions), or of activations (..., width): activations, or scores (..., 256)."""
        if self.is_first:
            x = self.embed(x) + self.position[self.places]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x

    def _initialise(self, seed: int, layers: int) -> None:
        """As GPT-2: the variance of the residual must not grow with depth. Experts have drawn already."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or ".feed." in name:
                continue
            deep = name.endswith(("out.weight", "down.weight"))
            deviation = 0.02 / math.sqrt(2 * layers) if deep else 0.02
            with torch.no_grad():
                parameter.copy_(normal(tuple(parameter.shape), deviation, Key(seed, name=name)))
