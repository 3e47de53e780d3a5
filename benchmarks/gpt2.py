"""GPT-2's small size as a task: `--task gpt2:task`. Its text is random, since only times are measured with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.tasks.builtin import ByteGPT
from gradwire.tasks.task import Task

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 12, 768, 12, 50_257, 64


def model(tokens: int = TOKENS) -> nn.Module:
    """Return 124 M parameters: GPT-2 without biases in its products, for so many tokens at most."""
    torch.manual_seed(0)
    made = ByteGPT(layers=LAYERS, width=WIDTH, heads=HEADS, context=tokens)
    made.embed = nn.Embedding(VOCABULARY, WIDTH)
    return made


def task(seed: int) -> Task:
    """Return one that trains by plain SGD on one line a rank."""

    def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        words = torch.Generator().manual_seed(1000 * seed + rank)
        line = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=words)
        return line[:, :-1], line[:, 1:]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return Task(model(), batch, loss, lambda trained: 0.0, optimizer=lambda given: torch.optim.SGD(given, 1e-3))
