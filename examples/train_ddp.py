"""A training script that knows nothing of gradwire.

gradwire run --method int4 --nproc 2 examples/train_ddp.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    """Train a small network, and leave a checkpoint where one is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--resume", type=Path, metavar="FILE")
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
    print(f"rank {rank}: loss {loss.item():.3f} after {arguments.steps} steps", flush=True)

    if rank == 0 and arguments.save is not None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}
        torch.save(state, arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
