"""The Trainer of Hugging Face Transformers with compressed gradients.

torchrun --nproc-per-node 2 examples/train_transformers.py
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed

from gradwire.adapters.transformers import attach


class Net(nn.Module):
    """A small network that returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy of a batch."""
        outputs = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def main() -> None:
    """Train a small network, with a checkpoint every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where checkpoints go")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()

    set_seed(0)
    inputs = torch.randn(2560, 32)
    data = [{"inputs": x, "labels": x[:10].argmax()} for x in inputs]
    model = Net()
    options = TrainingArguments(
        output_dir=str(arguments.folder or tempfile.gettempdir()),
        max_steps=arguments.steps,
        per_device_train_batch_size=32,
        save_strategy="steps" if arguments.folder else "no",
        save_steps=10,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model, options, train_dataset=data)  # type: ignore[arg-type] - a list is a dataset
    callback = attach(trainer, "int4")  # this line is all that gradwire needs
    trainer.train(resume_from_checkpoint=str(arguments.resume) if arguments.resume else None)

    vector = nn.utils.parameters_to_vector(model.parameters())
    rank = options.process_index
    print(f"rank {rank} has parameters {hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()}")
    if callback.session is not None:
        stats = callback.session.stats()
        print(f"rank {rank} sent {stats.wire_bytes} bytes where fp32 sends {stats.dense_wire_bytes}", flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
