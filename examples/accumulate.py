"""Trains on sequences of uneven length, 8 micro-batches to a step, whose gradients are exchanged once and in 4 bits.

torchrun --nproc-per-node 2 examples/accumulate.py
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

WORDS, WIDTH, PAD = 64, 32, -100


def batches_of(step: int, rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of numbers that count upwards, each of its own length: the words, and which word follows each."""
    data = torch.Generator().manual_seed(1000 * step + rank)
    batches: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        words = (torch.randint(WORDS, (4, 1), generator=data) + torch.arange(17)) % WORDS
        lengths = torch.randint(2, 17, (4, 1), generator=data)
        batches.append((words[:, :-1], words[:, 1:].where(torch.arange(16) < lengths, PAD)))
    return batches


def tokens(batch: tuple[Tensor, Tensor]) -> int:
    """Those that count for the loss."""
    return int((batch[1] != PAD).sum())


def main() -> None:
    """Train for some steps and print what each rank has sent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--method", default="int4")
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)))
    session = gradwire.attach(ddp, arguments.method)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-2)

    for step in range(arguments.steps):
        batches = batches_of(step, rank, arguments.micro_batches)
        with gradwire.accumulate(session, batches, tokens) as window:
            total = 0.0
            for words, following in window:
                loss = nn.functional.cross_entropy(ddp(words).flatten(0, 1), following.flatten(), reduction="sum")
                window.loss(loss).backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {total / sum(map(tokens, batches)):.3f} a token", flush=True)

    stats = session.stats()
    vector = nn.utils.parameters_to_vector(ddp.parameters())
    print(
        f"rank {rank} sent {stats.wire_bytes} bytes where fp32 sends {stats.dense_wire_bytes}, in {stats.steps} steps; "
        f"it has parameters {hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()}",
        flush=True,
    )
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
