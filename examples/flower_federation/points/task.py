"""What the server and the clients share: the model, the data and the settings."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradwire.core.key import Key
from gradwire.federated import SGD, Client, FedNova

CLIENTS = 10
LOCAL = SGD(lr=0.2)
METHOD = FedNova()
UPDATE = "topk:0.25"
"""A quarter of each update is sent; what is left out is kept at the client and added to its next one."""


def model() -> nn.Module:
    """Return the model as it begins, alike on the server and on every client."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(64, 10)


def points(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """So many points in 64 dimensions, each near the middle of one of 10 classes."""
    middles = torch.randn(10, 64, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (number,), generator=generator)
    return middles[labels] + 2 * torch.randn(number, 64, generator=generator), labels


def client(i: int) -> Client:
    """Client i has points of four of the classes, more of them the higher i, and makes 1 to 10 local steps."""
    inputs, labels = points(100 + 20 * i, seed=i)
    mine = torch.isin((labels - i) % 10, torch.arange(4))
    inputs, labels = inputs[mine], labels[mine]

    def loss(model: nn.Module, key: Key) -> Tensor:
        batch = torch.arange(16) + 16 * (key.micro_batch or 0)
        return cross_entropy(model(inputs[batch % len(inputs)]), labels[batch % len(labels)])

    return Client(examples=len(inputs), loss=loss, steps=1 + i)


def accuracy(model: nn.Module) -> float:
    """The share of points that nobody has trained on whose class the model finds."""
    inputs, labels = points(2000, seed=12345)
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())
