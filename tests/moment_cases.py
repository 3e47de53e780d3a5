"""What each rank does in the tests of averaged moments: some ranks see what others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from gradwire.sync import LocalSGD
from gradwire.tasks.builtin import load_digits

DEADLINE_S = 60.0
TOKENS, WIDTH, CLASSES, UNITS = 120, 8, 6, 48
EVERY = 4

OPTIMIZERS: dict[str, Callable[[Any, float], Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
}
"""All of PyTorch's that divide a first moment by a second one."""


class Embedded(nn.Module):
    """Classes of a few tokens; each rank sees tokens of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))

    def batch(self, generator: torch.Generator, rank: int, world_size: int, size: int = 16) -> tuple[Tensor, Tensor]:
        per_rank = TOKENS // world_size
        tokens = torch.randint(rank * per_rank, (rank + 1) * per_rank, (size, 4), generator=generator)
        scores = torch.randn(TOKENS, CLASSES, generator=torch.Generator().manual_seed(5))
        return tokens, scores[tokens].mean(1).argmax(1)


class Halves(nn.Module):
    """Digits; on each rank other hidden units are dead while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(64, UNITS), nn.Linear(UNITS, 10)
        self.alive = torch.ones(UNITS)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.inside(images.flatten(1)).relu() * self.alive)

    def batch(self, generator: torch.Generator, rank: int, world_size: int, size: int = 16) -> tuple[Tensor, Tensor]:
        self.alive = (torch.arange(UNITS) % world_size == rank).float() * world_size
        data = load_digits()
        chosen = torch.randint(len(data.train_labels), (size,), generator=generator)
        return data.train_images[chosen], data.train_labels[chosen]

    def held_out(self, world_size: int) -> list[tuple[Tensor, Tensor]]:
        self.alive = torch.ones(UNITS)
        return [(load_digits().test_images, load_digits().test_labels)]


MODELS: dict[str, Callable[[], Embedded | Halves]] = {"tokens": Embedded, "dead": Halves}


def loss_of(model: Embedded | Halves, world_size: int) -> float:
    """On what no rank has trained on, of all of their kinds."""
    if isinstance(model, Halves):
        batches = model.held_out(world_size)
    else:
        generator = torch.Generator().manual_seed(99)
        batches = [model.batch(generator, rank, world_size, 400) for rank in range(world_size)]
    with torch.no_grad():
        return sum(float(functional.cross_entropy(model(x), y)) for x, y in batches) / len(batches)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def trained(rank: int, world_size: int, which: str, optimizer: str, steps: int, **settings: Any) -> dict[str, float]:
    """The longest step of any element, in learning rates, the largest parameter, and the loss at the end."""
    torch.manual_seed(1)
    model, lr, longest = MODELS[which](), 3e-3, 0.0
    inner = OPTIMIZERS[optimizer](model.parameters(), lr)
    with LocalSGD(inner, model, EVERY, deadline_s=DEADLINE_S, **settings) as averaged:

        def note(*_: object) -> None:
            nonlocal longest
            longest = max(longest, float((flat(model) - before).abs().max()) / lr)

        inner.register_step_post_hook(note)
        for step in range(steps):
            inputs, labels = model.batch(torch.Generator().manual_seed(100 * step + rank), rank, world_size)
            averaged.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            before = flat(model)
            averaged.step()
        averaged.sync()
        sent = averaged.stats().wire_bytes
        bounded = all(
            bool((state["exp_avg"].abs() <= 7.3 * state["exp_avg_sq"].sqrt()).all()) and state["exp_avg_sq"].min() >= 0
            for state in inner.state.values()
            if "exp_avg_sq" in state
        )
    largest = float(flat(model).abs().max())
    return {"longest": longest, "largest": largest, "loss": loss_of(model, world_size), "bytes": sent, "bound": bounded}


def several(rank: int, world_size: int, jobs: list[list[Any]]) -> list[dict[str, float]]:
    return [trained(rank, world_size, which, name, steps, **settings) for which, name, steps, settings in jobs]
