"""Lightning with compressed gradients.

torchrun --nproc-per-node 2 examples/train_lightning.py
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.adapters.lightning import GradwireCallback


class Net(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Cross entropy of a batch."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with weight decay."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train a small network, with a checkpoint every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where checkpoints go")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()

    seed_everything(0, verbose=False)
    model = Net()
    inputs = torch.randn(640, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32)
    callback = GradwireCallback("int4")  # this callback is all that gradwire needs
    checkpoints = ModelCheckpoint(
        arguments.folder, "{step}", every_n_train_steps=10, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_steps=arguments.steps,
        callbacks=[callback, checkpoints] if arguments.folder else [callback],
        enable_checkpointing=arguments.folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=arguments.resume)

    rank = trainer.global_rank
    vector = nn.utils.parameters_to_vector(model.parameters())
    print(f"rank {rank} has parameters {hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()}")
    if callback.session is not None:
        stats = callback.session.stats()
        print(f"rank {rank} sent {stats.wire_bytes} bytes where fp32 sends {stats.dense_wire_bytes}", flush=True)


if __name__ == "__main__":
    main()
