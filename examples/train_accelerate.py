"""Hugging Face Accelerate with compressed gradients.

torchrun --nproc-per-node 2 examples/train_accelerate.py
"""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.adapters.accelerate import attach


def main() -> None:
    """Train a small network, with a checkpoint every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where checkpoints go")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(1280, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    session = attach(accelerator, model, "int4")  # this line is all that gradwire needs
    begin = 0
    if arguments.resume is not None:
        accelerator.load_state(str(arguments.resume))
        begin = int(arguments.resume.name.removeprefix("step-"))

    for step, (batch, targets) in enumerate(loader, start=1):
        if step <= begin:
            continue
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
        optimizer.step()
        if arguments.folder is not None and step % 10 == 0:
            accelerator.save_state(str(arguments.folder / f"step-{step}"))
        if step == arguments.steps:
            break

    rank = accelerator.process_index
    vector = nn.utils.parameters_to_vector(model.parameters())
    print(f"rank {rank} has parameters {hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()}")
    if session is not None:
        stats = session.stats()
        print(f"rank {rank} sent {stats.wire_bytes} bytes where fp32 sends {stats.dense_wire_bytes}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
