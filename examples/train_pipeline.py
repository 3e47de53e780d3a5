"""Trains a network in stages, one on each rank, with activations in int8.

torchrun --nproc-per-node 2 examples/train_pipeline.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.parallel.pipelines import Pipeline

WIDTH, SAMPLES, MICRO_BATCHES = 64, 8, 4


def main() -> None:
    """Train for some steps and print losses on the rank of the last stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--codec", default="int8")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    pipeline = Pipeline("1F1B", MICRO_BATCHES, arguments.codec)
    (index,) = pipeline.indices
    last = index == pipeline.shape.stages - 1
    torch.manual_seed(index)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity() if last else nn.ReLU())
    example = torch.empty(SAMPLES, WIDTH, device="meta", requires_grad=True)
    stage = pipeline.stage(module, index, input_args=example, output_args=example)
    schedule = pipeline.schedule([stage], nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    for step in range(arguments.steps):
        inputs = torch.randn(SAMPLES * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        given = {"target": inputs[:, :10].argmax(1), "losses": losses} if last else {}
        schedule.step(*((inputs,) if index == 0 else ()), **given)
        optimizer.step()
        if last and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
