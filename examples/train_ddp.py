"""A training script that knows nothing of gradwire.

gradwire run --method int4 --nproc 2 examples/train_ddp.py
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


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
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = 0
    if arguments.resume is not None:
        checkpoint = torch.load(arguments.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        begin = checkpoint["step"]
    ddp = DDP(model)

    for step in range(begin, arguments.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(64, 32, generator=data)
        targets = inputs[:, :10].argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        if rank == 0 and arguments.folder is not None and (step + 1) % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, arguments.folder / f"step-{step + 1}.pt")

    vector = nn.utils.parameters_to_vector(model.parameters())
    print(f"rank {rank} has parameters {hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
