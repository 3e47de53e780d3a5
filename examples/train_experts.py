"""Trains a network with a layer of experts, which are spread over all ranks, with an exchange in int8.

torchrun --nproc-per-node 2 examples/train_experts.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.parallel.moe import (
    ExchangeAxis,
    Experts,
    MoE,
    Payloads,
    SoftmaxTopK,
    expert_report,
    leave_experts_to_their_axis,
    switch_loss,
)

WIDTH, EXPERTS, TOKENS = 64, 8, 256


class Net(nn.Module):
    """A layer of experts between two dense layers."""

    def __init__(self, axis: ExchangeAxis, codec: str | None) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        payloads = Payloads.all(codec) if codec else None
        self.feed = MoE(
            SoftmaxTopK(WIDTH, EXPERTS, 2), Experts(WIDTH, 2 * WIDTH, EXPERTS, axis), axis, payloads=payloads
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores (tokens, 10)."""
        hidden = self.into(x)
        return self.out(hidden + self.feed(hidden))


def main() -> None:
    """Train for some steps, and print losses and what the layer of experts did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--codec", default="int8:64", help="of the exchange; an empty word sends rows as they are")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(ExchangeAxis(), arguments.codec or None)
    ddp = DistributedDataParallel(leave_experts_to_their_axis(net))
    session = gradwire.attach(ddp, "int8")  # gradients of all parameters but the experts
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    for step in range(arguments.steps):
        inputs = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), inputs[:, :10].argmax(1))
        assert net.feed.routing is not None
        (loss + 0.01 * switch_loss(net.feed.routing)).backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    print(f"rank {rank}: {expert_report(net)[0]}", flush=True)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
