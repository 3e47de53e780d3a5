"""A training script with FSDP2 that knows nothing of gradwire.

gradwire run --method int4 --nproc 2 examples/train_fsdp2.py
"""

# pyright: reportPrivateImportUsage=false

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train a small network, with a checkpoint every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where checkpoints go")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = 0
    if arguments.resume is not None:
        names, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": names, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=arguments.resume)
        set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=moments)
        begin = state["step"]

    for step in range(begin, arguments.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(64, 32, generator=data)
        targets = inputs[:, :10].argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if arguments.folder is not None and (step + 1) % 10 == 0:
            names, moments = get_state_dict(model, optimizer)
            state = {"model": names, "optimizer": moments, "step": step + 1}
            dcp.save(state, checkpoint_id=arguments.folder / f"step-{step + 1}")

    whole: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    vector = nn.utils.parameters_to_vector(whole.values())
    print(f"rank {rank} has parameters {hashlib.sha256(vector.numpy().tobytes()).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
