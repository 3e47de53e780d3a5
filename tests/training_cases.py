"""What ranks do in the tests of a training on a mesh."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradwire.core.errors import GradwireError
from gradwire.tasks.task import warm_cosine
from gradwire.training import MeshTrainer, configuration_of, load_training, save_training
from gradwire.training.trainer import FLOOR

Tables = Mapping[str, Mapping[str, Any]]


def trained(rank: int, world_size: int, layouts: Sequence[Tables], steps: int) -> list[dict[str, Any]]:
    """The losses and norms of a training under each layout, and a digest of what all ranks must have alike."""
    return [_trained(tables, steps) for tables in layouts]


def _trained(tables: Tables, steps: int) -> dict[str, Any]:
    with closing(MeshTrainer(configuration_of(tables))) as trainer:
        figures = [tuple(trainer.step()) for _ in range(steps)]
        return {"figures": figures, "parts": parts(trainer)}


def parts(trainer: MeshTrainer) -> dict[str, str]:
    """A digest of what this rank has of each parameter, by its name and the part that it is."""
    mesh = trainer.mesh
    places = {"whole": "", "tp": f" tp {mesh.tp.place}", "ep": f" ep {mesh.ep.place}"}
    return {
        name + places[each.kind]: hashlib.sha256(each.local.detach().numpy().tobytes()).hexdigest()
        for name, each in trainer.tensors.items()
    }


def resumed(
    rank: int, world_size: int, tables: Tables, steps: int, folder: str, others: Sequence[Tables], drop_owed: bool
) -> dict[str, Any]:
    """Train twice as many steps, saving after half; then go on from that save under each other layout."""
    found: dict[str, Any] = {}
    with closing(MeshTrainer(configuration_of(tables))) as trainer:
        for _ in range(steps):
            trainer.step()
        save_training(trainer, folder)
        found["straight"] = [tuple(trainer.step()) for _ in range(steps)]
        found["parts"] = parts(trainer)
    found["others"] = [_gone_on(each, steps, folder, drop_owed) for each in others]
    return found


def _gone_on(tables: Tables, steps: int, folder: str, drop_owed: bool) -> dict[str, Any]:
    with closing(MeshTrainer(configuration_of(tables))) as trainer:
        try:
            load_training(trainer, folder, drop_owed=drop_owed)
        except GradwireError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"figures": [tuple(trainer.step()) for _ in range(steps)], "parts": parts(trainer)}


def refused(rank: int, world_size: int, tables: Sequence[Tables]) -> str:
    """What a rank is told that is given one of these configurations."""
    try:
        MeshTrainer(configuration_of(tables[rank % len(tables)])).close()
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def counted(rank: int, world_size: int, tables: Tables) -> list[int]:
    """The parameters that the configuration says, and those of the model."""
    configuration = configuration_of(tables)
    with closing(MeshTrainer(configuration)) as trainer:
        return [configuration.model.parameters, sum(each.local.numel() for each in trainer.tensors.values())]


# A twin that knows no mesh ------------------------------------------------------------------------------------------


def beside_twin(rank: int, world_size: int, tables: Tables, steps: int) -> dict[str, Any]:
    """A training in one process, and the same one written without gradwire.parallel."""
    configuration = configuration_of(tables)
    with closing(MeshTrainer(configuration)) as trainer:
        weights = {name: each.local.detach().clone().requires_grad_() for name, each in trainer.tensors.items()}
        told, settings = configuration.steps, configuration.data
        optimizer = torch.optim.AdamW(weights.values(), lr=told.lr, betas=(0.9, 0.95), weight_decay=told.weight_decay)
        twin: list[tuple[float, float]] = []
        for step in range(steps):
            optimizer.zero_grad()
            inputs, targets = trainer.batch(step)
            losses = [
                _twin_loss(weights, configuration.model, part, target)
                for part, target in zip(
                    inputs.chunk(settings.micro_batches), targets.chunk(settings.micro_batches), strict=True
                )
            ]
            torch.stack([whole for whole, _ in losses]).mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), told.clip_norm or math.inf)
            factor = warm_cosine(step, step / told.count, warm_up=told.warm_up, floor=FLOOR)
            optimizer.param_groups[0]["lr"] = told.lr * factor
            optimizer.step()
            twin.append((float(torch.stack([loss.detach() for _, loss in losses]).mean()), float(norm)))
        return {"twin": twin, "figures": [tuple(trainer.step()) for _ in range(steps)]}


def _twin_loss(weights: Mapping[str, Tensor], shape: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss that is trained, and the part of it that is told."""
    x = weights["embed.weight"][inputs] + weights["position"]
    unbalanced = x.new_zeros(())
    for layer in range(shape.layers):
        of_block = {name.partition(f"blocks.{layer}.")[2]: w for name, w in weights.items()}
        normed = _norm(x, of_block, "norm_attention")
        qkv = (normed @ of_block["qkv.weight"].T).unflatten(-1, (shape.heads, 3, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(3))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ of_block["out.weight"].T
        normed = _norm(x, of_block, "norm_feed")
        if shape.experts:
            fed, loss = _twin_experts(of_block, shape, normed.flatten(0, 1))
            x, unbalanced = x + fed.view_as(x), unbalanced + loss
        else:
            x = x + functional.gelu(normed @ of_block["up.weight"].T) @ of_block["down.weight"].T
    scores = _norm(x, weights, "norm") @ weights["head.weight"].T
    told = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    return told + shape.balance_loss * unbalanced, told


def _norm(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _twin_experts(weights: Mapping[str, Tensor], shape: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert computes every token, and all but the chosen ones count nothing."""
    scores = (tokens @ weights["feed.layer.router.weight"].T).softmax(-1)
    top, chosen = scores.topk(shape.chosen)
    counts = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(1, keepdim=True))
    into, out = weights["feed.layer.experts.w_in"], weights["feed.layer.experts.w_out"]
    outputs = torch.stack([functional.gelu(tokens @ w) @ v for w, v in zip(into, out, strict=True)], 1)
    shares = torch.bincount(chosen.flatten(), minlength=shape.experts).to(scores) / chosen.numel()
    return (counts.unsqueeze(-1) * outputs).sum(1), shape.experts * (shares * scores.mean(0)).sum()
