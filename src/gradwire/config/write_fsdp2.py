"""A training script for FSDP2 that runs as it is, with a reason beside each setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradwire.adapters.fsdp2.form import sharded_method
from gradwire.adapters.fsdp2.gather import parameter_codec
from gradwire.config.setting import ConfigFile, Setting
from gradwire.config.shape import TrainingShape
from gradwire.core.errors import AttachError, SpecError
from gradwire.reducers.requirements import require_alike
from gradwire.spec import as_method, for_shards

SOURCE = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
OUR_PAGE = "docs/fsdp2.md of gradwire"
_RECOMPUTED = "checkpoint(block, inputs, use_reentrant=False)  # computed anew in the backward pass"
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}

_SCRIPT = '''\
"""A training by FSDP2, ranks: {world_size}{on_nodes}. Put in your own model, data and loss.

    torchrun --nnodes {nodes} --nproc-per-node {per_node} ... THIS_FILE
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {imported}, fully_shard
{import_checkpoint}{import_gradwire}
WORLD_SIZE, MICRO_BATCH, ACCUMULATION = {world_size}, {micro_batch}, {accumulation}  # {batch} samples a step
STEPS = int(os.environ.get("STEPS", "100"))


class Model(nn.Module):
    """Your model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = {run_block}
        return self.head(inputs)


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Your data: a micro-batch of this rank."""
    inputs = torch.randn(MICRO_BATCH, 64, device=device)
    return inputs, inputs[:, :8].sin()


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group({backend} if kind == "cuda" else "gloo")
    if dist.get_world_size() != WORLD_SIZE:
        raise SystemExit(f"this script is for {{WORLD_SIZE}} ranks, and there are {{dist.get_world_size()}}")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)

{body}


if __name__ == "__main__":
    main()
'''


def write_fsdp2(
    shape: TrainingShape,
    stage: int = 3,
    method: str | None = None,
    offload: bool = False,
    node_copies: bool = True,
    recompute: bool = False,
) -> ConfigFile:
    """Write a training script for FSDP2: the mesh, precision, what is sharded, and gradwire's line where one is wanted.

    With several nodes parameters are sharded inside each node, and nodes hold copies of each other (HSDP): gathers stay
    in the node, and gradients alone travel between nodes.

    Args:
        shape: ranks, batches and precision.
        stage: 3 to free gathered parameters after the forward pass, 2 to keep them for the backward pass.
        method: a spec for `gradwire.attach`, such as "int4" or "int4,parameters=int8"; None for FSDP2 alone.
        offload: whether shards and the optimizer stay in the memory of the host.
        node_copies: whether several nodes hold copies of each other; False shards over the ranks of all nodes.
        recompute: whether blocks are computed anew in the backward pass, which keeps their inputs alone.

    Raises:
        SpecError, CompositionError: a method that FSDP2 cannot be given, or numbers that make no training.

    >>> written = write_fsdp2(TrainingShape(16, micro_batch=4, batch=256, gpus_per_node=8), method="int4")
    >>> [line.strip() for line in written.text.splitlines() if "gradwire.attach" in line]
    ['session = gradwire.attach(model, "int4", replicate=mesh["replicate"])']
    """
    if stage not in (2, 3):
        raise SpecError(f"fully_shard has no stage {stage}: take 3, or 2 to keep parameters between the passes")
    if shape.nodes > 1 and shape.gpus_per_node == 1 and method is None:
        raise SpecError(
            "with one GPU in each node nothing could be sharded inside a node: leave gpus_per_node out to shard over "
            "all ranks, or give a method, such as int4"
        )
    nodes, per_node = shape.nodes, shape.world_size // shape.nodes
    shape = shape if node_copies else replace(shape, gpus_per_node=None)
    gradients = None if method is None else _checked(method, shape)
    settings = tuple(_settings(shape, stage, gradients, offload))
    body = "\n".join(f"    {line}".rstrip() for line in _body(shape, settings, gradients, offload))
    imported = ["MixedPrecisionPolicy", *(["CPUOffloadPolicy"] if offload else [])]
    text = _SCRIPT.format(
        world_size=shape.world_size,
        on_nodes="" if nodes == 1 else f", nodes: {nodes}",
        nodes=nodes,
        per_node=per_node,
        run_block=_RECOMPUTED if recompute else "block(inputs)",
        import_checkpoint="from torch.utils.checkpoint import checkpoint\n" if recompute else "",
        imported=", ".join(sorted(imported)),
        backend='"cpu:gloo,cuda:nccl"' if offload else '"nccl"',  # norms of offloaded gradients are summed on hosts
        import_gradwire="" if method is None else "\nimport gradwire\n",
        micro_batch=shape.micro_batch,
        accumulation=shape.accumulation(),
        batch=shape.accumulation() * shape.micro_batch * shape.world_size,
        body=body,
    )
    return ConfigFile(text, settings)


def _checked(method: str, shape: TrainingShape) -> str:
    """Return the method as `attach` will take it, after what `attach` would refuse was refused."""
    gradients, parameters = for_shards(method)
    if shape.nodes > 1:
        require_alike(as_method(gradients)).require_ranks(shape.nodes)
    else:
        sharded_method(gradients).require_ranks(shape.world_size)
    if parameters is not None:
        try:
            parameter_codec(parameters)
        except AttachError as error:  # a model is not there yet, so that it is the spec that is wrong
            raise SpecError(str(error)) from error
    return method


def _settings(shape: TrainingShape, stage: int, method: str | None, offload: bool) -> Iterator[Setting]:
    if shape.nodes > 1:
        inside = f"cut into shards for its {shape.gpus_per_node} GPUs: gathers stay inside"
        why = f"a copy for each of {shape.nodes} nodes, {inside}"
    else:
        why = f"a shard for each rank: {shape.world_size} in all"
    yield Setting("mesh", " x ".join(map(str, _sizes(shape))), why, SOURCE)
    computed = "products and gathered parameters take half of the memory; shards stay as they are"
    computed = computed if shape.precision != "fp32" else "nothing is rounded, for twice the bytes of 16 bits"
    yield Setting("param_dtype", shape.precision, computed, SOURCE)
    summed = "sums over ranks keep their small parts; twice the bytes of 16 bits"
    summed = summed if shape.reduce == "fp32" else "half of the bytes of fp32; each addition rounds"
    yield Setting("reduce_dtype", shape.reduce, summed, SOURCE)
    kept = "parameters are gathered again in the backward pass, and a layer alone is held at a time"
    kept = kept if stage == 3 else "parameters are gathered once in a step, and all are held until the backward pass"
    yield Setting("reshard_after_forward", stage == 3, kept, SOURCE)
    if offload:
        yield Setting(
            "offload_policy", "CPUOffloadPolicy()", "shards and the optimizer stay in the host's memory", SOURCE
        )
    if shape.accumulation() > 1:
        why = f"gradients of {shape.accumulation()} micro-batches are summed up before they travel"
        yield Setting("set_requires_gradient_sync", "the last micro-batch", why, SOURCE)
    if shape.precision == "fp16":
        yield Setting("GradScaler", "on", "the scale follows the gradients, so that few are lost to zero", SOURCE)
    if method is not None:
        where = "between nodes" if shape.nodes > 1 else "between all ranks"
        yield Setting("gradwire.attach", method, f"gradients travel {where} by this method", OUR_PAGE)


def _sizes(shape: TrainingShape) -> tuple[int, ...]:
    return (shape.nodes, shape.world_size // shape.nodes) if shape.nodes > 1 else (shape.world_size,)


def _body(shape: TrainingShape, settings: tuple[Setting, ...], method: str | None, offload: bool) -> Iterator[str]:
    """The lines of the script's main function."""
    why = {each.name: each.why for each in settings}
    names = '("replicate", "shard")' if shape.nodes > 1 else '("shard",)'
    over = 'mesh["shard"]' if shape.nodes > 1 and method is not None else "mesh"
    scaler = shape.precision == "fp16"
    yield f"# {why['mesh']}"
    yield f"mesh = init_device_mesh(kind, {_sizes(shape)}, mesh_dim_names={names})"
    yield "policy = MixedPrecisionPolicy("
    yield f"    # {why['param_dtype']}"
    yield f"    param_dtype={_DTYPES[shape.precision]},"
    yield f"    # {why['reduce_dtype']}"
    yield f"    reduce_dtype={_DTYPES[shape.reduce]},"
    yield ")"
    yield f"# {why['reshard_after_forward']}"
    reshard = next(each.value for each in settings if each.name == "reshard_after_forward")
    yield f"sharding = dict(mesh={over}, mp_policy=policy, reshard_after_forward={reshard})"
    if offload:
        yield f"# {why['offload_policy']}"
        yield 'sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=kind == "cuda")'
    yield ""
    yield "torch.manual_seed(0)  # all ranks begin with the same parameters"
    yield "model = Model()"
    yield "for block in model.blocks:  # one by one, so that one alone is gathered at a time"
    yield "    fully_shard(block, **sharding)"
    yield "fully_shard(model, **sharding)  # and what is in no block"
    if scaler:
        yield "scaler = torch.amp.GradScaler(kind)"
    if method is not None:
        also = ', replicate=mesh["replicate"]' if shape.nodes > 1 else ""
        also += ", scaler=scaler" if scaler else ""
        yield f"# {why['gradwire.attach']}"
        yield f'session = gradwire.attach(model, "{method}"{also})'
    yield "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)"
    yield ""
    yield "torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own"
    yield "for step in range(STEPS):"
    yield "    for micro in range(ACCUMULATION):"
    if shape.accumulation() > 1:
        yield f"        # {why['set_requires_gradient_sync']}"
        yield "        model.set_requires_gradient_sync(micro == ACCUMULATION - 1)"
    yield "        inputs, targets = batch(device)"
    yield "        loss = nn.functional.mse_loss(model(inputs).float(), targets) / ACCUMULATION"
    yield f"        {'scaler.scale(loss)' if scaler else 'loss'}.backward()"
    if scaler:
        yield "    scaler.unscale_(optimizer)"
    yield "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    yield f"    {'scaler.step(optimizer)' if scaler else 'optimizer.step()'}"
    if scaler:
        yield "    scaler.update()"
    yield "    optimizer.zero_grad()"
    yield "    if dist.get_rank() == 0 and step % 10 == 0:"
    yield '        print(f"step {step}: loss {loss.item() * ACCUMULATION:.4f}", flush=True)'
    if method is not None:
        yield "if dist.get_rank() == 0:"
        yield "    print(session.report())"
        yield "session.close()"
    yield "dist.destroy_process_group()"
